"""MFMA: layouts against AMD's calculator, sums of products against numpy in f64, what is defined."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
from tinygrad.runtime.autogen.amd.cdna import ins
from tinygrad.runtime.autogen.amd.cdna.ins import s_endpgm, v

from emulated_gpu.chips import CHIPS
from emulated_gpu_tests.wave.matrices import (
    GOLDEN,
    Layout,
    Matrices,
    bits_from,
    bits_of,
    documented,
    formats_of,
    values_of,
)
from emulated_gpu_tests.wave.single_wave import Wave

A, B, C, D = 0, 32, 64, 128  # the first register of each matrix
ALL = 2**64 - 1


def dense(rows: int, k: int, formats: tuple[str, str, str]) -> Matrices:
    """The layout of CDNA 4's instructions, which the calculator lacks: as CDNA 3's, with more k in a lane."""
    groups = 64 // rows
    places = [[1 << n, 0, 0] for n in range(rows.bit_length() - 1)]
    run = k // groups
    lanes = places + [[0, run << n, 0] for n in range(groups.bit_length() - 1)]
    elements = [[0, 1 << n, 0] for n in range(run.bit_length() - 1)]
    d = documented("cdna3", f"v_mfma_f32_{'16x16x4' if rows == 16 else '32x32x2'}_f32", 64).d
    a, b = (Layout(bits_of(each), elements, lanes) for each in formats[:2])
    return Matrices((rows, rows, k, 1), *formats, a, b, d)


CDNA4_SHAPES = [
    ("v_mfma_f32_16x16x32_f16", 16, 32),
    ("v_mfma_f32_32x32x16_f16", 32, 16),
    ("v_mfma_f32_16x16x32_bf16", 16, 32),
    ("v_mfma_f32_32x32x16_bf16", 32, 16),
    ("v_mfma_i32_16x16x64_i8", 16, 64),
    ("v_mfma_i32_32x32x32_i8", 32, 32),
]
CDNA4 = {name: dense(rows, k, formats_of(name)) for name, rows, k in CDNA4_SHAPES}
CDNA3 = {key.split()[1]: documented("cdna3", key.split()[1], 64) for key in GOLDEN if "cdna3 v_mfma" in key}
CASES = [("gfx942", name) for name in CDNA3] + [("gfx950", name) for name in CDNA3 if "xf32" not in name]
CASES += [("gfx950", name) for name in CDNA4]


def matrices_of(chip: str, name: str) -> Matrices:
    about = CDNA3.get(name) or CDNA4[name]
    if chip == "gfx950" or about.a_format not in ("fp8", "bf8"):
        return about
    return replace(about, a_format=f"{about.a_format}_fnuz", b_format=f"{about.b_format}_fnuz")


@dataclass
class Run:
    """One instruction on matrices of bits; B is given by columns."""

    chip: str
    name: str
    about: Matrices
    wave: Wave = field(default_factory=Wave)

    def load(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        for layout, first, matrix in ((self.about.a, A, a), (self.about.b, B, b), (self.about.d, C, c)):
            layout.place(matrix, self.wave.v[first : first + layout.num_registers])

    def execute(self, first_c: int = C, first_d: int = D, **fields: int) -> np.ndarray:
        """The bits of D."""
        about = self.about
        operands = [
            v[first : first + layout.num_registers - 1] if layout.num_registers > 1 else v[first]
            for first, layout in ((first_d, about.d), (A, about.a), (B, about.b), (first_c, about.d))
        ]
        if (
            "xf32" in self.name
        ):  # which the tables list with packed operations, whose fields have other defaults
            fields |= {"opsel_hi": 0, "opsel_hi2": 0}
        instruction = getattr(ins, self.name)(*operands, **fields)
        self.wave.run(CHIPS[self.chip], instruction.to_bytes() + s_endpgm().to_bytes())
        assert self.wave.status == 0
        return about.d.fetch(self.wave.v[first_d : first_d + about.d.num_registers], about.d_shape)


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.asarray(c + np.einsum("nik,njk->nij", a, b))


def small_integers(rng: np.random.Generator, shape: tuple[int, ...], format_: str) -> np.ndarray:
    """Bits of numbers of which all formats hold sums and products exactly."""
    return bits_from(rng.integers(-4, 5, shape), format_)


def small_matrices(about: Matrices, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        small_integers(rng, about.a_shape, about.a_format),
        small_integers(rng, about.b_shape, about.b_format),
        small_integers(rng, about.d_shape, about.d_format),
    )


def expected_values(about: Matrices, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return product(values_of(a, about.a_format), values_of(b, about.b_format), values_of(c, about.d_format))


@pytest.mark.parametrize(("chip", "name"), CASES)
def test_every_element_is_where_the_calculator_says(chip: str, name: str) -> None:
    about = matrices_of(chip, name)
    a, b, c = small_matrices(about, seed=1)
    run = Run(chip, name, about)
    run.load(a, b, c)
    run.wave.set_exec(0x123456789ABCDEF)  # of which these take no notice
    result = values_of(run.execute(), about.d_format)
    np.testing.assert_array_equal(result, expected_values(about, a, b, c))
    np.testing.assert_array_equal(run.wave.v_defined[D : D + about.d.num_registers], ALL)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], format_: str) -> np.ndarray:
    """Normal numbers of many magnitudes, and zeros."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)
    return bits_from(np.where(rng.integers(0, 4, shape), values, 0), format_)


