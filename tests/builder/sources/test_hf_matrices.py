"""Hugging Face directories with quantised matrices, read as sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.builder.sources.hf_matrices import stacked_experts
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.own_types import with_own_types
from shortfin_apps.llm.builder.weights.write import plan_weights
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.families.family import ExpertStack
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import E2M1, MXFP4, BlockType
from tests.builder.golden_families import GoldenFamily, stored_weights
from tests.builder.model_files import write_hf
from tests.builder.sources.test_hf_quantised import AWQ_ORDER, packed
from tests.builder.specs import rope_of, windows_of

Array = npt.NDArray[Any]
AWQ: dict[str, object] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
}
FP8: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
PROJECTION = "model.layers.0.self_attn.v_proj"
OURS = "blk.0.attn_v.weight"
_SAFETENSORS = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float32": "F32",
    "float16": "F16",
    "int32": "I32",
}


def write_quantised(folder: Path, config: dict[str, object]) -> tuple[Path, dict[str, Array]]:
    """A directory with random matrices of the format in all layers; their values by Hugging Face's names."""
    directory = write_hf(folder, config={"quantization_config": config})
    tensors: dict[str, Array] = dict(load_file(directory / "model.safetensors"))
    rng, values = np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        stem, shape = name.removesuffix(".weight"), tensors.pop(name).shape
        stored, values[name] = (_awq if config is AWQ else _fp8)(rng, shape)
        tensors |= {f"{stem}.{ending}": each for ending, each in stored.items()}
    save(tensors, directory / "model.safetensors")
    return directory, values


