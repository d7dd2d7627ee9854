"""Decodes as one launch on emulated GPUs: numpy's logits, and the bits of separate launches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from emulated_gpu.control import Control
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.operations import Activation
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import (
    BuildOptions,
    FloatType,
    ModelSpec,
    WeightType,
    num_weights,
    weight_shapes,
)
from shortfin_apps.llm.model.weight_blocks import MXFP4, Q8_0, BlockType
from tests.builder.cached_rows import CachedRows
from tests.builder.compiled_model import (
    FEATURED,
    HYBRID,
    NORMED_AFTER,
    ROUTED,
    TINY,
    WINDOWED,
    CompiledModel,
    block_table,
)
from tests.builder.specs import changed
from tests.builder.uncompiled import text_of
from tests.hip import EmulatedGpus
from tests.matrices import slow_but, slow_rows_but
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.triton import one_launch, synchronisation
from shortfin_apps.llm.builder.lowering.triton import one_launch as one_launch_lowering
from shortfin_apps.llm.builder.lowering.triton import one_launch_kernels
from shortfin_apps.llm.builder.lowering.triton.tiles import OneLaunchTiles, one_launch_tiles

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

GELU: Activation = "gelu"
LONG = changed(TINY, {"max_position_embeddings": 1024})
SPECS: dict[str, ModelSpec] = {
    "llama": LONG,
    # Sizes that no tile divides, heads whose size is no power of two, and a head that is not the embedding.
    "uneven": changed(
        LONG,
        {"hidden_size": 80, "features": 120, "vocab_size": 70, "tie_word_embeddings": False},
        {"heads": 3, "kv_heads": 1, "head_dim": 40},
    ),
    "qwen": changed(LONG, {"bias": True, "qk_norm": True, "head_dim": 24}),
    "window": changed(LONG, {"window": 37, "sinks": True, "cap": 4.0, "logit_cap": 6.0, "activation": GELU}),
    "deep": changed(LONG, {"rope": Rope(theta=500.0)}, layers=5),
}
# Logits have a standard deviation of about 1.
TOLERANCES: dict[FloatType, float] = {"f32": 1e-3, "f16": 2e-2, "bf16": 0.1}
# Some with several shares of attention.
POSITIONS = (300, 0, 129, 15, 700, 64, 16, 255, 1, 31, 500, 2, 17, 256, 90, 3)
Case = tuple[str, str, FloatType, int]
CASES: list[Case] = [
    ("gfx942", "llama", "bf16", 1),
    ("gfx942", "llama", "bf16", 8),
    ("gfx942", "llama", "bf16", 16),
    ("gfx942", "llama", "f16", 2),
    ("gfx942", "llama", "f32", 4),
    ("gfx1100", "llama", "bf16", 2),
    ("gfx1100", "llama", "f16", 8),
    ("gfx950", "llama", "bf16", 2),
    ("gfx1201", "llama", "bf16", 2),
    ("gfx942", "uneven", "f32", 3),
    ("gfx942", "qwen", "f32", 3),
    ("gfx942", "window", "f32", 3),
    ("gfx942", "deep", "f32", 3),
    ("gfx1100", "uneven", "f32", 3),
    ("gfx1100", "qwen", "f32", 3),
    ("gfx1100", "window", "f32", 3),
]
# Weights in blocks: the option and, if it is not the type that this makes, the type of blocks.
BLOCKS: dict[str, tuple[WeightType, BlockType | None]] = {
    "q4": ("q4", None),
    "q8_0": ("q8_0", None),
    "q4_k": ("q4", BlockType(4, has_minima=True, group=256)),
    "q6_k": ("q4", BlockType(8, 16, group=256)),
    "mxfp4": ("q4", MXFP4),
}
# Sizes that are whole groups of blocks.
WIDE = changed(
    LONG,
    {"hidden_size": 256, "features": 256, "tie_word_embeddings": False},
    {"head_dim": 64, "qk_norm": True},
)
UNMARKED: list[Case] = [("gfx942", "llama", "bf16", 16), ("gfx1100", "llama", "f16", 8)]


PROGRAMS = 4  # so that they compute several tiles of a stage


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiles(target: Target, per_unit: int) -> OneLaunchTiles:
        return replace(one_launch_tiles(target), programs=PROGRAMS)

    monkeypatch.setattr(one_launch_kernels, "one_launch_tiles", tiles)


def options(chip: str, dtype: FloatType, rows: int, *, one: bool = True) -> BuildOptions:
    return BuildOptions(
        device=f"hip:{chip}",
        weights=dtype,
        kv=dtype,
        prefill_batch_sizes=(1,),
        decode_batch_sizes=(rows,),
        decode_loop_sizes=(),
        one_launch=one,
    )


@contextmanager
def opened(spec: ModelSpec, build: BuildOptions, folder: Path, gpus: EmulatedGpus) -> Iterator[CompiledModel]:
    chip = build.device.removeprefix("hip:")
    device = gpus.open(chip)
    yield CompiledModel.build(spec, build, device, folder, resolve_target(build.device))
    device.close()


def launches(control: Control, kernel: str) -> int:
    kernels = control.report().kernels.items()
    return sum(counters.launches for name, counters in kernels if name.startswith(kernel))


@pytest.mark.parametrize(("chip", "name", "dtype", "rows"), slow_rows_but(UNMARKED, CASES))
def test_one_launch_agrees_with_the_reference(
    chip: str, name: str, dtype: FloatType, rows: int, tmp_path: Path, emulated_gpus: EmulatedGpus
) -> None:
    """Two steps, of which the second reads what the first one left in the cache; with padding."""
    with (
        emulated_gpus.watch(chip) as control,
        opened(SPECS[name], options(chip, dtype, rows), tmp_path, emulated_gpus) as model,
    ):
        cached = CachedRows(model, POSITIONS[:rows], 16, 1.0, TOLERANCES[dtype])
        for taken in (rows, max(1, rows - 1)):
            cached.decode(f"decode_bs{rows}", range(taken))
        assert launches(control, "decode_layers") == 2
        assert not launches(control, "linear")


STARTS = (5, 140, 17, 0, 31, 120, 100, 3)  # enough rows for several waves to store some


def decoded(model: CompiledModel) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Logits of random tokens over a cache of zeros, in the second of two equal steps, and the cache then."""
    model.fill_cache(0)
    rng = np.random.default_rng(1)
    blocks = block_table(rng, [start // 16 + 1 for start in STARTS], 16)
    tokens = rng.integers(0, model.spec.vocab_size, (len(STARTS), 1))
    for _ in range(2):
        logits = model.decode(f"decode_bs{len(STARTS)}", tokens, np.array(STARTS), blocks).logits
    return logits, model.read_cache()


@pytest.mark.parametrize(
    ("chip", "dtype"),
    slow_rows_but([("gfx942", "bf16")], [("gfx942", "bf16"), ("gfx1100", "bf16"), ("gfx942", "f16")]),
)
def test_one_launch_has_the_bits_of_separate_launches(
    chip: str, dtype: FloatType, tmp_path: Path, emulated_gpus: EmulatedGpus
) -> None:
    results = []
    for one in (False, True):
        build = options(chip, dtype, len(STARTS), one=one)
        with (
            emulated_gpus.watch(chip) as control,
            opened(SPECS["llama"], build, tmp_path, emulated_gpus) as model,
        ):
            results.append(decoded(model))
            assert bool(launches(control, "decode_layers")) == one
    (separate, its_cache), (together, cache) = results
    np.testing.assert_array_equal(together, separate)
    np.testing.assert_array_equal(cache, its_cache)


def quantised(chip: str, kind: str, rows: int, *, one: bool = True) -> BuildOptions:
    weights, blocks = BLOCKS.get(kind, ("fp8", None))
    build = replace(options(chip, "bf16", rows, one=one), weights=weights)
    if blocks is None:
        return build
    matrices = [name for name, shape in weight_shapes(WIDE).items() if len(shape) == 2]
    types = [(name, blocks) for name in matrices if name.startswith("blk.")]
    return replace(build, block_types=tuple(types))


@pytest.mark.parametrize(
    ("chip", "kind", "rows"),
    slow_rows_but(
        [("gfx942", "q4", 3), ("gfx1100", "q4_k", 8)],
        [
            *((chip, kind, rows) for chip in ("gfx942", "gfx1100") for kind in BLOCKS for rows in (3, 8)),
            *(("gfx950", "q4", 2), ("gfx1201", "q4", 2)),
        ],
    ),
)
def test_weights_in_blocks_agree_with_the_reference(
    chip: str, kind: str, rows: int, tmp_path: Path, emulated_gpus: EmulatedGpus
) -> None:
    with (
        emulated_gpus.watch(chip) as control,
        opened(WIDE, quantised(chip, kind, rows), tmp_path, emulated_gpus) as model,
    ):
        cached = CachedRows(model, POSITIONS[:rows], 16, 1.0, TOLERANCES["bf16"])
        for taken in (rows, rows - 1):
            cached.decode(f"decode_bs{rows}", range(taken))
        assert launches(control, "decode_layers") == 2
        assert not launches(control, "linear")


@pytest.mark.parametrize(
    ("chip", "kind"),
    slow_rows_but(
        [("gfx942", "q4"), ("gfx942", "fp8")],
        [
            *((chip, kind) for chip in ("gfx942", "gfx1100") for kind in BLOCKS),
            *(("gfx942", "fp8"), ("gfx950", "fp8"), ("gfx1201", "fp8")),
        ],
    ),
)
def test_quantised_weights_have_the_bits_of_separate_launches(
    chip: str, kind: str, tmp_path: Path, emulated_gpus: EmulatedGpus
) -> None:
    results = []
    for one in (False, True):
        build = quantised(chip, kind, len(STARTS), one=one)
        with emulated_gpus.watch(chip), opened(WIDE, build, tmp_path, emulated_gpus) as model:
            results.append(decoded(model))
    (separate, its_cache), (together, cache) = results
    np.testing.assert_array_equal(together, separate)
    np.testing.assert_array_equal(cache, its_cache)


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (TINY, 32),
        (WINDOWED, 2),
        (NORMED_AFTER, 2),
        (FEATURED, 2),
        (ROUTED, 2),
        (HYBRID, 2),
        (changed(TINY, at={1: {"qk_norm": True}}), 2),
    ],
    ids=["rows", "windowed", "normed-after", "featured", "routed", "hybrid", "unequal"],
)
def test_other_decodes_are_refused(spec: ModelSpec, rows: int) -> None:
    with pytest.raises(BuildError, match="--one-launch: no decode"):
        text_of(spec, options("gfx942", "bf16", rows))