ROUNDED = [
    "v_mfma_f32_16x16x4_f32",
    "v_mfma_f32_32x32x2_f32",
    "v_mfma_f32_16x16x16_f16",
    "v_mfma_f32_32x32x8_bf16",
]


@pytest.mark.parametrize("name", ROUNDED)
def test_products_are_fused_and_added_in_the_order_of_k(name: str) -> None:
    about = CDNA3[name]
    rng = np.random.default_rng(2)
    a, b = random_bits(rng, about.a_shape, about.a_format), random_bits(rng, about.b_shape, about.b_format)
    c = random_bits(rng, about.d_shape, "f32")
    run = Run("gfx942", name, about)
    run.load(a, b, c)
    expected = values_of(c, "f32").astype(np.float32)
    for k in range(about.shape[2]):
        left, right = values_of(a, about.a_format)[:, :, k, None], values_of(b, about.b_format)[:, None, :, k]
        expected = (np.longdouble(left) * right + expected).astype(np.float32)  # longdouble has enough bits
    np.testing.assert_array_equal(values_of(run.execute(), "f32"), expected)


def test_a_product_is_not_rounded_before_it_is_added() -> None:
    about = CDNA3["v_mfma_f32_16x16x4_f32"]
    x = np.float64(1 + 2**-23)
    a, b, c = np.zeros(about.a_shape), np.zeros(about.b_shape), np.full(about.d_shape, -(1 + 2**-22))
    a[..., 0] = b[..., 0] = x
    run = Run("gfx942", "v_mfma_f32_16x16x4_f32", about)
    run.load(*(bits_from(each, "f32") for each in (a, b, c)))
    np.testing.assert_array_equal(values_of(run.execute(), "f32"), 2.0**-46)


FORMATS = {
    "f16": "v_mfma_f32_16x16x16_f16",
    "bf16": "v_mfma_f32_16x16x16_bf16",
    "i8": "v_mfma_i32_16x16x32_i8",
    "fp8": "v_mfma_f32_16x16x32_fp8_fp8",
    "bf8": "v_mfma_f32_16x16x32_bf8_bf8",
    "f32": "v_mfma_f32_16x16x4_f32",
}


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
@pytest.mark.parametrize("format_", FORMATS)
def test_every_value_of_a_format_is_read_as_it_is(chip: str, format_: str) -> None:
    """A column of A times 1 gives these values: all of 8 bits, and the edges of the wider formats."""
    name = FORMATS[format_]
    about = matrices_of(chip, name)
    bits = bits_of(format_)
    upper = {
        *range(0, 1 << 16, 251),
        *range(32),
        *(1 << n for n in range(16)),
        0x7C00,
        0x7F80,
        0xFC00,
        0xFF80,
    }
    codes = np.array(range(256) if bits == 8 else [each << (bits - 16) for each in sorted(upper)], np.uint64)
    for start in range(0, len(codes), 16):
        some = np.resize(codes[start : start + 16], 16)
        a, b = np.zeros(about.a_shape, np.uint64), np.zeros(about.b_shape, np.uint64)
        a[0, :, 1] = some
        b[0, :, 1] = bits_from(np.ones(16), about.b_format)
        run = Run(chip, name, about)
        run.load(a, b, np.zeros(about.d_shape, np.uint64))
        result = values_of(run.execute(), about.d_format)
        expected = np.broadcast_to(values_of(some, about.a_format)[:, None], (16, 16))
        np.testing.assert_array_equal(result[0], expected)


