"""The blocks of GGUF's types against the `gguf` package's values of the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, ReaderField, ReaderTensor, dequantize, quants

from shortfin_apps.llm.builder.quantise import quantise
from shortfin_apps.llm.builder.sources.gguf_blocks import (
    block_type_of,
    each_matrix,
    quantisation_of,
    read_blocks,
)
from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.own_types import with_own_types
from shortfin_apps.llm.builder.weights.write import plan_weights
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from shortfin_apps.llm.model.weight_blocks import Q4_1, Q8_0, BlockType
from tests.builder.gguf_data import random_data
from tests.builder.golden_families import GoldenFamily

ROWS, COLUMNS = 6, 512
CODED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
NAMES = (
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "MXFP4",
    "IQ4_XS",
    *CODED,
)


def tensor(name: str, shape: tuple[int, ...], data: npt.NDArray[np.uint8] | None = None) -> ReaderTensor:
    """Of `shape` as GGUF has it, the columns first."""
    held = np.zeros(0, np.uint8) if data is None else data
    sizes, kind = np.array(shape, np.uint32), GGMLQuantizationType[name]
    return ReaderTensor("x", kind, sizes, int(sizes.prod()), held.nbytes, 0, held, ReaderField(0, "x"))


def tensor_of(name: str, scale: float = 1.0) -> ReaderTensor:
    """Random blocks, whose terms are what weights have."""
    data = random_data(GGMLQuantizationType[name], ROWS, COLUMNS, scale=scale)
    return tensor(name, (COLUMNS, ROWS), data)


def values_of(blocks: ReaderTensor) -> npt.NDArray[np.float32]:
    return dequantize(blocks.data, blocks.tensor_type).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_kept(name: str) -> None:
    stored = tensor_of(name)
    blocks = read_blocks(stored)
    assert blocks is not None
    np.testing.assert_array_equal(blocks.dequantise(), values_of(stored))


@pytest.mark.parametrize("name", CODED)
def test_codes_are_read_a_few_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows are fewer; where a scale is 0, so are the weights."""
    monkeypatch.setattr("shortfin_apps.llm.builder.sources.gguf_blocks._ROWS", 4)
    for scale in (1.0, 0.0):
        stored = tensor_of(name, scale)
        blocks = read_blocks(stored)
        assert blocks is not None
        np.testing.assert_array_equal(blocks.dequantise(), values_of(stored))


@pytest.mark.parametrize("name", CODED)
def test_codes_lose_less_than_a_requantisation(name: str) -> None:
    """By rms: nothing, or 0.1 % where the scales are the smallest f16; 4 bits lose some percent."""
    stored = tensor_of(name)
    values, blocks = values_of(stored), read_blocks(stored)
    assert blocks is not None
    assert error(blocks.dequantise(), values) == 0
    assert 0.02 < error(quantise(values, 4).dequantise(), values) < 0.1
    small = tensor_of(name, scale=2**-5)  # with weights of 0.05 at most, as in the largest models
    blocks = read_blocks(small)
    assert blocks is not None
    assert error(blocks.dequantise(), values_of(small)) < 1e-3


def error(kept: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(kept - values) / np.linalg.norm(values))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_have_the_type_that_is_said(name: str) -> None:
    blocks = read_blocks(tensor_of(name))
    assert blocks is not None
    assert blocks.type == block_type_of(GGMLQuantizationType[name])


@pytest.mark.parametrize("name", ["F32", "BF16", "NVFP4", "TQ1_0"])
def test_other_types_have_no_blocks(name: str) -> None:
    assert read_blocks(tensor(name, (256, 1))) is None


@pytest.mark.parametrize(
    ("name", "weights", "kept"),
    [
        ("Q4_K", "q4", True),
        ("Q6_K", "q8_0", True),
        ("IQ2_S", "q8_0", True),
        ("IQ1_S", "q4", True),
        ("TQ2_0", "q4", False),
    ],
)
def test_a_quantisation_is_that_of_most_weights(name: str, weights: str, kept: bool) -> None:
    found = quantisation_of([tensor("F32", (32,)), tensor(name, (256, 4))])
    assert found is not None
    assert (found.name, found.weights, found.kept) == (name, weights, kept)


