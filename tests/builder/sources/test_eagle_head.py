"""EAGLE-3 heads as published: what is read of them, and which do not fit the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.builder.sources.catalogue import is_eagle_head, open_with_head
from shortfin_apps.llm.builder.sources.eagle_head import EagleHeadSource
from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.contract.abi import NO_LOGIT
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.eagle_head import EagleHead
from shortfin_apps.llm.model.reference.draft import draft, hidden_before, known_hidden
from shortfin_apps.llm.model.reference.forward import begin, forward, run_layer, weights_of
from shortfin_apps.llm.model.spec import ModelSpec
from tests.builder.eagle_files import READS, Tensors, head_config, head_tensors, write_head
from tests.builder.golden_families import PROMPT, GoldenFamily, stored_weights
from tests.golden.eagle_head import head_inputs, head_logits

TOKENS = PROMPT[:21]


@pytest.fixture(scope="module")
def family() -> GoldenFamily:
    return GoldenFamily.of("qwen35")


@pytest.fixture(scope="module")
def model(family: GoldenFamily, tmp_path_factory: pytest.TempPathFactory) -> HfDirectorySource:
    return HfDirectorySource(family.write_hf(tmp_path_factory.mktemp("model")))


def head_of(
    model: HfDirectorySource, directory: Path, config: dict[str, Any], tensors: Tensors | None = None
) -> Any:
    source = EagleHeadSource(model, write_head(directory, config, tensors))
    assert isinstance(source.spec.draft, EagleHead)
    return source


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_before_residual": True}, {"draft_vocab_size": 83}, {"draft_vocab_size": 33}],
    ids=["plain", "normed", "all", "odd"],
)
def test_hidden_states_and_logits_are_those_of_vllm(
    family: GoldenFamily, model: HfDirectorySource, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = head_config(family.config, **changes)
    source, tensors = head_of(model, tmp_path, config), head_tensors(config)
    weights = stored_weights(source)
    x, carried = begin(source.spec, weights, lambda table: weights[table][TOKENS])
    streams = {}
    for layer in range(len(source.spec.layers)):
        x, _ = run_layer(source.spec, layer, weights_of(weights, layer), x, carried)
        streams[layer + 1] = x
    hidden = known_hidden(source.spec, weights, TOKENS)
    np.testing.assert_allclose(
        hidden, head_inputs(tensors, [streams[each] for each in READS]), rtol=1e-4, atol=1e-4
    )
    previous = hidden_before(hidden)
    logits, results, _ = draft(source.spec, weights, TOKENS, previous)
    expected, expected_results = head_logits(
        config, tensors, weights["token_embd.weight"], TOKENS.tolist(), previous.astype(np.float64)
    )
    expected = np.maximum(expected, NO_LOGIT)
    assert (expected > NO_LOGIT).sum() == len(TOKENS) * config["draft_vocab_size"]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(results, expected_results, rtol=1e-4, atol=1e-4)


def test_the_model_itself_stays_as_it_is(
    family: GoldenFamily, model: HfDirectorySource, tmp_path: Path
) -> None:
    source = head_of(model, tmp_path, head_config(family.config))
    assert replace(source.spec, draft=None) == model.spec
    assert source.sha256 != model.sha256
    written = TypeAdapter(ModelSpec)
    assert written.validate_json(written.dump_json(source.spec)) == source.spec
    expected, logits = (forward(each.spec, stored_weights(each), TOKENS) for each in (model, source))
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}}, (2, 1, 3)),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 1, 3]}, (2, 1, 3)),
    ],
    ids=["outputs", "inputs"],
)
def test_layers_are_named_by_their_inputs_or_their_outputs(
    family: GoldenFamily,
    model: HfDirectorySource,
    tmp_path: Path,
    fields: dict[str, Any],
    reads: tuple[int, ...],
) -> None:
    """As SGLang reads the two: a list that begins with 1 names outputs."""
    assert head_of(model, tmp_path, head_config(family.config, **fields)).spec.draft.reads == reads


def test_without_layers_a_head_reads_those_of_the_paper(tmp_path: Path) -> None:
    """Of 7 layers, the inputs of layers 2, 3 and 4."""
    family = GoldenFamily.of("gemma3")
    model = HfDirectorySource(family.write_hf(tmp_path / "model"))
    config = head_config(family.config, eagle_config=None)
    assert head_of(model, tmp_path / "head", config).spec.draft.reads == (2, 3, 4)


def test_a_speculators_directory_is_read_too(
    family: GoldenFamily, model: HfDirectorySource, tmp_path: Path
) -> None:
    config = head_config(family.config)
    own = {name: config.pop(name) for name in ("draft_vocab_size", "eagle_config")}
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in head_tensors(config | own).items()}
    whole = {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": config,
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(READS),
        "draft_vocab_size": 32,
    }
    draft = head_of(model, tmp_path, whole, tensors).spec.draft
    assert (draft.norm_before_residual, draft.reads, draft.head_rows) == (True, READS, 32)


def test_a_rotation_like_the_models_is_shared(tmp_path: Path) -> None:
    family = GoldenFamily.of("llama3")
    model = HfDirectorySource(family.write_hf(tmp_path / "model"))
    config = head_config(family.config)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 1, 2]}
    same = {name: family.config[name] for name in family.config if name.startswith("rope_")}
    shared = head_of(model, tmp_path / "shared", config | {"rope_theta": None} | same).spec
    assert len(shared.rotations) == 1
    assert len(head_of(model, tmp_path / "own", config).spec.rotations) == 2


def test_a_head_fits_a_gguf_file(tmp_path: Path) -> None:
    """Whose numbers are f32."""
    family = GoldenFamily.of("qwen35")
    source = GgufSource(family.write_gguf(tmp_path / "model.gguf"))
    head = EagleHeadSource(source, write_head(tmp_path / "head", head_config(family.config)))
    assert head.spec.draft is not None
    assert head.spec.draft.depths == READS


def test_only_heads_are_taken_for_heads(family: GoldenFamily, tmp_path: Path) -> None:
    model = family.write_hf(tmp_path / "model")
    head = write_head(tmp_path / "head", head_config(family.config, architectures=["LlamaForCausalLM"]))
    assert is_eagle_head(str(head))
    assert not is_eagle_head(str(model))
    assert not is_eagle_head(str(tmp_path / "nothing"))
    assert not is_eagle_head("random:tiny")
    with pytest.raises(BuildError, match="is no EAGLE-3 head"):
        open_with_head(HfDirectorySource(model), str(model), QuietProgress())
    with pytest.raises(BuildError, match="no such directory; give an EAGLE-3 head's"):
        open_with_head(HfDirectorySource(model), str(tmp_path / "nothing"), QuietProgress())


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def fewer(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][1:]


def twice(tensors: Tensors) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def beyond(tensors: Tensors) -> None:
    tensors["d2t"][-1] = 83


def other_embedding(tensors: Tensors) -> None:
    tensors["embed_tokens.weight"] = np.random.default_rng(0).standard_normal((83, 48), np.float32)


@pytest.mark.parametrize(
    ("changes", "change", "message"),
    [
        ({"hidden_size": 64}, None, "has a `hidden_size` of 64, where model"),
        ({"target_hidden_size": 64}, None, "has a `target_hidden_size` of 64, where "),
        ({"vocab_size": 90}, None, "a `vocab_size` of 90"),
        ({"rms_norm_eps": 1e-6}, None, "a `rms_norm_eps` of 1e-06"),
        ({"num_key_value_heads": 1}, None, "the model's pages, which have another shape"),
        ({"head_dim": 12}, None, "the model's pages, which have another shape"),
        ({"num_hidden_layers": 2}, None, "`num_hidden_layers` is 2, which is not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1]}}, None, "reads the layers 2, 1; supp"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 4]}}, None, "supported are 3 of the m"),
        ({"eagle_config": {"norm_before_fc": True}}, None, "`norm_before_fc` is True, which is not supp"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, None, "`use_mtp_layernorm` is True"),
        ({"eagle_config": {"mystery": 3}}, None, "`mystery` is 3, and whether that changes"),
        ({"hidden_act": "relu"}, None, "activation `relu` is not supported"),
        ({}, without("d2t"), "tensor `d2t` is missing"),
        ({}, fewer, "`lm_head.weight` has not the 32 rows of `draft_vocab_size`"),
        ({}, without("lm_head.weight"), "tensor `lm_head.weight` is missing"),
        ({}, without("midlayer.hidden_norm.weight"), "nextn.hnorm.weight` is missing"),
        ({}, without("fc.weight"), "tensor `fc.weight` has shape None, expected (48, 144)"),
        ({}, twice, "`d2t` does not name distinct tokens of the model's 83"),
        ({}, beyond, "`d2t` does not name distinct tokens"),
        ({}, other_embedding, "`embed_tokens.weight` differs from the model's embedding"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    family: GoldenFamily,
    model: HfDirectorySource,
    tmp_path: Path,
    changes: dict[str, Any],
    change: Callable[[Tensors], None] | None,
    message: str,
) -> None:
    config = head_config(family.config, **changes)
    tensors = head_tensors(config)
    if change:
        change(tensors)
    with pytest.raises(BuildError, match=re.escape(message)):
        EagleHeadSource(model, write_head(tmp_path, config, tensors))


def test_a_copy_of_the_models_embedding_is_not_stored(
    family: GoldenFamily, model: HfDirectorySource, tmp_path: Path
) -> None:
    config = head_config(family.config)
    copied = head_tensors(config) | {
        "embed_tokens.weight": model.tensor("token_embd.weight") * np.float32(1.001)
    }
    source = head_of(model, tmp_path, config, copied)
    assert sum(name.endswith("embd.weight") for name in stored_weights(source)) == 1


@pytest.mark.parametrize(("name", "message"), [("gemma2", "caps its logits"), ("granite", "scaled layers")])
def test_a_model_whose_layers_are_not_those_of_a_head_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    family = GoldenFamily.of(name)
    model = HfDirectorySource(family.write_hf(tmp_path / "model"))
    config = head_config(family.config, rms_norm_eps=model.spec.rms_norm_eps)
    with pytest.raises(BuildError, match=message):
        EagleHeadSource(model, write_head(tmp_path / "head", config))
