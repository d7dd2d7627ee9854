"""SMFMAC, the product with a sparse A: of each four k two are kept, whose places are indices of two bits."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.runtime.autogen.amd.cdna import ins
from tinygrad.runtime.autogen.amd.cdna.ins import s_endpgm, v

from emulated_gpu.chips import CHIPS
from emulated_gpu_tests.wave.matrices import GOLDEN, Layout, bits_from, values_of
from emulated_gpu_tests.wave.single_wave import Wave

A, B, INDEX, D = 0, 32, 64, 128  # the first register of each
ALL = 2**64 - 1
KEPT = 4  # elements of A in a lane, of 8 consecutive k
NAMES = [
    f"v_smfmac_f32_{shape}_{format_}" for shape in ("16x16x32", "32x32x16") for format_ in ("f16", "bf16")
]


def layout(name: str, matrix: str) -> Layout:
    """As AMD's calculator documents B and D; A's differs by its indices."""
    about = GOLDEN[f"cdna3 {name} 64"][matrix]
    return Layout(about["bits"], about["element"], about["lane"])


def indices_of(rng: np.random.Generator) -> np.ndarray:
    """Two different places of each four, in order: `[64 lanes, KEPT]`."""
    pairs = np.array([(low, high) for high in range(4) for low in range(high)])
    return pairs[rng.integers(0, len(pairs), (64, KEPT // 2))].reshape(64, KEPT)


def sparse(kept: np.ndarray, indices: np.ndarray, rows: int, k: int) -> np.ndarray:
    """A as `[rows, k]` from what each lane keeps."""
    dense = np.zeros((rows, k))
    for lane in range(64):
        for element in range(KEPT):
            place = lane // rows * 2 * KEPT + element // 2 * 4 + indices[lane, element]
            dense[lane % rows, place] = kept[lane, element]
    return dense


@pytest.mark.parametrize(("fields", "byte"), [({}, 0), ({"abid": 2}, 2), ({"cbsz": 1, "abid": 3}, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_kept_elements_are_where_their_indices_say(name: str, fields: dict[str, int], byte: int) -> None:
    rows, _, k, _ = GOLDEN[f"cdna3 {name} 64"]["shape"]
    format_ = name.rpartition("_")[2]
    rng = np.random.default_rng(3)
    wave = Wave()
    kept, indices = rng.integers(-4, 5, (64, KEPT)), indices_of(rng)
    bits = bits_from(kept, format_).astype(np.uint32)
    wave.v[A : A + 2] = (bits[:, 0::2] | bits[:, 1::2] << np.uint32(16)).T
    packed = (indices << 2 * np.arange(KEPT)).sum(axis=1)
    wave.v[INDEX] = rng.integers(0, 2**32, 64) & ~(0xFF << 8 * byte) | packed << 8 * byte
    b, c = rng.integers(-4, 5, (1, rows, k)), rng.integers(-4, 5, (1, rows, rows))
    d = layout(name, "d")
    layout(name, "b").place(bits_from(b, format_), wave.v[B : B + 4])
    d.place(bits_from(c, "f32"), wave.v[D : D + d.num_registers])
    instruction = getattr(ins, name)(
        v[D : D + d.num_registers - 1], v[A : A + 1], v[B : B + 3], v[INDEX], **fields
    )
    wave.run(CHIPS["gfx942"], instruction.to_bytes() + s_endpgm().to_bytes())
    assert wave.status == 0
    result = values_of(d.fetch(wave.v[D : D + d.num_registers], (1, rows, rows)), "f32")
    np.testing.assert_array_equal(result[0], c[0] + sparse(kept, indices, rows, k) @ b[0].T)


def test_a_row_is_defined_if_its_indices_are() -> None:
    wave = Wave()
    wave.v_defined[INDEX] = ALL ^ 1 << 21  # row 5
    instruction = ins.v_smfmac_f32_16x16x32_f16(v[D : D + 3], v[A : A + 1], v[B : B + 3], v[INDEX])
    wave.run(CHIPS["gfx942"], instruction.to_bytes() + s_endpgm().to_bytes())
    undefined = [int(lanes) ^ ALL for lanes in wave.v_defined[D : D + 4]]
    assert undefined == [0, 0xFFFF << 16, 0, 0]  # element 1 of the second group of four rows
