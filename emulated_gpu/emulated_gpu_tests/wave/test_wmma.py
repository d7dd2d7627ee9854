"""WMMA: layouts against AMD's calculator, sums of products against numpy in f64, what is defined."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from tinygrad.runtime.autogen.amd.rdna3 import ins as rdna3
from tinygrad.runtime.autogen.amd.rdna4 import ins as rdna4

from emulated_gpu.chips import CHIPS, Chip
from emulated_gpu_tests.wave.matrices import GOLDEN, Matrices, bits_from, bits_of, documented, values_of
from emulated_gpu_tests.wave.single_wave import Wave

A, B, C, D = 0, 32, 64, 128  # the first register of each matrix
ALL = 2**64 - 1
CHIP = {"rdna3": "gfx1100", "rdna4": "gfx1201"}
CASES = [tuple(key.split()) for key in GOLDEN if "v_wmma" in key]
HALVES = ["v_wmma_f16_16x16x16_f16", "v_wmma_bf16_16x16x16_bf16"]
INTEGERS = ["v_wmma_i32_16x16x16_iu8", "v_wmma_i32_16x16x16_iu4"]


def matrices_of(architecture: str, name: str, lanes: int, signs: int = 0) -> Matrices:
    """Bit n of `signs`: source n is signed, if it is an integer."""
    about = documented(architecture, name, lanes)
    formats = [
        each[1 - (signs >> n & 1) :][:1] + each[2:] if each.startswith("iu") else each
        for n, each in enumerate((about.a_format, about.b_format))
    ]
    return replace(about, a_format=formats[0], b_format=formats[1])


@dataclass
class Run:
    """One instruction on matrices of bits; B is given by columns."""

    architecture: str
    name: str
    lanes: int
    about: Matrices
    wave: Wave = field(default_factory=Wave)

    @property
    def chip(self) -> Chip:
        return replace(CHIPS[CHIP[self.architecture]], lanes=self.lanes)

    @property
    def instructions(self) -> Any:
        return rdna3 if self.architecture == "rdna3" else rdna4

    def load(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, high: bool = False) -> None:
        """`high`: C is in the upper halves of registers."""
        for layout, first, matrix in ((self.about.a, A, a), (self.about.b, B, b), (self.about.d, C, c)):
            layout.place(matrix, self.wave.v[first : first + layout.num_registers])
        if high:
            self.wave.v[C : C + self.about.d.num_registers] <<= np.uint32(16)

    def execute(self, c: Any = None, *, high: bool = False, **fields: int) -> np.ndarray:
        """The bits of D."""
        about, v = self.about, self.instructions.v
        written = documented(
            self.architecture, self.name, 32
        )  # the assembler wants the registers of 32 lanes
        d, a, b, registers = (
            v[first : first + layout.num_registers - 1] if layout.num_registers > 1 else v[first]
            for first, layout in ((D, written.d), (A, written.a), (B, written.b), (C, written.d))
        )
        operation = getattr(self.instructions, self.name)
        instruction = operation(d, a, b, registers if c is None else c, opsel=4 * high, **fields)
        self.wave.run(self.chip, instruction.to_bytes() + self.instructions.s_endpgm().to_bytes())
        assert self.wave.status == 0
        result = self.wave.v[D : D + about.d.num_registers] >> np.uint32(16 * high)
        return about.d.fetch(result, about.d_shape)

    def defined(self) -> np.ndarray:
        registers = self.wave.v_defined[D : D + self.about.d.num_registers]
        return self.about.d.are_defined(registers, self.about.d_shape)


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.asarray(c + np.einsum("nik,njk->nij", a, b))


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], format_: str) -> np.ndarray:
    """Of integers any; of floats those of which all formats hold sums of products exactly."""
    if format_[0] in "iu":
        return rng.integers(0, 1 << bits_of(format_), shape).astype(np.uint64)
    return bits_from(rng.integers(-2, 3, shape), format_)


def random_matrices(about: Matrices, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    c = bits_from(rng.integers(-20, 21, about.d_shape), about.d_format)
    return random_bits(rng, about.a_shape, about.a_format), random_bits(rng, about.b_shape, about.b_format), c


def expected_values(about: Matrices, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return product(values_of(a, about.a_format), values_of(b, about.b_format), values_of(c, about.d_format))


@pytest.mark.parametrize(("architecture", "name", "width"), CASES)
def test_every_element_is_where_the_calculator_says(architecture: str, name: str, width: str) -> None:
    lanes = int(width)
    for signs in range(4 if "_iu" in name else 1):
        about = matrices_of(architecture, name, lanes, signs)
        a, b, c = random_matrices(about, seed=signs)
        run = Run(architecture, name, lanes, about)
        run.load(a, b, c)
        run.wave.set_exec(0x123456789ABCDEF)  # of which these take no notice
        result = values_of(run.execute(neg=signs), about.d_format)
        np.testing.assert_array_equal(result, expected_values(about, a, b, c))
        assert run.defined().all()


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("lanes", [32, 64])
def test_of_rdna3_opsel_names_the_half_of_c_and_d(name: str, lanes: int) -> None:
    about = matrices_of("rdna3", name, lanes)
    a, b, c = random_matrices(about, seed=1)
    for high in (False, True):
        run = Run("rdna3", name, lanes, about)
        run.load(a, b, c, high=high)
        run.wave.v[D : D + 8] = 0x12345678
        result = run.execute(high=high)
        np.testing.assert_array_equal(values_of(result, about.d_format), expected_values(about, a, b, c))
        registers = run.wave.v[D : D + about.d.num_registers, :lanes]
        kept = registers >> np.uint32(0 if high else 16) & np.uint32(0xFFFF)
        np.testing.assert_array_equal(kept, 0x5678 if high else 0x1234)


NEGATIONS = [(n, 0) for n in range(8)] + [(0, n) for n in range(1, 8)] + [(5, 6), (6, 5)]


@pytest.mark.parametrize("architecture", CHIP)
@pytest.mark.parametrize("name", ["v_wmma_f32_16x16x16_f16", "v_wmma_f32_16x16x16_bf16", *HALVES])
@pytest.mark.parametrize(("neg", "neg_hi"), NEGATIONS)
def test_neg_negates_halves_of_a_and_b_and_c(architecture: str, name: str, neg: int, neg_hi: int) -> None:
    """The absolute value of C comes before its negation."""
    about = matrices_of(architecture, name, 32)
    a, b, c = random_matrices(about, seed=2)
    run = Run(architecture, name, 32, about)
    run.load(a, b, c)
    result = values_of(run.execute(neg=neg, neg_hi=neg_hi), about.d_format)
    formats = (about.a_format, about.b_format, about.d_format)
    values = [values_of(each, format_) for each, format_ in zip((a, b, c), formats, strict=True)]
    for n in range(2):  # element numbers and k are both even or both odd
        values[n][..., ::2] *= -1 if neg >> n & 1 else 1
        values[n][..., 1::2] *= -1 if neg_hi >> n & 1 else 1
    values[2] = np.abs(values[2]) if neg_hi & 4 else values[2]
    values[2] *= -1 if neg & 4 else 1
    np.testing.assert_array_equal(result, product(*values))


@pytest.mark.parametrize("architecture", CHIP)
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("clamp", [0, 1])
@pytest.mark.parametrize("c", [0x7FFFFFFF, 0x80000000])
def test_clamp_saturates_and_sums_wrap_without(architecture: str, name: str, clamp: int, c: int) -> None:
    about = matrices_of(architecture, name, 32, signs=1)
    a = np.full(about.a_shape, 1 if c == 0x7FFFFFFF else (1 << bits_of(about.a_format)) - 1, np.uint64)
    b = np.full(about.b_shape, 3, np.uint64)
    run = Run(architecture, name, 32, about)
    run.load(a, b, np.full(about.d_shape, c, np.uint64))
    total = c + (48 if c == 0x7FFFFFFF else -48)
    np.testing.assert_array_equal(run.execute(neg=1, clmp=clamp), c if clamp else total & 0xFFFFFFFF)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("architecture", CHIP)
def test_halves_are_rounded_once(architecture: str, name: str) -> None:
    """1 + e + 2^-20 is above the middle between 1 and the next number; 1 + e would be rounded down."""
    about = matrices_of(architecture, name, 32)
    a, b = np.zeros(about.a_shape), np.zeros(about.b_shape)
    middle = 2.0**-11 if "f16_16x16x16_f16" in name and "bf16" not in name else 2.0**-8
    a[..., 0], a[..., 1] = 1, 2.0**-10
    b[..., 0], b[..., 1] = middle, 2.0**-10
    run = Run(architecture, name, 32, about)
    a_bits, b_bits, c_bits = (bits_from(each, about.a_format) for each in (a, b, np.ones(about.d_shape)))
    run.load(a_bits, b_bits, c_bits)
    np.testing.assert_array_equal(values_of(run.execute(), about.d_format), 1 + 2 * middle)


FP8 = [f"v_wmma_f32_16x16x16_{a}_{b}" for a in ("fp8", "bf8") for b in ("fp8", "bf8")]


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("source", ["a", "b"])
def test_every_value_of_8_bits_is_read_as_it_is(name: str, source: str) -> None:
    about = matrices_of("rdna4", name, 32)
    for start in range(0, 256, 16):
        codes = np.arange(start, start + 16, dtype=np.uint64)
        a, b = np.zeros(about.a_shape, np.uint64), np.zeros(about.b_shape, np.uint64)
        a[0, :, 3] = codes if source == "a" else bits_from(np.ones(16), about.a_format)
        b[0, :, 3] = codes if source == "b" else bits_from(np.ones(16), about.b_format)
        run = Run("rdna4", name, 32, about)
        run.load(a, b, np.zeros(about.d_shape, np.uint64))
        expected = values_of(codes, about.a_format if source == "a" else about.b_format)
        result = values_of(run.execute(), "f32")[0]
        by_source = result if source == "b" else result.T
        np.testing.assert_array_equal(by_source, np.broadcast_to(expected, (16, 16)))


@pytest.mark.parametrize(("architecture", "name", "width"), CASES)
def test_an_element_is_defined_if_its_row_column_and_c_are(architecture: str, name: str, width: str) -> None:
    lanes = int(width)
    about = matrices_of(architecture, name, lanes)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        run = Run(architecture, name, lanes, about)
        run.load(*random_matrices(about, seed))
        places = ((A, about.a), (B, about.b), (C, about.d))
        for first, layout in places[: seed or 3]:
            register = first + int(rng.integers(0, layout.num_registers))
            run.wave.v_defined[register] = ALL & ~(1 << int(rng.integers(0, 1 << len(layout.lane))))
        shapes = (about.a_shape, about.b_shape, about.d_shape)
        a, b, c = (
            layout.are_defined(run.wave.v_defined[first : first + layout.num_registers], shape)
            for (first, layout), shape in zip(places, shapes, strict=True)
        )
        run.execute()
        expected = a.all(2, keepdims=True) & np.asarray(b.all(2))[:, None] & c
        if architecture == "rdna4" and about.d.bits == 16:  # two elements share a register
            pairs = expected.reshape(1, 8, 2, 16).all(2, keepdims=True)
            expected = np.broadcast_to(pairs, (1, 8, 2, 16)).reshape(1, 16, 16)
        np.testing.assert_array_equal(run.defined(), expected)


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize(("first", "source"), [(A, "a"), (B, "b")])
def test_of_rdna3_rows_whose_copies_differ_are_not_defined(lanes: int, first: int, source: str) -> None:
    about = matrices_of("rdna3", "v_wmma_f32_16x16x16_f16", lanes)
    run = Run("rdna3", "v_wmma_f32_16x16x16_f16", lanes, about)
    run.load(*random_matrices(about, seed=3))
    run.wave.v[first + 5, lanes - 16 + 7] ^= np.uint32(0x100)
    run.execute()
    expected = np.ones((16, 16), bool)
    expected[(7, slice(None)) if source == "a" else (slice(None), 7)] = False
    np.testing.assert_array_equal(run.defined()[0], expected)


@pytest.mark.parametrize("architecture", CHIP)
@pytest.mark.parametrize("name", ["v_wmma_f32_16x16x16_bf16", *HALVES, "v_wmma_i32_16x16x16_iu8"])
def test_c_may_be_a_constant(architecture: str, name: str) -> None:
    about = matrices_of(architecture, name, 32)
    a, b, c = random_matrices(about, seed=4)
    run = Run(architecture, name, 32, about)
    run.load(a, b, c)
    result = values_of(run.execute(c=2 if about.d_format == "i32" else 2.0), about.d_format)
    twos = bits_from(np.full(about.d_shape, 2), about.d_format)
    np.testing.assert_array_equal(result, expected_values(about, a, b, twos))
