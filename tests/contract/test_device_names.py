"""Lists of devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.contract.device_names import by_kind, join_devices, kind_of, split_devices
from shortfin_apps.llm.contract.errors import BuildError

DEVICES = ("cpu", "cpu:znver4", "cpu:x86-64-v3", "hip", "hip:gfx942", "hip:gfx1100", "cuda:sm_90")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", ["cpu"]),
        ("hip", ["hip"]),
        ("cpu:host", ["cpu"]),
        ("cpu:x86-64-v3, host", ["cpu:x86-64-v3", "cpu"]),
        ("cpu,znver4", ["cpu", "cpu:znver4"]),
        ("hip:gfx1100,gfx942,cpu", ["hip:gfx1100", "hip:gfx942", "cpu"]),
        ("cuda:sm_90,hip:gfx942,gfx950", ["cuda:sm_90", "hip:gfx942", "hip:gfx950"]),
        ("hip:gfx942,cpu:znver4,host,hip:gfx950", ["hip:gfx942", "cpu:znver4", "cpu", "hip:gfx950"]),
    ],
)
def test_a_name_continues_the_kind_before_it(device: str, expected: list[str]) -> None:
    assert split_devices(device) == expected


@given(devices=st.lists(st.sampled_from(DEVICES[:3] + DEVICES[4:]), min_size=1, unique=True))
def test_what_is_joined_is_split_into_the_same_by_kind(devices: list[str]) -> None:
    assert split_devices(join_devices(devices)) == [each for kind in by_kind(devices) for each in kind]
    assert all(len({kind_of(each) for each in kind}) == 1 for kind in by_kind(devices))


@pytest.mark.parametrize(
    "device", ["cpu:haswell,", "cpu:,haswell", "cpu:haswell,,znver4", "cpu:,", "hip:gfx942,,cpu", ",cpu", ""]
)
def test_an_empty_name_is_refused(device: str) -> None:
    with pytest.raises(BuildError, match="before and after each comma"):
        split_devices(device)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("hip:gfx942,gfx942", "gfx942"),
        ("hip:gfx942,cpu,hip:gfx942", "gfx942"),
        ("cpu:znver4,znver4", "znver4"),
        ("cpu,cpu:host", "host"),
    ],
)
def test_a_doubled_name_is_refused(device: str, name: str) -> None:
    with pytest.raises(BuildError, match=f"--device {device}: {name} is there twice"):
        split_devices(device)
