"""Damaged or wrong files are refused with one clear sentence and never crash the process."""

from __future__ import annotations

import builtins
import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.vmfb import check_file, load_error, read_exports
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.iree_release import OF_SHORTFIN, runtime_release

from .conftest import UNFENCED, WEIGHT, compile_vmfb, write_irpa

Damage = Callable[[bytes], bytes]


def flip(position: float) -> Damage:
    def damage(content: bytes) -> bytes:
        index = int(position * (len(content) - 1))
        return content[:index] + bytes([content[index] ^ 0xFF]) + content[index + 1 :]

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda content: b"", "not a VMFB"),
        (lambda content: b"\x00" * 4096, "not a VMFB"),
        (lambda content: b"ELF" + content, "not a VMFB"),
        (lambda content: content[: len(content) // 2], "damaged or cut short"),
        (lambda content: content[:-8], "damaged or cut short"),
        (flip(0.5), "damaged"),
    ],
)
def test_a_damaged_vmfb_is_refused(
    device: Device, folder: Path, tmp_path: Path, damage: Damage, says: str
) -> None:
    broken = tmp_path / "broken.vmfb"
    broken.write_bytes(damage((folder / "fenced.vmfb").read_bytes()))
    with pytest.raises(ArtifactError, match=says):
        device.load_program(broken, [], "m")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1))
def test_a_flipped_byte_is_refused_or_harmless(artefacts: Path, tmp_path: Path, position: float) -> None:
    """Some bytes of the ZIP structure may change without harm; then the file must load as before."""
    broken = tmp_path / "broken.vmfb"
    broken.write_bytes(flip(position)((artefacts / "unfenced.vmfb").read_bytes()))
    try:
        exports = read_exports(broken, "plain")
    except ArtifactError:
        return
    assert list(exports) == ["negate"]


