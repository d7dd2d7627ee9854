"""Code objects are found in a VMFB."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.contract.gpu_code.code_object import chip_of, code_objects_in
from tests.code_objects import CHIPS, largest_code_object
from tests.conftest import BuildTiny
from tests.matrices import slow_but


@pytest.fixture(scope="module", params=slow_but(["gfx942"], CHIPS))
def image(request: pytest.FixtureRequest, build_tiny: BuildTiny) -> bytes:
    return largest_code_object(build_tiny, request.param)


def test_the_header_names_the_chip(request: pytest.FixtureRequest, image: bytes) -> None:
    assert chip_of(image) == request.node.callspec.params["image"]


def test_finds_each_code_object_in_a_file(image: bytes) -> None:
    host_elf = b"\x7fELF\x02\x01\x01\x00" + bytes(60)
    data = b"VMFB" + host_elf + image + b"\x7fELF" + image + image[: len(image) // 2]
    assert list(code_objects_in(data)) == [image, image]


def test_finds_none_in_other_files() -> None:
    assert list(code_objects_in(b"\x7fELF")) == []
    assert list(code_objects_in(bytes(1000))) == []