def test_layers_with_blocks_of_several_types_are_refused() -> None:
    build = replace(options("gfx942", "bf16", 2), weights="q4")
    with pytest.raises(BuildError, match="equal layers"):
        text_of(TINY, replace(build, block_types=(("blk.1.ffn_down.weight", Q8_0),)))


def test_a_cpu_is_refused() -> None:
    with pytest.raises(BuildError, match="needs a GPU"):
        text_of(TINY, replace(options("gfx942", "bf16", 2), device="cpu"))


def test_a_model_may_have_larger_decodes_too() -> None:
    text = text_of(TINY, replace(options("gfx942", "bf16", 2), decode_batch_sizes=(2, 16, 32)))
    assert "decode_layers_2" in text
    assert "decode_layers_16" in text
    assert "decode_layers_32" not in text


def test_a_model_that_is_not_small_has_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_launch_lowering, "MOST_WEIGHTS_OF_SMALL", num_weights(TINY) - 1)
    text = text_of(TINY, replace(options("gfx942", "bf16", 2), decode_batch_sizes=(8, 16)))
    assert "decode_layers_8" in text
    assert "decode_layers_16" not in text


def test_the_tables_columns_are_those_of_the_kernel() -> None:
    columns = one_launch_kernels.COLUMNS
    assert columns == {name: getattr(one_launch, name.upper()).value for name in columns}
    assert one_launch.NUM_FIELDS.value == one_launch_kernels.NUM_COLUMNS


