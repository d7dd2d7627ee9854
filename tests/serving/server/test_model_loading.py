from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.api.sampling import SamplingDefaults
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.server.model_loading import (
    kv_events_topic,
    load_model,
    load_tokenizer,
    open_draft,
    served_model,
    tell_defaults,
)
from tests.serving.api.scripted_engine import ScriptedEngine, saying
from tests.serving.server.settings import parse


def config_of(artifact: Artifact, **options: Any) -> Any:
    config = parse(str(artifact.vmfb.parent))
    return config.changed(**options)


def test_a_draft_model_that_is_not_there_is_named(tiny_artifact: Artifact, tmp_path: Path) -> None:
    assert open_draft(config_of(tiny_artifact)) is None
    with pytest.raises(ArtifactError, match=r"the draft model: .*no-such"):
        open_draft(config_of(tiny_artifact, speculative_model=tmp_path / "no-such"))


def test_a_draft_model_of_other_tokens_is_refused(tiny_artifact: Artifact, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_artifact.vmfb.parent, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = config_of(tiny_artifact, speculative_model=other, verify="none")
    with pytest.raises(ArtifactError, match="the draft model has other tokens than the model"):
        load_model(tiny_artifact, config, ServerMetrics("m"), open_draft(config))


def test_a_draft_model_of_more_tokens_is_refused(tiny_artifact: Artifact, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_artifact.vmfb.parent, other)
    manifest = json.loads((other / "manifest.json").read_text(encoding="utf-8"))
    manifest["vocab_size"] += 1
    (other / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    config = config_of(tiny_artifact, speculative_model=other, verify="none")
    with pytest.raises(ArtifactError, match=r"the draft model has \d+ tokens, and the model only \d+"):
        load_model(tiny_artifact, config, ServerMetrics("m"), open_draft(config))


def test_penalties_of_generation_config_are_no_defaults_of_a_model_without_logits(
    tiny_artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request would be refused for a field that its client never sent."""
    shutil.copytree(tiny_artifact.vmfb.parent, tmp_path, dirs_exist_ok=True)
    published = {"top_k": 4, "repetition_penalty": 1.05, "presence_penalty": 0.0, "frequency_penalty": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(published), encoding="utf-8")
    artifact = Artifact.open(tmp_path)
    config = config_of(artifact)
    tokenizer = load_tokenizer(artifact, config)
    grammars = GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids)
    engine = ScriptedEngine(saying(tokenizer, "a"))
    engine.returns_logits = False
    model = served_model(artifact, config, tokenizer, engine, grammars, ServerMetrics("m"))
    own = SamplingDefaults(temperature=1.0, top_k=4)
    greedy = SamplingDefaults(temperature=0.0, top_k=4)
    assert (model.openai_defaults, model.native_defaults) == (own, greedy)
    sampler = Sampler(frozenset(), num_candidates=4, returns_logits=False)
    sampler.check(SamplingParams(max_tokens=1, **own.values))
    caplog.set_level(logging.INFO)
    tell_defaults(published, config, returns_logits=False)
    first, second = caplog.messages
    assert first.endswith("generation_config.json: top_k 4")
    assert second.endswith("compiled without logits: frequency_penalty, repetition_penalty")


def test_requests_have_the_samplers_of_generation_config(tiny_artifact: Artifact, tmp_path: Path) -> None:
    """But `/generate` stays greedy, as upstream's server is."""
    shutil.copytree(tiny_artifact.vmfb.parent, tmp_path, dirs_exist_ok=True)
    published = {"temperature": 0.6, "top_k": 40, "repetition_penalty": 1.3, "max_new_tokens": 99}
    (tmp_path / "generation_config.json").write_text(json.dumps(published), encoding="utf-8")
    artifact = Artifact.open(tmp_path)
    config = config_of(artifact)
    tokenizer = load_tokenizer(artifact, config)
    grammars = GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids)
    engine = ScriptedEngine(saying(tokenizer, "a"))
    model = served_model(artifact, config, tokenizer, engine, grammars, ServerMetrics("m"))
    others: dict[str, Any] = {"top_k": 40, "repetition_penalty": 1.3, "max_tokens": 99}
    own, greedy = (SamplingDefaults(temperature=each, **others) for each in (0.6, 0.0))
    assert (model.openai_defaults, model.native_defaults) == (own, greedy)


def test_the_models_samplers_are_logged_and_those_not_applied_named(
    tiny_artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tell_defaults({"repetition_penalty": 1.3, "top_k": 40, "mirostat": 2}, config_of(tiny_artifact))
    first, second = caplog.messages
    assert first.endswith("generation_config.json: top_k 40, repetition_penalty 1.3")
    assert second == "generation_config.json asks for sampling that is not applied: mirostat"


def test_kv_events_have_a_topic_by_which_llm_d_finds_the_server() -> None:
    address = ("--host", "10.0.0.1", "--port", "8001")
    assert kv_events_topic(parse("DIR", *address), "org/tiny") == "kv@10.0.0.1:8001@org/tiny"


@pytest.mark.parametrize(("endpoint", "warns"), [("tcp://*:5557", True), ("tcp://127.0.0.1:5557", False)])
def test_whoever_can_be_reached_by_others_is_warned(
    endpoint: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kv_events_topic(parse("DIR", "--kv-events-endpoint", endpoint), "tiny")
    assert ("anyone who can reach" in caplog.text) == warns
