"""Upstream's toy Llama as exported by upstream, from tests/golden/toy_llama (make_toy_llama.py)."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import tokenizers

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.target import resolve_target
from tests.builder.compiled_model import write_parameters
from tests.compiled_programs import compile_program

FOLDER = Path(__file__).parents[1] / "golden" / "toy_llama"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden.json").read_text())
PIPELINE = "pipeline"  # of two stages, each for a device of its own
PROGRAMS: tuple[str, ...] = tuple(name for name in GOLDEN["programs"] if name != PIPELINE)
VOCABULARY: int = GOLDEN["weights"]["tensors"]["token_embd.weight"][1]


@dataclass(frozen=True)
class Case:
    """A prompt and the tokens that upstream's model generates after it in torch."""

    prompt_token_ids: list[int]
    token_ids: list[int]


CASES = [Case(case["prompt_ids"], case["token_ids"]) for case in GOLDEN["cases"]]


def write_toy_llama(program: str, folder: Path) -> Artifact:
    """The files that upstream's server is started with, with the program compiled for this CPU.

    Of a program of several stages, for as many devices that all are this CPU.
    """
    parameters, config, tokenizer = (folder / name for name in ("toy.irpa", "config.json", "tokenizer.json"))
    write_parameters(make_weights(), parameters)
    config.write_text(json.dumps(GOLDEN["programs"][program]["config"]))
    write_tokenizer(tokenizer)
    return Artifact.from_files(
        vmfb=_compile(program), parameters=(parameters,), model_config=config, tokenizer_json=tokenizer
    )


def make_weights() -> dict[str, npt.NDArray[Any]]:
    """The values that torch's generator gives for the golden's seed, checked against its digest.

    `torch.rand` takes the low 24 bits of each number of MT19937; upstream maps them to [-1, 1).
    """
    numbers = np.random.RandomState(GOLDEN["seed"])
    weights = {}
    for name, (dtype, *shape) in GOLDEN["weights"]["tensors"].items():
        bits = numbers.randint(0, 2**32, size=shape, dtype=np.uint32) & 0xFFFFFF
        weights[name] = (bits.astype(np.float32) * np.float32(2**-23) - np.float32(1)).astype(dtype)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights.values()))
    assert digest.hexdigest() == GOLDEN["weights"]["sha256"]
    return weights


def write_tokenizer(path: Path) -> None:
    """A tokenizer with one word for each of the model's tokens: `w0`, `w1`, ..."""
    words = {f"w{token}": token for token in range(VOCABULARY)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(path))


def _compile(program: str) -> Path:
    """Compiled as upstream documents it, for this CPU; kept in the build cache, as it takes seconds."""
    text = lzma.decompress((FOLDER / f"{program}.mlir.xz").read_bytes())
    digest = hashlib.sha256(text).hexdigest()
    assert digest == GOLDEN["programs"][program]["sha256"]
    target = resolve_target("cpu")
    flags = _with_devices(target.flags, len(stages_of(program)))
    return compile_program(text.decode(), replace(target, flags=flags))


def stages_of(program: str) -> Sequence[int]:
    """The elements of a page in each stage's slab."""
    return cast(
        Sequence[int],
        GOLDEN["programs"][program]["config"]["paged_kv_cache"]["paged_kv_block_size_elements_per_device"],
    )


def _with_devices(flags: Sequence[str], count: int) -> tuple[str, ...]:
    """`flags` for so many devices, `@__device_0` and so on, instead of one."""
    if count == 1:
        return tuple(flags)
    one = "--iree-hal-target-device=local"
    return (*(f"{one}[{index}]" for index in range(count)), *(flag for flag in flags if flag != one))
