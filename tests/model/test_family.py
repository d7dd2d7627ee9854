"""A family's tensors and its operations name the same weights, of shapes that fit one another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.model.attention import Attend, NormHeads, NormValues, NormWhole
from shortfin_apps.llm.model.dual_experts import Zeros
from shortfin_apps.llm.model.expert_scores import PreferExperts, ScoreExperts
from shortfin_apps.llm.model.feed_forward import GatedExperts, Route, ScaleRouting, SumExperts
from shortfin_apps.llm.model.latent_attention import AbsorbKeys, AttendLatent, ExpandValues, NormFirst
from shortfin_apps.llm.model.layer_inputs import TABLE, EmbedLayers, GateLayerInput, JoinLayerInputs
from shortfin_apps.llm.model.layer_scale import Scale
from shortfin_apps.llm.model.operations import (
    Activate,
    AddBias,
    AddNormed,
    Embed,
    GatedLinear,
    LastTokens,
    Linear,
    Narrow,
    Norm,
    Operation,
)
from shortfin_apps.llm.model.shared_attention import JoinQueries
from shortfin_apps.llm.model.spec import ModelSpec, tensor_shapes, weight_shapes
from tests.builder.compiled_model import OTHERS, ROUTED, TINY
from tests.builder.specs import ffn_features

WEIGHTED = (
    *(Embed, Norm, AddNormed, Linear, AddBias, NormHeads, NormWhole, GatedLinear, Scale),
    *(EmbedLayers, JoinLayerInputs, NormFirst, AbsorbKeys, PreferExperts, ScaleRouting),
)
SPECS = pytest.mark.parametrize("spec", [TINY, *OTHERS.values(), ROUTED], ids=["plain", *OTHERS, "routed"])


@SPECS
@pytest.mark.parametrize("tied", [True, False])
def test_operations_read_every_weight(spec: ModelSpec, tied: bool) -> None:
    spec = replace(spec, tie_word_embeddings=tied)
    read = [weight for operation in list(spec.operations()) for weight in weights_of(spec, operation)]
    assert list(dict.fromkeys(read)) == list(weight_shapes(spec))
    assert len(read) - len(set(read)) == tied


def weights_of(spec: ModelSpec, operation: Operation) -> list[str]:
    match operation:
        case Attend():
            named = [operation.sinks]
        case GatedExperts() | SumExperts():
            named = [operation.weight, operation.bias]
        case AttendLatent():
            named = [operation.norm]
        case _:
            named = [operation.weight] if isinstance(operation, WEIGHTED) else []
    return [weight for weight in named if weight is not None]


@SPECS
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_fit_from_the_tokens_to_the_logits(spec: ModelSpec, tied: bool) -> None:
    spec = replace(spec, tie_word_embeddings=tied)
    shapes = weight_shapes(spec)
    features: dict[str, int] = {}
    for operation in list(spec.operations()):
        match operation:
            case Embed():
                features[operation.out] = shapes[operation.weight][1]
            case Norm():
                assert shapes[operation.weight] == (features[operation.x],)
                features[operation.out] = features[operation.x]
            case AddBias():
                assert shapes[operation.weight] == (features[operation.x],)
                assert operation.out == operation.x
            case NormHeads():
                assert shapes[operation.weight] == (2 * operation.block.head_dim,)
                assert features[operation.x] == operation.block.qkv_features
                features[operation.out] = features[operation.x]
            case NormWhole():
                block = operation.block
                assert shapes[operation.weight] == (block.qkv_features - block.kv_features,)
                assert features[operation.x] == block.qkv_features
                assert operation.out == operation.x
            case AddNormed():
                assert shapes[operation.weight] == (features[operation.x],)
                assert features[operation.residual] == features[operation.x]
                features[operation.out] = features[operation.x]
            case Narrow():
                features[operation.out] = features[operation.x]
            case EmbedLayers():
                features[operation.out] = shapes[operation.weight][1]
            case JoinLayerInputs():
                assert features[operation.x] == features[operation.embeddings] == shapes[TABLE][1]
                assert shapes[operation.weight] == (operation.inputs.features,)
                features[operation.out] = features[operation.x]
            case GateLayerInput():
                assert (operation.layer + 1) * features[operation.x] <= features[operation.inputs]
                features[operation.out] = features[operation.x]
            case Zeros():
                features[operation.out] = features[operation.x]
            case NormValues():
                features[operation.out] = features[operation.x]
            case JoinQueries():
                assert features[operation.x] == operation.block.q_features
                assert features[operation.qkv] == operation.block.qkv_features
                features[operation.out] = features[operation.qkv]
            case Activate():
                features[operation.out] = features[operation.x] // 2
            case NormFirst():
                assert shapes[operation.weight] == (operation.features,)
                assert features[operation.x] > operation.features
                features[operation.out] = operation.features
            case AbsorbKeys():
                latent = operation.block
                assert shapes[operation.weight] == (latent.heads * latent.expanded_dim, latent.rank)
                assert features[operation.x] >= latent.heads * latent.head_dim
                features[operation.out] = latent.heads * latent.rank
            case AttendLatent():
                latent = operation.block
                assert features[operation.absorbed] == latent.heads * latent.rank
                assert features[operation.joint] == latent.joint_features
                assert shapes[operation.norm] == (latent.rank,)
                features[operation.out] = latent.heads * latent.rank
            case ExpandValues():
                latent = operation.block
                assert features[operation.x] == latent.heads * latent.rank
                features[operation.out] = latent.heads * latent.value_dim
            case ScaleRouting():
                assert shapes[operation.weight] == (features[operation.x],)
                assert operation.out == operation.x
            case ScoreExperts() | PreferExperts():
                features[operation.out] = features[operation.x]
            case Route():
                assert spec.experts is not None
                assert operation.scores is None or features[operation.scores] == features[operation.x]
                assert features[operation.x] == spec.experts.count
                features[operation.out] = spec.experts.count
            case GatedExperts() | SumExperts():
                experts, rows, columns = shapes[operation.weight]
                assert features[operation.routing] == experts
                assert features[operation.x] == columns
                is_gated = isinstance(operation, GatedExperts)
                features[operation.out] = rows // 2 if is_gated else rows
            case Linear() | GatedLinear():
                rows, columns = shapes[operation.weight]
                assert features[operation.x] == columns
                features[operation.out] = rows // 2 if isinstance(operation, GatedLinear) else rows
                assert all(features[name] == rows for name in operation.reads[1:])
            case Attend():
                assert features[operation.x] == operation.block.qkv_features
                features[operation.out] = operation.block.q_features
            case LastTokens():
                features[operation.out] = features[operation.x]
    assert features["logits"] == spec.vocab_size


def test_stacked_tensors_are_the_rows_of_their_weight() -> None:
    tensors, weights = tensor_shapes(TINY), weight_shapes(TINY)
    rows = [tensors[f"blk.1.attn_{part}.weight"][0] for part in "qkv"]
    assert weights["blk.1.attn_qkv.weight"] == (sum(rows), TINY.hidden_size)
    assert weights["blk.1.ffn_gate_up.weight"] == (2 * ffn_features(TINY), TINY.hidden_size)