def test_denormals_are_kept() -> None:
    about = CDNA3["v_mfma_f32_16x16x4_f32"]
    a, b, c = np.zeros(about.a_shape), np.zeros(about.b_shape), np.full(about.d_shape, 2.0**-149)
    a[..., 0], b[..., 0] = 2.0**-140, 1
    run = Run("gfx942", "v_mfma_f32_16x16x4_f32", about)
    run.load(*(bits_from(each, "f32") for each in (a, b, c)))
    run.wave.mode = 0  # which these take no notice of
    np.testing.assert_array_equal(values_of(run.execute(), "f32"), 2.0**-140 + 2.0**-149)


def test_integer_sums_wrap() -> None:
    about = CDNA3["v_mfma_i32_16x16x32_i8"]
    a, b = np.full(about.a_shape, 0x80, np.uint64), np.full(about.b_shape, 0x80, np.uint64)
    run = Run("gfx942", "v_mfma_i32_16x16x32_i8", about)
    run.load(a, b, np.full(about.d_shape, 0x7FFFFFFF, np.uint64))
    np.testing.assert_array_equal(run.execute(), 0x7FFFFFFF + 32 * 128 * 128)


UNDEFINED = [
    "v_mfma_f32_16x16x16_f16",
    "v_mfma_f32_32x32x4_2b_bf16",
    "v_mfma_f32_4x4x4_16b_f16",
    "v_mfma_f32_32x32x2_f32",
    "v_mfma_i32_16x16x32_i8",
    "v_mfma_f64_16x16x4_f64",
    "v_mfma_f64_4x4x4_4b_f64",
]


@pytest.mark.parametrize("name", UNDEFINED)
@pytest.mark.parametrize("seed", range(4))
def test_an_element_is_defined_if_its_row_column_and_c_are(name: str, seed: int) -> None:
    about = CDNA3[name]
    rng = np.random.default_rng(seed)
    run = Run("gfx942", name, about)
    run.load(*small_matrices(about, seed))
    for first, layout in ((A, about.a), (B, about.b), (C, about.d))[: seed or 3]:
        for register in range(layout.num_registers):
            lanes = sum(1 << int(lane) for lane in rng.integers(0, 64, 2))
            run.wave.v_defined[first + register] = ALL & ~lanes
    defined = run.wave.v_defined
    a, b, c = (
        layout.are_defined(defined[first : first + layout.num_registers], shape)
        for first, layout, shape in (
            (A, about.a, about.a_shape),
            (B, about.b, about.b_shape),
            (C, about.d, about.d_shape),
        )
    )
    run.execute()
    results = about.d.are_defined(run.wave.v_defined[D : D + about.d.num_registers], about.d_shape)
    np.testing.assert_array_equal(results, a.all(2, keepdims=True) & np.asarray(b.all(2))[:, None] & c)


SEVERAL_BLOCKS = [name for name, about in CDNA3.items() if about.shape[3] > 1 and "f64" not in name]


@pytest.mark.parametrize("name", SEVERAL_BLOCKS)
def test_cbsz_and_abid_give_blocks_the_a_of_another(name: str) -> None:
    about = CDNA3[name]
    blocks = about.shape[3]
    a, b, c = small_matrices(about, seed=3)
    for cbsz in range(1, blocks.bit_length()):
        for abid in {0, 1, (1 << cbsz) - 1}:
            run = Run("gfx942", name, about)
            run.load(a, b, c)
            run.wave.v_defined[A] = ALL & ~1  # row 0 of block 0
            shared = [(block >> cbsz << cbsz) + abid for block in range(blocks)]
            result = values_of(run.execute(cbsz=cbsz, abid=abid), about.d_format)
            np.testing.assert_array_equal(result, expected_values(about, a[shared], b, c))
            defined = about.d.are_defined(run.wave.v_defined[D : D + about.d.num_registers], about.d_shape)
            np.testing.assert_array_equal(defined[:, 0, 0], [block != 0 for block in shared])


