"""Code objects: their descriptors, metadata and code."""

from __future__ import annotations

import io
import struct
from typing import Any

import msgpack
import pytest
from elftools.elf.elffile import ELFFile

from emulated_gpu.errors import CodeObjectError
from emulated_gpu.machine_code.code_object import CodeObject, read_code_object
from tests.code_objects import CHIPS, largest_code_object
from tests.conftest import BuildTiny
from tests.matrices import slow_but


@pytest.fixture(scope="module", params=slow_but(["gfx942"], CHIPS))
def image(request: pytest.FixtureRequest, build_tiny: BuildTiny) -> bytes:
    return largest_code_object(build_tiny, request.param)


@pytest.fixture(scope="module")
def code_object(image: bytes) -> CodeObject:
    return read_code_object(image)


def metadata_of(image: bytes) -> list[dict[str, Any]]:
    """The kernels' metadata, found by its first key rather than through the note's header."""
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(image[image.index(b"\xaeamdhsa.kernels") - 1 :])
    kernels: list[dict[str, Any]] = unpacker.unpack()["amdhsa.kernels"]
    return kernels


def test_reads_the_chip_that_it_was_compiled_for(
    request: pytest.FixtureRequest, code_object: CodeObject
) -> None:
    assert code_object.chip == request.node.callspec.params["image"]


def test_descriptors_agree_with_the_metadata(image: bytes, code_object: CodeObject) -> None:
    metadata = {each[".name"]: each for each in metadata_of(image)}
    assert set(metadata) == {kernel.name for kernel in code_object.kernels}
    for kernel in code_object.kernels:
        expected = metadata[kernel.name]
        descriptor = kernel.descriptor
        assert descriptor.lds_bytes == expected[".group_segment_fixed_size"]
        assert descriptor.scratch_bytes == expected[".private_segment_fixed_size"]
        assert descriptor.kernarg_bytes == expected[".kernarg_segment_size"]
        assert [argument.offset for argument in kernel.arguments] == [
            argument[".offset"] for argument in expected[".args"]
        ]
        # The descriptor counts vector registers in blocks of 8, less 1 (on CDNA with accumulation registers).
        assert 8 * ((descriptor.rsrc1 & 63) + 1) >= kernel.num_vgprs
        # ENABLE_WAVEFRONT_SIZE32
        assert (kernel.lanes == 32) == bool(descriptor.properties >> 10 & 1)


def test_arguments_fit_in_the_kernel_arguments_and_do_not_overlap(code_object: CodeObject) -> None:
    for kernel in code_object.kernels:
        end = 0
        for argument in kernel.arguments:
            assert argument.offset >= end
            end = argument.offset + argument.size
        assert end <= kernel.descriptor.kernarg_bytes


def test_code_lies_in_an_executable_segment(image: bytes, code_object: CodeObject) -> None:
    (text,) = (
        segment for segment in ELFFile(io.BytesIO(image)).iter_segments("PT_LOAD") if segment["p_flags"] & 1
    )
    for kernel in code_object.kernels:
        start = kernel.entry - text["p_vaddr"]
        assert kernel.code
        assert text.data()[start : start + len(kernel.code)] == kernel.code


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_damaged_code_object_is_refused(image: bytes, part: float) -> None:
    with pytest.raises(CodeObjectError, match="cannot be read"):
        read_code_object(image[: int(len(image) * part)])


def test_an_unknown_chip_is_named_by_its_number(image: bytes) -> None:
    other = bytearray(image)
    struct.pack_into("<I", other, 48, 0x2C)  # e_flags of gfx900
    with pytest.raises(CodeObjectError, match=r"number 0x2c; known are .*gfx942"):
        read_code_object(bytes(other))
