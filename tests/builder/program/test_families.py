"""The compiled models of every family against the logits of transformers."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.builder.agreement import Tokens
from tests.builder.compiled_model import GENERIC, HOST, OTHERS, CompiledModel, Result, block_table
from tests.builder.golden_families import F32, POSITIONS, PROMPT, GoldenFamily, stored_weights
from tests.builder.specs import with_key_size
from tests.compiled_programs import compile_program

pytestmark = pytest.mark.slow

OPTIONS = BuildOptions(
    weights="f32", kv="f32", prefill_batch_sizes=(1,), decode_batch_sizes=(2,), chunk_sizes=(), top_k=8
)
CHUNK = 48


# Programs read all scalings of the rotation alike, from tables; the tests on sources have every scaling.
COMPILED = (
    "llama",
    "granite",
    "phi4-mini",
    "qwen2",
    "qwen3-bias",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "smollm3-listed",
    "olmo2",
    "ministral3",
    "gemma3",
    "gemma2",
    "gemma4",
    "gemma4-e",
    "gemma4-moe",
    "gpt-oss",
    "deepseek2",
    "deepseek2-groups",
    "deepseek3",
    "glm4-moe-lite",
    "glm4-moe",
    "qwen35",
    "qwen35-moe",
    "qwen3-next",
)

# Of which plain linalg computes more than the other names of COMPILED have.
GENERIC_TOO = ("qwen3-moe-mixed", "gemma3", "gemma4-e", "gemma4-moe", "gpt-oss", "deepseek3")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, HOST) for name in COMPILED),
        *((name, GENERIC) for name in GENERIC_TOO),
    ],
)
def test_every_entry_has_the_logits_of_transformers(
    device: Device, tmp_path: Path, name: str, target: Target
) -> None:
    """The prompt up to each position, in chunks; its last token by a decode; its last chunk by an extend."""
    family = GoldenFamily.of(name)
    source = HfDirectorySource(family.write_hf(tmp_path / "source"))
    weights = stored_weights(source)
    model = CompiledModel.build(source.spec, OPTIONS, device, tmp_path, target, weights)
    for count, expected in zip(POSITIONS, family.logits, strict=True):
        for logits in compute(model, PROMPT[:count]):
            np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def compute(model: CompiledModel, prompt: Tokens) -> list[F32]:
    """The logits of the last token from a decode, a prefill and an extend, each behind what is before it."""
    count = len(prompt)
    table = block_table(np.random.default_rng(count), [-(-count // 16), 0], -(-count // CHUNK) * CHUNK // 16)

    def prefill(start: int, end: int) -> Result:
        tokens = np.zeros((1, CHUNK), np.int64)
        tokens[0, : end - start] = prompt[start:end]
        return model.prefill("prefill_bs1", tokens, np.array([start]), np.array([end]), table[:1])

    for start in range(0, count, CHUNK):
        prefill(start, min(start + CHUNK, count - 1))
    last = np.array([[prompt[-1]], [0]])
    decoded = model.decode("decode_bs2", last, np.array([count - 1, 0]), table)
    prefilled = prefill(start, count)
    extended = model.extend(
        "extend", prompt[start:], np.array([0]), np.array([start]), np.array([count]), table[:1]
    )
    return [decoded.logits[0], prefilled.logits[0], extended.logits[0]]


KINDS_OF_CPU: list[tuple[str, WeightType]] = [
    *(("sapphirerapids", "bf16"), ("sapphirerapids", "q4"), ("sapphirerapids", "int8"), ("znver4", "int8")),
    *(("znver4", "q4"), ("cascadelake", "q8_0"), ("alderlake", "q4"), ("haswell", "q8_0")),
]


@pytest.mark.parametrize(
    ("cpu", "weights", "name"),
    [(*kind, name) for kind, name in zip(KINDS_OF_CPU, cycle(OTHERS), strict=False)],
)
def test_all_features_compile_for_every_kind_of_cpu(cpu: str, weights: WeightType, name: str) -> None:
    """In whole tiles, for AMX."""
    spec = with_key_size(OTHERS[name], 32)
    target = resolve_target(f"cpu:{cpu}")
    compile_program(ModelModule(spec, replace(OPTIONS, weights=weights, kv="bf16"), target).text(), target)