# The source of each 16 lanes of B (the calculator's "BLGP" and the CDNA 3 ISA).
PATTERNS = {1: (0, 1, 0, 1), 2: (2, 3, 2, 3), 3: (1, 2, 3, 0), **{4 + n: (n,) * 4 for n in range(4)}}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "name", ["v_mfma_f32_16x16x4_4b_f16", "v_mfma_f32_32x32x2_f32", "v_mfma_i32_4x4x4_16b_i8"]
)
def test_blgp_takes_b_from_other_lanes(name: str, pattern: int) -> None:
    about = CDNA3[name]
    a, b, c = small_matrices(about, seed=4)
    run = Run("gfx942", name, about)
    run.load(a, b, c)
    run.wave.v_defined[B] = 0xFFFF00FF_F0FF0FFF
    moved = np.concatenate([np.arange(16) + 16 * group for group in PATTERNS[pattern]])
    registers = run.wave.v[B : B + about.b.num_registers, moved]
    lanes = sum(int(run.wave.v_defined[B]) >> int(lane) & 1 and 1 << n for n, lane in enumerate(moved))
    b_read = about.b.fetch(registers, about.b_shape)
    b_defined = about.b.are_defined(np.array([lanes] + [ALL] * 3, np.uint64), about.b_shape)
    result = values_of(run.execute(blgp=pattern), about.d_format)
    np.testing.assert_array_equal(result, expected_values(about, a, b_read, c))
    defined = about.d.are_defined(run.wave.v_defined[D : D + about.d.num_registers], about.d_shape)
    np.testing.assert_array_equal(
        defined, np.broadcast_to(np.asarray(b_defined.all(2))[:, None], about.d_shape)
    )


@pytest.mark.parametrize("name", ["v_mfma_f64_16x16x4_f64", "v_mfma_f64_4x4x4_4b_f64"])
@pytest.mark.parametrize("negated", range(8))
def test_of_f64_blgp_negates(name: str, negated: int) -> None:
    about = CDNA3[name]
    rng = np.random.default_rng(5)
    a, b, c = (rng.standard_normal(shape) for shape in (about.a_shape, about.b_shape, about.d_shape))
    run = Run("gfx942", name, about)
    run.load(*(bits_from(each, "f64") for each in (a, b, c)))
    signs = [-1 if negated >> n & 1 else 1 for n in range(3)]
    expected = product(signs[0] * a, signs[1] * b, signs[2] * c)
    np.testing.assert_allclose(values_of(run.execute(blgp=negated), "f64"), expected, rtol=1e-13)


def test_f64_is_fused() -> None:
    about = CDNA3["v_mfma_f64_16x16x4_f64"]
    a, b, c = np.zeros(about.a_shape), np.zeros(about.b_shape), np.full(about.d_shape, -(1 + 2.0**-51))
    a[..., 3] = b[..., 3] = 1 + 2.0**-52
    run = Run("gfx942", "v_mfma_f64_16x16x4_f64", about)
    run.load(*(bits_from(each, "f64") for each in (a, b, c)))
    np.testing.assert_array_equal(values_of(run.execute(), "f64"), 2.0**-104)


@pytest.mark.parametrize(
    "name", ["v_mfma_f32_16x16x16_f16", "v_mfma_i32_32x32x16_i8", "v_mfma_f64_16x16x4_f64"]
)
def test_c_may_be_a_constant_or_d(name: str) -> None:
    about = CDNA3[name]
    a, b, c = small_matrices(about, seed=6)
    run = Run("gfx942", name, about)
    run.load(a, b, c)
    in_place = values_of(run.execute(first_d=C), about.d_format)
    np.testing.assert_array_equal(in_place, expected_values(about, a, b, c))
    one = 1 if about.d_format == "i32" else 1.0
    left, right = v[A : A + about.a.num_registers - 1], v[B : B + about.b.num_registers - 1]
    instruction = getattr(ins, name)(v[D : D + about.d.num_registers - 1], left, right, one)
    run.wave.run(CHIPS["gfx942"], instruction.to_bytes() + s_endpgm().to_bytes())
    result = about.d.fetch(run.wave.v[D : D + about.d.num_registers], about.d_shape)
    ones = bits_from(np.ones(about.d_shape), about.d_format)
    np.testing.assert_array_equal(values_of(result, about.d_format), expected_values(about, a, b, ones))