EXPERTS, EXPERT_ROWS, EXPERT_COLUMNS = 3, 5, 64
HF_ROUTER = "model.layers.{}.mlp.gate.weight"


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("parts", [["up"], ["gate", "up"]])
def test_each_expert_is_a_matrix_of_its_own(tmp_path: Path, kind: str, parts: list[str]) -> None:
    """Or two, gate and up, which are the halves of one in the file."""
    shape = (EXPERTS, len(parts) * EXPERT_ROWS, EXPERT_COLUMNS)
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    quantised = GGMLQuantizationType[kind]
    writer = GGUFWriter(tmp_path / "experts.gguf", "qwen3moe")
    name = f"blk.4.ffn_{'_'.join(parts)}_exps.weight"
    writer.add_tensor(name, quants.quantize(values, quantised), raw_dtype=quantised)
    writer.add_tensor("blk.4.ffn_norm.weight", np.ones(EXPERT_COLUMNS, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole, _ = tensors = GGUFReader(tmp_path / "experts.gguf").tensors
    *experts, norm = each_matrix("x", tensors)
    assert norm.name == "blk.4.ffn_norm.weight"
    names = [f"blk.4.ffn_{part}.{n}.weight" for n in range(EXPERTS) for part in parts]
    assert [each.name for each in experts] == names
    stored = dequantize(whole.data, quantised).reshape(-1, EXPERT_ROWS, EXPERT_COLUMNS)
    for number, each in enumerate(experts):
        assert (list(each.shape), each.n_elements) == (
            [EXPERT_COLUMNS, EXPERT_ROWS],
            EXPERT_ROWS * EXPERT_COLUMNS,
        )
        np.testing.assert_array_equal(dequantize(each.data, quantised), stored[number])
        assert bytes(whole.data)[each.data_offset - whole.data_offset :].startswith(bytes(each.data))
        if (blocks := read_blocks(each)) is not None:
            np.testing.assert_allclose(blocks.dequantise(), stored[number], rtol=1e-6)


def test_gate_and_up_have_as_many_rows() -> None:
    shape = np.array([64, 5, 2])
    stack = SimpleNamespace(name="blk.0.ffn_gate_up_exps.weight", shape=shape, data=np.empty((2, 5, 64)))
    [tensor] = each_matrix("x", [cast("ReaderTensor", stack)])
    assert tensor.name == stack.name  # which no model has


def test_empty_experts_of_any_number_are_refused_before_they_are_named() -> None:
    """Their shape takes 28 bytes of the file."""
    stack = SimpleNamespace(
        name="blk.0.ffn_up_exps.weight", shape=np.array([0, 0, 1 << 40]), data=np.empty((1 << 40, 0, 0))
    )
    with pytest.raises(
        BuildError, match="x: its tensors hold 1,099,511,627,776 experts, but at most 262,144"
    ):
        next(each_matrix("x", [cast("ReaderTensor", stack)]))


# Of the golden model's sizes, to whole blocks.
SIZES = {20: 32, 32: 96, 40: 64, 48: 64, 120: 192}
LARGER = {"head_dim": 32, "moe_intermediate_size": 96, "hidden_size": 64}


@pytest.mark.parametrize(
    ("kind", "weights", "blocks"),
    [("Q8_0", "q8_0", Q8_0), ("Q4_1", "q4", Q4_1), ("Q5_1", "q8_0", BlockType(8, has_minima=True))],
)
def test_a_quantised_file_keeps_the_blocks_of_each_expert(
    tmp_path: Path, kind: str, weights: WeightType, blocks: BlockType
) -> None:
    family, rng = changed(**LARGER), np.random.default_rng(1)
    tensors = {
        name: rng.standard_normal([SIZES.get(int(size), int(size)) for size in tensor.shape], np.float32)
        for name, tensor in family.tensors.items()
    }
    source = GgufSource(
        replace(family, tensors=tensors).write_gguf(
            tmp_path / "model.gguf", quantised=GGMLQuantizationType[kind]
        )
    )
    options = with_own_types(source, BuildOptions())
    assert options.weights == weights
    for weight in plan_weights(source.spec):
        layout = weight_layout(weight.name, source.spec, options, resolve_target("cpu:haswell"))
        if weight.experts is not None:
            assert layout.blocks == blocks
            made = [matrix.load_blocks(source, blocks).dequantise() for matrix in weight.matrices()]
            np.testing.assert_allclose(made, np.stack([m.load(source) for m in weight.matrices()]), atol=1e-3)
        elif "gate_inp" in weight.name:
            assert layout.blocks is None
            np.testing.assert_array_equal(weight.load(source), tensors[HF_ROUTER.format(weight.name[4])])


def changed(**fields: Any) -> GoldenFamily:
    family = GoldenFamily.of("qwen3-moe")
    return replace(family, config=family.config | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 8}, "cannot have 8 of 7 experts"),
        ({"num_local_experts": 8}, "experts.7.weight` is missing|ffn_down.7.weight` is missing"),
        ({"num_local_experts": 1 << 40}, "too few"),
        ({"moe_intermediate_size": 16}, "has shape"),
        ({"shared_expert_intermediate_size": 32}, "`shared_expert_intermediate_size` is 32"),
        ({"n_group": 4}, "`n_group` is 4"),
        ({"scoring_func": "sigmoid"}, "`scoring_func` is sigmoid"),
        ({"model_type": "qwen2_moe"}, "architecture `qwen2_moe`"),
    ],
)
def test_a_directory_of_other_experts_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        HfDirectorySource(changed(**fields).write_hf(tmp_path))


def test_a_tensor_of_a_shared_expert_is_refused(tmp_path: Path) -> None:
    family = GoldenFamily.of("qwen3-moe")
    shared = {"model.layers.0.mlp.shared_expert.up_proj.weight": np.zeros((32, 48), np.float32)}
    with pytest.raises(BuildError, match="shared_expert"):
        HfDirectorySource(replace(family, tensors=family.tensors | shared).write_hf(tmp_path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_used_count": 0}, "cannot have 0 of 7 experts"),
        ({"expert_feed_forward_length": 0}, r"has shape \(32, 48\), expected \(80, 48\)"),
        ({"expert_count": 6}, "ffn_down.6.weight` belongs to no model"),
        ({"expert_gating_func": 2}, "`qwen3moe.expert_gating_func` is 2"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale` is 2.5"),
        ({"expert_shared_count": 1}, "expert_shared_count` is 1"),
        ({"expert_group_count": 8}, "expert_group_count` is 8"),
    ],
)
def test_a_file_of_other_experts_is_refused(
    tmp_path: Path, keys: dict[str, int | float], message: str
) -> None:
    path = GoldenFamily.of("qwen3-moe").write_gguf(tmp_path / "odd.gguf", keys)
    with pytest.raises(BuildError, match=message):
        GgufSource(path)
