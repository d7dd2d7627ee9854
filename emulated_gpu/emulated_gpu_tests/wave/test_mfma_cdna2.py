"""CDNA 2's matrix instructions: layouts against AMD's calculator, and what is flushed to zero."""

from __future__ import annotations

import numpy as np
import pytest

from emulated_gpu.chips import CHIPS
from emulated_gpu.machine_code.cdna2 import MATRIX, spelled
from emulated_gpu_tests.wave.matrices import GOLDEN, Matrices, bits_from, documented, values_of
from emulated_gpu_tests.wave.single_wave import Wave
from emulated_gpu_tests.wave.test_mfma import A, B, C, D, expected_values, small_matrices

OPCODES = {spelled(canonical, suffix): opcode for opcode, (canonical, *_, suffix) in MATRIX.items()}
S_ENDPGM = 0xBF810000


def run(name: str, about: Matrices, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The bits of D; B is given by columns. tinygrad's tables lack these opcodes."""
    wave = Wave()
    for layout, first, matrix in ((about.a, A, a), (about.b, B, b), (about.d, C, c)):
        layout.place(matrix, wave.v[first : first + layout.num_registers])
    words = (0xD3C00000 | OPCODES[name] << 16 | D, 256 + A | 256 + B << 9 | 256 + C << 18, S_ENDPGM)
    wave.run(CHIPS["gfx90a"], b"".join(word.to_bytes(4, "little") for word in words))
    assert wave.status == 0
    return about.d.fetch(wave.v[D : D + about.d.num_registers], about.d_shape)


def test_the_calculator_knows_the_same_instructions() -> None:
    assert set(OPCODES) == {key.split()[1] for key in GOLDEN if key.startswith("cdna2 ")}


@pytest.mark.parametrize("name", OPCODES)
def test_every_element_is_where_the_calculator_says(name: str) -> None:
    about = documented("cdna2", name, 64)
    a, b, c = small_matrices(about, seed=1)
    result = values_of(run(name, about, a, b, c), about.d_format)
    np.testing.assert_array_equal(result, expected_values(about, a, b, c))


@pytest.mark.parametrize(
    ("name", "small", "keeps"),
    [
        ("v_mfma_f32_16x16x16f16", 2.0**-15, False),
        ("v_mfma_f32_16x16x16bf16_1k", 2.0**-130, False),
        ("v_mfma_f32_16x16x8bf16", 2.0**-130, False),
        ("v_mfma_f32_16x16x4f32", 2.0**-130, True),
    ],
)
def test_denormals_of_16_bits_and_their_sums_are_zeros(name: str, small: float, keeps: bool) -> None:
    about = documented("cdna2", name, 64)

    def sum_of(a: float, b: float, c: float) -> float:
        """C plus one product."""
        matrices = [np.zeros(each) for each in (about.a_shape, about.b_shape, about.d_shape)]
        matrices[0][..., 0], matrices[1][..., 0], matrices[2][...] = a, b, c
        formats = (about.a_format, about.b_format, about.d_format)
        bits = [bits_from(each, format_) for each, format_ in zip(matrices, formats, strict=True)]
        return float(values_of(run(name, about, *bits), "f32")[0, 0, 0])

    assert sum_of(small, 64, 0) == sum_of(64, small, 0) == 64 * small * keeps
    assert sum_of(0, 0, 2.0**-140) == 2.0**-140 * keeps
    assert sum_of(-1, 1, 1 - 2.0**-24) == -(2.0**-24)