@pytest.mark.parametrize("name", ["v_mfma_f32_16x16x16_bf16", "v_mfma_i32_16x16x32_i8"])
def test_operands_may_be_accumulation_registers(name: str) -> None:
    about = CDNA3[name]
    a, b, c = small_matrices(about, seed=7)
    run = Run("gfx942", name, about)
    run.load(a, b, c)
    run.wave.v[256:512], run.wave.v[:256] = run.wave.v[:256].copy(), 0
    run.execute(acc=3, acc_cd=1)
    result = about.d.fetch(run.wave.v[256 + D : 256 + D + about.d.num_registers], about.d_shape)
    np.testing.assert_array_equal(values_of(result, about.d_format), expected_values(about, a, b, c))
    assert not run.wave.v[:256].any()


def test_of_xf32_10_bits_of_mantissa_are_read() -> None:
    about = CDNA3["v_mfma_f32_16x16x8_xf32"]
    rng = np.random.default_rng(8)
    a, b = (
        rng.integers(0x3F800000, 0x3FFFFFFF, shape).astype(np.uint64)
        for shape in (about.a_shape, about.b_shape)
    )
    run = Run("gfx942", "v_mfma_f32_16x16x8_xf32", about)
    run.load(a, b, np.zeros(about.d_shape, np.uint64))
    expected = product(values_of(a, "xf32"), values_of(b, "xf32"), np.zeros(about.d_shape))
    np.testing.assert_allclose(values_of(run.execute(), "f32"), expected, rtol=1e-6)


# The formats by the numbers that CBSZ and BLGP have for them.
SMALL = ("fp8", "bf8", "fp6", "bf6", "fp4")
SMALL_SHAPES = {"16x16x128": (16, 128), "32x32x64": (32, 64)}