# ---- planted mistakes

SOURCE, SYNCHRONISATION = (
    Path(module.__file__ or "").read_text() for module in (one_launch, synchronisation)
)
WAIT = "stage = after_stage(barrier, stage, PROGRAMS)"
NUM_WAITS = SOURCE.count(WAIT)


def early(number: int) -> str:
    """The kernel, of which the wait of this number, in the order of the text, is for the stage before."""
    parts = SOURCE.split(WAIT)
    parts[number] += "stage = after_stage(barrier, stage - 1, PROGRAMS) + 1" + parts.pop(number + 1)
    return WAIT.join(parts)


def altered(change: Callable[[str], str]) -> str:
    """The kernel with other functions `arrive` and `wait_for`."""
    imported = "    arrive,\n    is_abandoned,\n    memory_barrier,\n    wait_for,\n"
    assert SOURCE.count(imported) == 1
    kept = "    ABANDONED,\n    MOST_POLLS,\n    is_abandoned,\n    memory_barrier,\n"
    own = SYNCHRONISATION[
        SYNCHRONISATION.index("@triton.jit\ndef arrive") : SYNCHRONISATION.index(
            "@triton.jit\ndef is_abandoned"
        )
    ]
    return SOURCE.replace(imported, kept) + "\n\n" + change(own)


