from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer

from bench.gpu.weights import Parameter, write_noise, write_tokenizer
from shortfin_apps.llm.components.runtime.parameters import parameter_bytes
from shortfin_apps.llm.contract.irpa import check_archive

MATRIX = Parameter("blk.0.ffn_up.weight", (64, 256), "f32", 256)
NORM = Parameter("blk.0.attn_norm.weight", (1024,), "f32", 1024)


def values_of(path: Path, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The last `count` numbers of an archive, which ends with its last parameter."""
    return np.frombuffer(path.read_bytes()[-4 * count :], np.float32)


def test_an_archive_has_each_parameter_in_its_type(tmp_path: Path) -> None:
    path = tmp_path / "noise.irpa"
    parameters = [MATRIX, Parameter("output.weight", (8, 256), "bf16", 256), NORM]
    write_noise(parameters, path)
    check_archive(path)
    assert parameter_bytes([path]) == {
        "blk.0.ffn_up.weight": 4 * 64 * 256,
        "output.weight": 2 * 8 * 256,
        "blk.0.attn_norm.weight": 4 * 1024,
    }


def test_noise_in_blocks_has_the_deviation_of_other_weights(tmp_path: Path) -> None:
    quants = Parameter("w", (64, 256), "i8", 256)
    scales = Parameter("w.scales", (64, 8), "f16", 256)
    write_noise([quants, scales], tmp_path / "noise.irpa")
    content = (tmp_path / "noise.irpa").read_bytes()
    terms = np.frombuffer(content[-2 * 64 * 8 :], np.float16).astype(np.float32)
    bytes_ = np.frombuffer(content[-2 * 64 * 8 - 64 * 256 : -2 * 64 * 8], np.int8)
    values = bytes_.reshape(64, 8, 32) * terms.reshape(64, 8, 1)
    assert values.std() == pytest.approx(1 / 16, rel=0.2)


def test_noise_in_8_bit_floats_is_finite(tmp_path: Path) -> None:
    write_noise([Parameter("w", (64, 4096), "f8E4M3FN", 4096)], tmp_path / "noise.irpa")
    content = (tmp_path / "noise.irpa").read_bytes()
    values = np.frombuffer(content[-64 * 4096 :], ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(1 / 64, rel=0.1)


@pytest.mark.parametrize(("parameter", "mean", "deviation"), [(MATRIX, 0.0, 1 / 16), (NORM, 1.0, 0.1)])
def test_noise_has_a_deviation_that_keeps_activations_in_range(
    parameter: Parameter, mean: float, deviation: float, tmp_path: Path
) -> None:
    path = tmp_path / "noise.irpa"
    write_noise([parameter], path)
    values = values_of(path, 1024)
    assert values.mean() == pytest.approx(mean, abs=0.02)
    assert values.std() == pytest.approx(deviation, rel=0.1)


def test_noise_depends_on_the_name_alone(tmp_path: Path) -> None:
    write_noise([MATRIX, NORM], tmp_path / "two.irpa")
    write_noise([NORM], tmp_path / "one.irpa")
    other = Parameter("blk.1.attn_norm.weight", NORM.shape, NORM.dtype, NORM.features)
    write_noise([other], tmp_path / "other.irpa")
    two, one, third = (values_of(tmp_path / f"{name}.irpa", 1024) for name in ("two", "one", "other"))
    assert np.array_equal(two, one)
    assert not np.array_equal(one, third)


def test_every_token_id_has_a_text(tmp_path: Path) -> None:
    write_tokenizer(1000, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1000
    assert tokenizer.decode([999]) == " w999"
    assert tokenizer.encode("ab").ids == [ord("a"), ord("b")]


def test_states_decay(tmp_path: Path) -> None:
    write_noise([Parameter("blk.0.ssm_steps.bias", (32,), "f32", 32)], tmp_path / "noise.irpa")
    assert (values_of(tmp_path / "noise.irpa", 32) < 0).all()