@cache
def small_layout(rows: int, k: int, format_: str) -> Layout:
    """Lanes hold 32 consecutive k, or twice 16 of 8 bits (composable_kernel, test/mx_mfma_op)."""
    run = 16 if bits_of(format_) == 8 else 32
    groups = [[0, run << n, 0] for n in range((64 // rows).bit_length() - 1)]
    elements = [[0, 1 << n, 0] for n in range(run.bit_length() - 1)]
    lanes = [[1 << n, 0, 0] for n in range(rows.bit_length() - 1)]
    return Layout(bits_of(format_), elements + [[0, k // 2, 0]] * (run == 16), lanes + groups)


def small_formats(shape: str, a: str, b: str) -> Matrices:
    rows, k = SMALL_SHAPES[shape]
    d = dense(rows, 64 // rows, ("f32", "f32", "f32")).d
    return Matrices((rows, rows, k, 1), a, b, "f32", small_layout(rows, k, a), small_layout(rows, k, b), d)


def execute_small(run: Run, name: str, scales: tuple[int, int] | None = None, **fields: int) -> np.ndarray:
    """The bits of D; `scales`: the registers of the scales of A and B."""
    about = run.about
    d, c = (v[first : first + about.d.num_registers - 1] for first in (D, C))
    fields |= {"cbsz": SMALL.index(about.a_format), "blgp": SMALL.index(about.b_format)}
    if scales:
        fields |= {"x2encoding": 0xD3AC, "scale_src0": 256 + scales[0], "scale_src1": 256 + scales[1]}
    a, b = v[A : A + about.a.num_registers - 1], v[B : B + about.b.num_registers - 1]
    instruction = getattr(ins, name)(d, a, b, c, **fields)
    run.wave.run(CHIPS["gfx950"], instruction.to_bytes() + s_endpgm().to_bytes())
    assert run.wave.status == 0
    return about.d.fetch(run.wave.v[D : D + about.d.num_registers], about.d_shape)


@pytest.mark.parametrize("shape", SMALL_SHAPES)
@pytest.mark.parametrize("a_format", SMALL)
@pytest.mark.parametrize("b_format", SMALL)
def test_f8f6f4_reads_each_source_in_its_format(shape: str, a_format: str, b_format: str) -> None:
    about = small_formats(shape, a_format, b_format)
    rng = np.random.default_rng(9)
    a, b = (
        bits_from(rng.integers(-2, 3, size), format_)
        for size, format_ in ((about.a_shape, a_format), (about.b_shape, b_format))
    )
    c = small_integers(rng, about.d_shape, "f32")
    run = Run("gfx950", f"v_mfma_f32_{shape}_f8f6f4", about)
    run.load(a, b, c)
    result = values_of(execute_small(run, run.name), "f32")
    np.testing.assert_array_equal(result, expected_values(about, a, b, c))


@pytest.mark.parametrize("format_", ["fp6", "bf6", "fp4"])
def test_every_value_of_6_and_4_bits_is_read_as_it_is(format_: str) -> None:
    about = small_formats("32x32x64", format_, "fp8")
    for start in range(0, 1 << bits_of(format_), 32):
        codes = np.arange(start, start + 32, dtype=np.uint64) % np.uint64(1 << bits_of(format_))
        a, b = np.zeros(about.a_shape, np.uint64), np.zeros(about.b_shape, np.uint64)
        a[0, :, 5] = codes  # of 6 bits in two registers
        b[0, :, 5] = bits_from(np.ones(32), "fp8")
        run = Run("gfx950", "v_mfma_f32_32x32x64_f8f6f4", about)
        run.load(a, b, np.zeros(about.d_shape, np.uint64))
        result = values_of(execute_small(run, run.name), "f32")[0]
        np.testing.assert_array_equal(result, np.broadcast_to(values_of(codes, format_)[:, None], (32, 32)))


SCALES = (250, 251)


@pytest.mark.parametrize("shape", SMALL_SHAPES)
@pytest.mark.parametrize("format_", ["fp8", "fp6", "fp4"])
@pytest.mark.parametrize("byte", range(4))
def test_scales_are_powers_of_two_for_rows_and_32_of_k(shape: str, format_: str, byte: int) -> None:
    """Lane row + rows * (k / 32) holds a row's exponent in the byte that op_sel and op_sel_hi name."""
    about = small_formats(shape, format_, "bf8")
    rows, k = SMALL_SHAPES[shape]
    rng = np.random.default_rng(10)
    a, b = (
        bits_from(rng.integers(-2, 3, about.a_shape), format_),
        bits_from(rng.integers(-2, 3, about.b_shape), "bf8"),
    )
    run = Run("gfx950", f"v_mfma_scale_f32_{shape}_f8f6f4", about)
    run.load(a, b, np.zeros(about.d_shape, np.uint64))
    exponents = rng.integers(123, 132, (2, 64, 4)).astype(np.uint8)
    run.wave.v[SCALES[0]], run.wave.v[SCALES[1]] = exponents.view(np.uint32)[..., 0]
    run.wave.v_defined[SCALES[0]] = ALL & ~(1 << rows + 3)
    other = 3 - byte
    fields = {"opsel": byte & 1 | (other & 1) << 1, "opsel_hi": byte >> 1 | other >> 1 << 1}
    result = values_of(execute_small(run, run.name, SCALES, **fields), "f32")
    factors = [
        np.repeat(2.0 ** (exponents[n, :, chosen].reshape(k // 32, rows).T.astype(float) - 127), 32, axis=1)
        for n, chosen in enumerate((byte, other))
    ]
    scaled = product(
        values_of(a, format_) * factors[0], values_of(b, "bf8") * factors[1], np.zeros(about.d_shape)
    )
    np.testing.assert_array_equal(result, scaled)
    defined = about.d.are_defined(run.wave.v_defined[D : D + about.d.num_registers], about.d_shape)
    np.testing.assert_array_equal(defined[0, :, 0], np.arange(rows) != 3)


def test_a_scale_may_be_nan_and_products_of_scales_need_no_room() -> None:
    """255 is NaN; 2^127 of A and 2^-127 of B give 1, though f32 could not hold A's elements."""
    about = small_formats("16x16x128", "bf8", "bf8")
    run = Run("gfx950", "v_mfma_scale_f32_16x16x128_f8f6f4", about)
    a, b = (bits_from(np.full(shape, 2.0), "bf8") for shape in (about.a_shape, about.b_shape))
    run.load(a, b, bits_from(np.ones(about.d_shape), "f32"))
    run.wave.v[SCALES[0]], run.wave.v[SCALES[1]] = 254, 0
    run.wave.v[SCALES[0], 16 + 5] = 255
    result = values_of(execute_small(run, run.name, SCALES, opsel_hi=0), "f32")[0]
    assert np.isnan(result[5]).all()
    np.testing.assert_array_equal(np.delete(result, 5, axis=0), 1 + 128 * 4)