def without(line: str) -> str:
    """The kernel with a barrier that lacks something."""
    new = line.replace('"acquire"', '"relaxed"').replace('"release"', '"relaxed"') if "sem=" in line else ""

    def change(text: str) -> str:
        assert text.count(line) == 1
        return text.replace(line, new)

    return altered(change)


def planted(text: str, folder: Path) -> ModuleType:
    """The text as a module."""
    path = folder / "planted.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MISTAKES = {
    **{f"wait-{number}": early(number) for number in range(NUM_WAITS)},
    "release": without('tl.atomic_add(counter, 1, sem="release", scope="gpu")'),
    "acquire": without('while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrivals:'),
    "stores": without("    memory_barrier()  # the count must not overtake a store of another wave\n"),
}


DAMAGED = options("gfx942", "f16", len(STARTS))  # f16 has all stages, except those that only fp8 has
QUANTISING = "wait-0"  # of `input_of`, in fp8


@pytest.mark.parametrize("name", slow_but([QUANTISING, "wait-3", "stores"], MISTAKES))
def test_a_planted_mistake_is_found(
    name: str, tmp_path: Path, emulated_gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a finding; or by other results, if a load that should have waited runs before all stores."""
    build = quantised("gfx942", "fp8", len(STARTS)) if name == QUANTISING else DAMAGED
    with opened(SPECS["llama"], build, tmp_path, emulated_gpus) as model:
        right, _ = decoded(model)
    kernel = planted(MISTAKES[name], tmp_path).decode_layers
    monkeypatch.setattr(one_launch_kernels, "decode_layers", kernel)
    emulated_gpus.control.clear_report()
    with opened(SPECS["llama"], build, tmp_path, emulated_gpus) as model:
        logits, _ = decoded(model)
    kinds = {finding.kind for finding in emulated_gpus.control.report().findings}
    emulated_gpus.control.clear_report()
    assert "unordered" in kinds or (logits != right).any()


def test_a_launch_in_which_a_workgroup_never_arrives_ends_with_nan(
    tmp_path: Path, emulated_gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(text: str) -> str:
        counts, limit = 'tl.atomic_add(counter, 1, sem="release", scope="gpu")', "polls == MOST_POLLS"
        assert text.count(counts) == text.count(limit) == 1
        some = f"if tl.program_id(0) != 3:\n        {counts}"
        return text.replace(counts, some).replace(limit, "polls == 20")

    monkeypatch.setattr(one_launch_kernels, "decode_layers", planted(altered(change), tmp_path).decode_layers)
    emulated_gpus.control.clear_report()
    with opened(SPECS["llama"], DAMAGED, tmp_path, emulated_gpus) as model:
        logits, _ = decoded(model)
    assert np.isnan(logits).all()
    assert "endless" not in {finding.kind for finding in emulated_gpus.control.report().findings}
    emulated_gpus.control.clear_report()