def save(tensors: dict[str, Array], path: Path) -> None:
    """As the library does, which has no 8-bit floats."""
    header, data = {}, b""
    for name, each in tensors.items():
        content = np.ascontiguousarray(each).tobytes()
        offsets = [len(data), len(data) + len(content)]
        kind = _SAFETENSORS[str(each.dtype)]
        header[name] = {"dtype": kind, "shape": each.shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _awq(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[dict[str, Array], Array]:
    out, columns = shape
    quants = rng.integers(0, 16, shape)
    scales = rng.uniform(1e-3, 1e-2, (out, columns // 32)).astype(np.float16)
    zeros = rng.integers(0, 16, scales.shape)
    wide, of_column = scales.astype(np.float32).repeat(32, axis=1), zeros.repeat(32, axis=1)
    stored = {
        "qweight": packed(quants.T, AWQ_ORDER),
        "qzeros": packed(zeros.T, AWQ_ORDER),
        "scales": scales.T,
    }
    return stored, wide * (quants - of_column).astype(np.float32)


def _fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[dict[str, Array], Array]:
    weight = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 1, [size // 32 for size in shape]).astype(np.float32)
    values = weight.astype(np.float32) * scale.repeat(32, axis=0).repeat(32, axis=1)
    return {"weight": weight, "weight_scale_inv": scale}, values


@pytest.mark.parametrize("config", [AWQ, FP8])
def test_values_are_those_of_the_format(tmp_path: Path, config: dict[str, object]) -> None:
    directory, values = write_quantised(tmp_path, config)
    source = HfDirectorySource(directory)
    np.testing.assert_allclose(source.tensor(OURS), values[f"{PROJECTION}.weight"], rtol=0, atol=1e-7)
    assert source.tensor("blk.0.attn_norm.weight").shape == (64,)


@pytest.mark.parametrize("device", ["cpu:znver4", "hip:gfx942"])
def test_integers_of_4_bits_are_kept(tmp_path: Path, device: str) -> None:
    """Beside embedding and head in floats."""
    source = HfDirectorySource(write_quantised(tmp_path, AWQ)[0])
    options = with_own_types(source, BuildOptions(device=device))
    target = resolve_target(device)
    kind = BlockType(4, has_minima=True, group=32)
    for weight in plan_weights(source.spec):
        blocks = weight_layout(weight.name, source.spec, options, target).blocks
        is_matrix = weight.name.startswith("blk.") and not weight.name.endswith("norm.weight")
        assert blocks == (kind if is_matrix else None)
        if blocks is not None:
            kept = weight.load_blocks(source, blocks).dequantise()
            np.testing.assert_array_equal(kept, weight.load(source))


def test_8_bit_floats_become_bf16(tmp_path: Path) -> None:
    source = HfDirectorySource(write_quantised(tmp_path, FP8)[0])
    options = with_own_types(source, BuildOptions(weights="q4"))
    assert (options.weights, options.block_types) == ("bf16", ())


@pytest.mark.parametrize("shape", [None, (), (1,), (32,), (32, 1)])
def test_8_bit_floats_need_no_configuration(tmp_path: Path, shape: tuple[int, ...] | None) -> None:
    """With a scale for each matrix or output feature, or with none; scales of a cache are not used."""
    directory = write_hf(tmp_path)
    tensors: dict[str, Array] = dict(load_file(directory / "model.safetensors"))
    expected = tensors[f"{PROJECTION}.weight"].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{PROJECTION}.weight"] = expected
    tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
    scale: Array = np.ones(1, np.float32)
    if shape is not None:
        scale = np.random.default_rng(0).uniform(0.5, 2, shape).astype(np.float32)
        tensors[f"{PROJECTION}.weight_scale"] = scale
    save(tensors, directory / "model.safetensors")
    values = HfDirectorySource(directory).tensor(OURS)
    np.testing.assert_array_equal(values, expected.astype(np.float32) * scale.reshape(-1, 1))


@pytest.mark.parametrize("is_declared", [True, False])
def test_other_8_bit_floats_are_refused(tmp_path: Path, is_declared: bool) -> None:
    """Of a type without a name here, or without the scales that a configuration promises."""
    directory = write_hf(tmp_path, config={"quantization_config": FP8} if is_declared else None)
    tensors: dict[str, Array] = dict(load_file(directory / "model.safetensors"))
    kind = ml_dtypes.float8_e4m3fn if is_declared else ml_dtypes.float8_e5m2
    tensors[f"{PROJECTION}.weight"] = tensors[f"{PROJECTION}.weight"].astype(kind)
    save(tensors, directory / "model.safetensors")
    with pytest.raises(BuildError, match=rf"`{PROJECTION}\.weight` of type F8_E"):
        HfDirectorySource(directory)


def test_a_matrix_without_all_its_tensors_is_refused(tmp_path: Path) -> None:
    directory, _ = write_quantised(tmp_path, AWQ)
    path = directory / "model.safetensors"
    tensors = dict(load_file(path))
    del tensors[f"{PROJECTION}.scales"]
    save(tensors, path)
    with pytest.raises(BuildError, match=r"`blk\.0\.attn_v\.weight` lacks `scales`"):
        HfDirectorySource(directory)


Tensors = dict[str, npt.NDArray[Any]]
EXPERTS, HIDDEN, FEATURES = 5, 64, 96
SIZES = {"hidden_size": HIDDEN, "intermediate_size": FEATURES}
STACK = "model.layers.1.mlp.experts.{}_proj{}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The tiny model with its experts in MXFP4."""
    family = GoldenFamily.of("gpt-oss")
    family.config.update(SIZES, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    rng = np.random.default_rng(0)
    tensors: Tensors = {name: resized(tensor) for name, tensor in family.tensors.items()}
    for name in [name for name in tensors if name.endswith("_proj") and tensors[name].ndim == 3]:
        count, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(118, 124, (count, outputs, inputs // 32), np.uint8)
    tmp_path.joinpath("config.json").write_text(json.dumps(family.config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def resized(tensor: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """With sizes that are whole blocks in place of the golden model's."""
    sizes: dict[int, int] = {48: HIDDEN, 80: FEATURES, 160: 2 * FEATURES}
    shape: tuple[int, ...] = tensor.shape
    return np.resize(tensor, [sizes.get(size, size) for size in shape])


def written(directory: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def expected(tensors: Tensors, projection: str) -> npt.NDArray[np.float32]:
    """[experts, out, in], element by element as the format has them."""
    packed, scales = (tensors[STACK.format(projection, ending)] for ending in ("_blocks", "_scales"))
    values = np.zeros((*packed.shape[:3], 32), np.float32)
    values[..., 0::2], values[..., 1::2] = E2M1[packed & 15] / 2, E2M1[packed >> 4] / 2
    values *= np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*packed.shape[:2], -1)


def test_mxfp4_keeps_every_value_in_its_own_bits(directory: Path) -> None:
    source, tensors = HfDirectorySource(directory), load_file(directory / "model.safetensors")
    gate_up, down = (expected(tensors, projection) for projection in ("gate_up", "down"))
    stored = stored_weights(source)
    gates_then_ups = np.concatenate([gate_up[:, 0::2], gate_up[:, 1::2]], axis=1)
    np.testing.assert_array_equal(stored["blk.1.ffn_gate_up_exps.weight"], gates_then_ups)
    np.testing.assert_array_equal(stored["blk.1.ffn_down_exps.weight"], down)
    blocks = source.blocks("blk.1.ffn_up.3.weight")
    assert blocks is not None
    assert blocks.type == MXFP4
    np.testing.assert_array_equal(blocks.dequantise(), gate_up[3, 1::2])


def test_the_rest_of_the_model_stays_in_floats(directory: Path) -> None:
    options = with_own_types(HfDirectorySource(directory), BuildOptions())
    kinds = dict(options.block_types)
    assert (options.weights, options.activations) == ("q4", "bf16")
    assert kinds["blk.0.ffn_gate_up_exps.weight"] == kinds["blk.2.ffn_down_exps.weight"] == MXFP4
    assert {kinds[name] for name in ("token_embd.weight", "blk.1.attn_qkv.weight", "output.weight")} == {None}


def test_biases_of_gate_and_up_come_in_turn(directory: Path) -> None:
    bias = load_file(directory / "model.safetensors")[STACK.format("gate_up", "_bias")]
    stored = stored_weights(HfDirectorySource(directory))["blk.1.ffn_gate_up_exps.bias"]
    np.testing.assert_array_equal(stored, np.concatenate([bias[:, 0::2], bias[:, 1::2]], axis=1))


def test_a_scale_that_no_f16_has_is_refused(directory: Path) -> None:
    def enlarge(tensors: Tensors) -> None:
        tensors[STACK.format("down", "_scales")][2, 0, 0] = 200

    source = HfDirectorySource(written(directory, enlarge))
    with pytest.raises(BuildError, match=r"`blk\.1\.ffn_down\.2\.weight` contains NaN or infinite"):
        source.blocks("blk.1.ffn_down.2.weight")
    assert source.blocks("blk.1.ffn_down.1.weight") is not None


def test_a_projection_without_scales_is_refused(directory: Path) -> None:
    name = STACK.format("gate_up", "_scales")
    with pytest.raises(BuildError, match=r"layer 1 lacks `mlp\.experts\.gate_up_proj`"):
        HfDirectorySource(written(directory, lambda tensors: tensors.pop(name)))


@pytest.mark.parametrize("shape", [(), (EXPERTS,), (EXPERTS, 1, 1, 1, 1)])
@pytest.mark.parametrize("ending", ["_blocks", "_scales", "_bias"])
def test_a_projection_of_other_dimensions_is_refused(
    directory: Path, ending: str, shape: tuple[int, ...]
) -> None:
    name = STACK.format("down", ending)
    with pytest.raises(BuildError, match=rf"tensor `{name}` has shape \(.*\), not [234] dimensions"):
        HfDirectorySource(
            written(directory, lambda tensors: tensors.update({name: np.zeros(shape, np.uint8)}))
        )


@pytest.mark.parametrize(
    ("ending", "change"),
    [
        ("_blocks", lambda array: array[..., :8]),
        ("_blocks", lambda array: array.astype(np.float32)),
        ("_scales", lambda array: array[..., :1]),  # would be taken for the scale of every block
        ("_scales", lambda array: array[:, 1:]),
        ("_scales", lambda array: array.astype(np.float32)),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(
    directory: Path, ending: str, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
) -> None:
    name = STACK.format("down", ending)
    with pytest.raises(BuildError, match=rf"tensor `{name}` is \w+ of \(.*\), expected U8 of \(5, 64, 3"):
        HfDirectorySource(
            written(directory, lambda tensors: tensors.update({name: change(tensors[name]).copy()}))
        )


def test_a_projection_in_floats_and_in_blocks_is_refused(directory: Path) -> None:
    floats = {STACK.format("down", ""): np.zeros((EXPERTS, FEATURES, HIDDEN), np.float32)}
    with pytest.raises(BuildError, match=r"layer 1 has several forms of `mlp\.experts\.down_proj`"):
        HfDirectorySource(written(directory, lambda tensors: tensors.update(floats)))


def test_empty_experts_of_any_number_are_refused_before_they_are_named() -> None:
    """Their shape takes a few bytes of the file's header."""
    path, name = Path("model.safetensors"), STACK.format("down", "")
    stored = SimpleNamespace(get_slice=lambda _: SimpleNamespace(get_shape=lambda: [1 << 40, 0, 0]))
    with pytest.raises(
        BuildError, match="x: its tensors hold 1,099,511,627,776 experts, but at most 262,144"
    ):
        stacked_experts("x", ExpertStack.ALTERNATING, {name: (path, name)}, {path: stored})


@pytest.mark.parametrize(
    ("field", "value"),
    [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0), ("quantization_config", {"quant_method": "bitsandbytes"})],
)
def test_what_would_compute_something_else_is_refused(directory: Path, field: str, value: object) -> None:
    config = json.loads(directory.joinpath("config.json").read_text())
    directory.joinpath("config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(BuildError, match="not supported"):
        HfDirectorySource(directory)


def test_a_config_without_the_kinds_of_layers_and_the_rotation_has_those_of_gpt_oss(directory: Path) -> None:
    config = json.loads(directory.joinpath("config.json").read_text())
    for name in ("layer_types", "rope_parameters", "num_experts_per_tok"):
        del config[name]
    directory.joinpath("config.json").write_text(json.dumps(config))
    spec = HfDirectorySource(directory).spec
    assert [n for n, window in enumerate(windows_of(spec)) if window] == [0, 2]
    rope = rope_of(spec)
    assert rope.theta == 150000.0
    assert rope.scaling is not None
    assert rope.scaling.magnitude == pytest.approx(1.3465735902799727)
    assert spec.experts is not None
    assert spec.experts.per_token == 4


def halves(tensors: Tensors, layer: int) -> Tensors:
    """The stacked form of a layer's experts, as published Qwen3.5 have it."""
    prefix = f"model.layers.{layer}.mlp.experts."
    names = [name for name in tensors if name.startswith(prefix)]
    experts = [tensors.pop(name) for name in sorted(names)]
    assert experts
    down, gate, up = (np.stack(experts[kind::3]) for kind in range(3))  # in this order by name
    return {f"{prefix}gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}down_proj": down}


def test_experts_may_be_stacked_with_gates_before_ups(tmp_path: Path) -> None:
    family = GoldenFamily.of("qwen35-moe")
    apart = HfDirectorySource(family.write_hf(tmp_path / "apart"))
    for layer in (0, 2):  # the other one stays as it is
        family.tensors.update(halves(family.tensors, layer))
    stacked = HfDirectorySource(family.write_hf(tmp_path / "stacked"))
    expected = stored_weights(apart)
    for weight, values in stored_weights(stacked).items():
        np.testing.assert_array_equal(values, expected[weight], err_msg=weight)


def test_stacked_experts_of_a_family_without_biases_have_none(tmp_path: Path) -> None:
    family = GoldenFamily.of("qwen35-moe")
    family.tensors.update(halves(family.tensors, 0))
    family.tensors["model.layers.0.mlp.experts.down_proj_bias"] = np.zeros((7, 48), np.float32)
    with pytest.raises(BuildError, match="layer 0 has biases or blocks of experts, which its family lacks"):
        HfDirectorySource(family.write_hf(tmp_path))
