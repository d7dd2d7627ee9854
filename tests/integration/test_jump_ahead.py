"""Jump-ahead on a real program: the same answers as without, in fewer steps, beside other requests."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLTokenizer

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar, compiled
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.conftest import BuildTiny
from tests.hip import EmulatedGpus
from tests.integration.test_speculation import ARRIVALS, CHIP, MODES, Answer, answers
from tests.runtimes import needs_shortfin

pytestmark = pytest.mark.slow

KEYS = ("name_of_the_city", "population_in_millions", "is_the_capital_of_its_country")
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": list(KEYS),
    "properties": {
        KEYS[0]: {"type": "string", "maxLength": 8},
        KEYS[1]: {"type": "integer", "minimum": 0, "maximum": 99},
        KEYS[2]: {"type": "boolean"},
    },
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "structured": True},
    {"temperature": 0.9, "seed": 3, "structured": True},
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 4, "logprobs": 2, "structured": True, "max_tokens": 20},  # draws every token
    {"temperature": 0.4, "top_k": 5, "seed": 2},
)
assert len(KINDS) == len(ARRIVALS)


def grammar_of(tokenizer: Tokenizer, *, is_compact: bool) -> CompiledGrammar:
    source = GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), is_compact=is_compact)
    return compiled(source, LLTokenizer(tokenizer.to_json(), eos_token=sorted(tokenizer.eos_token_ids)))


def calls(tokenizer: Tokenizer, *, is_compact: bool = True) -> list[GenerateCall]:
    grammar = grammar_of(tokenizer, is_compact=is_compact)
    asked = []
    for index, kind in enumerate(KINDS):
        params = {name: value for name, value in kind.items() if name != "structured"}
        is_structured = "structured" in kind
        asked.append(
            GenerateCall(
                request_id=str(index),
                prompt_token_ids=tuple(tokenizer.encode(f"Request {index}: ") * 3),
                params=SamplingParams(
                    **{"max_tokens": 160 if is_structured else 40, **params},
                    output_grammar=grammar if is_structured else None,
                ),
            )
        )
    return asked


def run(
    artifact: Artifact, asked: list[GenerateCall], *, jump_ahead: bool = True, **options: Any
) -> tuple[list[Answer], EngineStats]:
    ends = Tokenizer.load(artifact.tokenizer, artifact.tokenizer_config).eos_token_ids
    settings = EngineSettings(**options)
    with closing(open_device(settings.device, settings.runtime)) as device:
        files = (artifact.config, artifact.vmfb, artifact.parameters, frozenset(ends))
        engine = make_engine(device, *files, settings, jump_ahead=jump_ahead)
        return answers(engine, asked), engine.stats()


@pytest.mark.parametrize("pages", [None, 20], ids=["", "preempted"])
@pytest.mark.parametrize("is_compact", [False, True], ids=["spaced", "compact"])
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without_in_fewer_steps(
    tiny_artifact: Artifact, mode: BatchSettings, is_compact: bool, pages: int | None
) -> None:
    tokenizer = Tokenizer.load(tiny_artifact.tokenizer, tiny_artifact.tokenizer_config)
    asked = calls(tokenizer, is_compact=is_compact)
    options: dict[str, Any] = {"runtime": "iree", "batching": mode, "pages": pages}
    expected, plain = run(tiny_artifact, asked, jump_ahead=False, **options)
    got, jumping = run(tiny_artifact, asked, **options)
    assert got == expected
    assert jumping.generation_tokens == plain.generation_tokens
    assert jumping.steps < plain.steps
    assert (plain.preemptions > 0) == (pages is not None)


@needs_shortfin
@pytest.mark.emulated
@pytest.mark.timeout(300)
def test_answers_are_those_of_draws_on_a_gpu(build_tiny: BuildTiny, emulated_gpus: EmulatedGpus) -> None:
    """Where grammars run ahead, and the device masks and draws what is not forced."""
    sizes: dict[str, Any] = {
        "prefill_batch_sizes": (2,),
        "decode_batch_sizes": (4,),
        "decode_loop_sizes": (4,),
    }
    with emulated_gpus.watch(CHIP):
        artifact = build_tiny(BuildOptions(device=f"hip:{CHIP}", extend_sizes=(16,), **sizes))
        tokenizer = Tokenizer.load(artifact.tokenizer, artifact.tokenizer_config)
        asked = [replace(each, params=replace(each.params, max_tokens=24)) for each in calls(tokenizer)]
        options: dict[str, Any] = {"device": "hip", "batching": MODES[1]}
        expected, _ = run(artifact, asked, jump_ahead=False, pipeline_depth=0, **options)
        got, jumping = run(artifact, asked, pipeline_depth=1, **options)
    assert got == expected
    assert jumping.steps_ahead > 0
    assert "adjusted_sample_bs4" in jumping.entries
