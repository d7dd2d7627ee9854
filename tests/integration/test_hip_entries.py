"""Every entry of `random:tiny` for AMD GPUs, as it is built by default, against the numpy reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emulated_gpu.chips import CHIPS as ALL_CHIPS
from shortfin_apps.llm.builder.program.entry import entries_of
from shortfin_apps.llm.builder.sources.random_tiny import SPEC, RandomTinySource
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.layout import BlockRows, Fp8Rows, RowMajor, cast_floats
from shortfin_apps.llm.builder.weights.write import plan_weights
from shortfin_apps.llm.contract.abi import Entry, EntryFamily
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.reference.pointwise import F32
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.builder.cached_rows import CachedRows
from tests.builder.compiled_model import OTHERS, ROUTED, CompiledModel
from tests.builder.specs import with_key_size
from tests.conftest import BuildTiny
from tests.hip import CHIPS, EmulatedGpus
from tests.matrices import slow_rows_but
from tests.runtimes import needs_shortfin

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(400)]

OPTIONS = BuildOptions(decode_loop_sizes=(), extend_sizes=(384,))  # test_hip_tokens.py has loops
# Each kind of kernel once; the first chip has every size.
FEWER = replace(OPTIONS, prefill_batch_sizes=(2,), decode_batch_sizes=(1, 8, 32))
SIZES = dict.fromkeys(ALL_CHIPS, FEWER) | {"gfx942": OPTIONS}
# Logits have a standard deviation of about 3. Activations and K/V are rounded to bf16, by the reference they
# are not: the largest error was 0.19.
TOLERANCE = 0.3
# Activations are rounded to 8 bits, which moves logits of so small a model by up to 3.5 (by 0.3 in the root
# mean square); another row's logits are up to 12 away. test_fp8.py compares the matmuls themselves.
FP8_TOLERANCE = 5.0
POSITIONS = (0, 1, 15, 16, 17, 63, 64, 100, 130, 255, 256, 300, 512, 700)
ROOM = 112
KEY_SCALE = 1.0
CHUNKS = (33, 1, 16, 90)
ENTRY_SPECS = {"routed": ROUTED, **{name: with_key_size(spec, 24) for name, spec in OTHERS.items()}}


@pytest.fixture(scope="module")
def chip(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def model(chip: str, build_tiny: BuildTiny, emulated_gpus: EmulatedGpus) -> Iterator[CompiledModel]:
    model = open_model(chip, SIZES[chip], build_tiny, emulated_gpus)
    yield model
    model.device.close()


def open_model(
    chip: str, options: BuildOptions, build_tiny: BuildTiny, emulated_gpus: EmulatedGpus
) -> CompiledModel:
    artifact = build_tiny(replace(options, device=f"hip:{chip}"))
    device = emulated_gpus.open(chip)
    program = device.load_program(artifact.vmfb, artifact.parameters, artifact.config.module_name)
    assert sorted(program.entries) == sorted(entry.name for entry in entries_of(options))
    weights = weights_of_the_source(options, resolve_target(f"hip:{chip}"))
    return CompiledModel(SPEC, options, weights, device, program)


def weights_of_the_source(options: BuildOptions, target: Target) -> dict[str, F32]:
    """Its weights as the artefact stores them: stacked, and rounded or quantised."""
    source = RandomTinySource()
    weights = {}
    for weight in plan_weights(SPEC):
        match weight_layout(weight.name, SPEC, options, target):
            case BlockRows(blocks):
                weights[weight.name] = weight.load_blocks(source, blocks).dequantise()
            case Fp8Rows() as layout:
                quants, scales = layout.store(weight.load(source))
                weights[weight.name] = quants.astype(np.float32) * scales[:, None]
            case RowMajor(dtype):
                weights[weight.name] = cast_floats(weight.load(source), dtype).astype(np.float32)
    return weights


def use(rows: CachedRows, entry: Entry, num_rows: int) -> None:
    """Has the entry compute tokens of the first of `rows`, then decodes one more token of each."""
    chosen = range(num_rows)
    lengths = [CHUNKS[row % len(CHUNKS)] for row in chosen]
    match entry.family:
        case EntryFamily.DECODE:
            rows.decode(entry.name, chosen)
        case EntryFamily.PREFILL:
            rows.prefill(entry.name, chosen, lengths)
        case EntryFamily.EXTEND:
            # A task of several tokens begins with a page.
            decodes = [position % OPTIONS.block_seq_stride != 0 for position in positions(num_rows)]
            rows.extend(entry.name, chosen, [1 if d else n for d, n in zip(decodes, lengths, strict=True)])
    rows.decode("decode_bs32", chosen)


def positions(num_rows: int) -> list[int]:
    return [POSITIONS[row % len(POSITIONS)] for row in range(num_rows)]


@pytest.mark.parametrize(
    ("chip", "name"),
    [(chip, entry.name) for chip, options in SIZES.items() for entry in entries_of(options)],
    indirect=["chip"],
)
def test_an_entry_agrees_with_the_reference(
    chip: str, model: CompiledModel, emulated_gpus: EmulatedGpus, name: str
) -> None:
    """What it returns, and what it leaves in the cache, from which each row's next token is decoded.

    Once with all rows taken and, where it has several, once with padding.
    """
    entry = Entry.parse(name)
    assert entry is not None
    full = entry.rows or len(POSITIONS)
    with emulated_gpus.watch(chip):
        for num_rows in {full, max(1, full - 1)}:
            use(CachedRows(model, positions(num_rows), ROOM, KEY_SCALE, TOLERANCE), entry, num_rows)


# Each kind of weights on CDNA and RDNA; test_blocks.py and test_fp8.py try the kernels alone.
@pytest.mark.parametrize(
    ("weights", "chip"),
    [
        *(("q8_0", "gfx950"), ("q8_0", "gfx1100"), ("q4", "gfx942"), ("q4", "gfx1201")),
        *(("fp8", "gfx942"), ("fp8", "gfx950"), ("fp8", "gfx1201")),
    ],
)
def test_quantised_weights_agree_with_the_reference(
    chip: str, weights: WeightType, build_tiny: BuildTiny, emulated_gpus: EmulatedGpus
) -> None:
    tolerance = FP8_TOLERANCE if weights == "fp8" else TOLERANCE
    options = replace(OPTIONS, weights=weights, prefill_batch_sizes=(2,), decode_batch_sizes=(32,))
    model = open_model(chip, options, build_tiny, emulated_gpus)
    with emulated_gpus.watch(chip):
        for entry in entries_of(options):
            num_rows = entry.rows or len(POSITIONS)
            use(CachedRows(model, positions(num_rows), ROOM, KEY_SCALE, tolerance), entry, num_rows)
    model.device.close()


def check_entries(
    chip: str, name: str, kv: KVType, tolerance: float, folder: Path, emulated_gpus: EmulatedGpus
) -> None:
    """All entries of one of ENTRY_SPECS agree with the reference, with weights in f32."""
    options = BuildOptions(
        device=f"hip:{chip}",
        weights="f32",
        kv=kv,
        prefill_batch_sizes=(2,),
        decode_batch_sizes=(32,),
        decode_loop_sizes=(),
    )
    device = emulated_gpus.open(chip)
    spec = replace(ENTRY_SPECS[name], max_position_embeddings=1024)
    model = CompiledModel.build(spec, options, device, folder, resolve_target(f"hip:{chip}"))
    with emulated_gpus.watch(chip):
        for entry in entries_of(options):
            num_rows = entry.rows or len(POSITIONS)
            use(CachedRows(model, positions(num_rows), ROOM, KEY_SCALE, tolerance), entry, num_rows)
    device.close()


# Each kernel alone is tried on both chips, with K and V of either kind.
@pytest.mark.parametrize(
    ("chip", "name", "kv"),
    slow_rows_but(
        [("gfx942", "dual", "f32"), ("gfx1100", "scaled", "f32"), ("gfx942", "normed-after", "q8_0")],
        [
            *(("gfx942", "routed", "f32"), ("gfx1100", "featured", "f32")),
            *(("gfx1100", "windowed", "q8_0"), ("gfx942", "normed-after", "q8_0")),
            *(("gfx1100", "scaled", "f32"), ("gfx942", "other-heads", "q8_0")),
            *(("gfx1100", "sharing", "f32"), ("gfx942", "dual", "f32")),
            *(("gfx1100", "latent", "f32"), ("gfx942", "latent", "q8_0")),
        ],
    ),
)
def test_all_that_a_layer_may_have_agrees_with_the_reference(
    chip: str, name: str, kv: KVType, tmp_path: Path, emulated_gpus: EmulatedGpus
) -> None:
    """In f32, whose errors are those of another order of sums; K and V in bytes are rounded in the
    reference, too, and a last bit may decide to which of two bytes.
    """
    tolerance = 1e-3 if kv == "f32" else 5e-3
    check_entries(chip, name, kv, tolerance, tmp_path, emulated_gpus)


@pytest.mark.parametrize("chip", CHIPS)
def test_entries_of_fixed_sizes_agree_with_the_reference(
    chip: str, build_tiny: BuildTiny, emulated_gpus: EmulatedGpus
) -> None:
    """The heads of `random:tiny` are so small that its `extend_t64` needs a flag to be compiled at all."""
    options = BuildOptions(
        prefill_batch_sizes=(2,),
        decode_batch_sizes=(32,),
        chunk_sizes=(96,),
        extend_sizes=(64,),
        decode_loop_sizes=(),
    )
    model = open_model(chip, options, build_tiny, emulated_gpus)
    with emulated_gpus.watch(chip):
        for name, num_rows in {"prefill_bs2_s96": 2, "extend_t64": 3}.items():
            entry = Entry.parse(name)
            assert entry is not None
            use(CachedRows(model, positions(num_rows), ROOM, KEY_SCALE, TOLERANCE), entry, num_rows)
    model.device.close()