def test_any_flipped_bit_of_the_archives_directory_is_refused_or_harmless(
    artefacts: Path, tmp_path: Path
) -> None:
    """The directory is at the end; its sizes, offsets, flags and methods decide how the rest is read."""
    content = (artefacts / "unfenced.vmfb").read_bytes()
    begin = content.index(b"PK\x01\x02")
    broken = tmp_path / "broken.vmfb"
    num_refused = 0
    for position in range(begin, len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            broken.write_bytes(damaged)
            try:
                check_file(broken)
            except ArtifactError:
                num_refused += 1
    assert num_refused > (len(content) - begin) * 4  # other bits are times, comments and attributes


def test_a_vmfb_without_checksums_is_refused(tmp_path: Path) -> None:
    """Damage to it would be noticed only when the loader crashes (observed with a flipped byte)."""
    vmfb = compile_vmfb(UNFENCED, tmp_path / "flat.vmfb", "--iree-vm-emit-polyglot-zip=false")
    with pytest.raises(ArtifactError, match="without checksums"):
        read_exports(vmfb, "plain")


def test_a_missing_vmfb_is_refused(device: Device, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No such file"):
        device.load_program(tmp_path / "none.vmfb", [], "m")


def test_another_zip_archive_is_refused(device: Device, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(ArtifactError, match="not a VMFB"):
        device.load_program(tmp_path / "other.zip", [], "m")


def test_another_module_name_is_refused(device: Device, folder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"called 'plain' where `module_name` .* says 'module'"):
        device.load_program(folder / "unfenced.vmfb", [], "module")


def test_another_target_is_refused(device: Device, tmp_path: Path) -> None:
    vmfb = tmp_path / "vmvx.vmfb"
    compile_vmfb(
        UNFENCED, vmfb, "--iree-llvmcpu-target-triple=aarch64-linux-gnu", "--iree-llvmcpu-target-cpu=generic"
    )
    with pytest.raises(ArtifactError, match="another device"):
        device.load_program(vmfb, [], "plain")


@pytest.mark.parametrize(
    "message",
    [
        "INVALID_ARGUMENT; bytecode version mismatch; runtime supports 17.0, module has 16.1",
        "INVALID_ARGUMENT; required module features [Ch] are not available in this runtime",
    ],
)
def test_another_compiler_release_is_refused(tmp_path: Path, message: str) -> None:
    error = load_error(tmp_path / "new.vmfb", ValueError(message))
    assert f"another release of IREE than {runtime_release()}," in str(error)
    assert "shortfin-llm build" in str(error)


def test_a_gpu_that_fails_while_loading_is_no_wrong_file(tmp_path: Path) -> None:
    failed = "INVALID_ARGUMENT; HIP driver error 'hipErrorInvalidValue' (1); io_parameters.load"
    full = "RESOURCE_EXHAUSTED; HIP driver error 'hipErrorOutOfMemory' (2); io_parameters.load"
    assert "the GPU failed while it was loaded" in str(load_error(tmp_path / "a.vmfb", ValueError(failed)))
    assert "not enough memory for its parameters" in str(load_error(tmp_path / "a.vmfb", ValueError(full)))


def test_a_program_of_more_stages_than_devices_asks_for_devices(tmp_path: Path) -> None:
    missing = "INCOMPATIBLE; HAL device `__device_{}` not found or unavailable: #hal.device.target<...>"
    few = str(load_error(tmp_path / "a.vmfb", ValueError(missing.format(1))))
    assert "more devices than the 1 that it is given" in few
    assert "--device-ids" in few
    assert "another device" in str(load_error(tmp_path / "a.vmfb", ValueError(missing.format(0))))


def test_a_real_bytecode_version_mismatch(device: Device, folder: Path, tmp_path: Path) -> None:
    """The version, 15.0 in IREE 3.9 and 17.0 in 3.13, is the module's first u32 that reads so."""
    version = 15 if runtime_release() == OF_SHORTFIN else 17
    content = (folder / "unfenced.vmfb").read_bytes()
    with zipfile.ZipFile(folder / "unfenced.vmfb") as archive:
        module = archive.read("module.fb")
    other = module.replace(struct.pack("<I", version << 16), struct.pack("<I", 99 << 16), 1)
    assert other != module
    content = content.replace(module, other)
    old_sum, new_sum = (struct.pack("<I", zlib.crc32(m)) for m in (module, other))
    content = content.replace(old_sum, new_sum)
    newer = tmp_path / "newer.vmfb"
    newer.write_bytes(content)
    with pytest.raises(ArtifactError, match="another release of IREE"):
        device.load_program(newer, [], "plain")


def test_a_missing_parameter_is_named(device: Device, folder: Path, tmp_path: Path) -> None:
    other = write_irpa(tmp_path / "other.irpa", height=WEIGHT)
    with pytest.raises(ArtifactError, match="weight"):
        device.load_program(folder / "fenced.vmfb", [other], "m")
    with pytest.raises(ArtifactError, match="parameter"):
        device.load_program(folder / "fenced.vmfb", [], "m")


def test_a_parameter_of_another_size_is_refused(device: Device, folder: Path, tmp_path: Path) -> None:
    small = write_irpa(tmp_path / "small.irpa", weight=WEIGHT[:4])
    with pytest.raises(ArtifactError, match="parameter"):
        device.load_program(folder / "fenced.vmfb", [small], "m")


@pytest.mark.parametrize("keep", [0, 10, 64, 200])
def test_a_truncated_parameter_file_is_refused(
    device: Device, folder: Path, tmp_path: Path, keep: int
) -> None:
    cut = tmp_path / "cut.irpa"
    cut.write_bytes((folder / "model.irpa").read_bytes()[:keep])
    with pytest.raises(ArtifactError, match=r"cut\.irpa: .*(cut short|not a usable parameter file)"):
        device.load_program(folder / "fenced.vmfb", [cut], "m")


def test_a_file_without_parameters_is_refused(device: Device, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.irpa"
    text.write_text("hello" * 100)
    with pytest.raises(ArtifactError, match="not a usable parameter file"):
        device.load_program(folder / "fenced.vmfb", [text], "m")
    with pytest.raises(ArtifactError, match="cannot be read"):
        device.load_program(folder / "fenced.vmfb", [tmp_path / "none.irpa"], "m")


def test_parameters_in_other_formats(device: Device, folder: Path, tmp_path: Path) -> None:
    safetensors = tmp_path / "model.safetensors"
    save_file({"weight": WEIGHT}, safetensors)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("weight", WEIGHT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path in (safetensors, tmp_path / "model.gguf"):
        program = device.load_program(folder / "fenced.vmfb", [path], "m")
        zeros = np.zeros(8, np.float32)
        (result,) = program.submit("accumulate", [device.upload(zeros), device.upload(zeros)]).wait()
        np.testing.assert_array_equal(device.download(result), WEIGHT)


def test_a_vmfb_is_only_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be on a read-only volume, or another user's."""

    def only_read(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        assert not set(mode) & set("+wax"), f"{file} is opened with {mode!r}"
        return opened(file, mode, *args, **kwargs)

    opened = builtins.open
    monkeypatch.setattr(builtins, "open", only_read)
    monkeypatch.setattr(io, "open", only_read)
    assert read_exports(folder / "fenced.vmfb", "m")
