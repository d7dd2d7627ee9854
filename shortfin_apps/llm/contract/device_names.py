"""Lists of devices, as in `--device hip:gfx942,gfx1100,cpu`: a name after the first continues its kind."""

from __future__ import annotations

from collections.abc import Iterable

from shortfin_apps.llm.contract.errors import BuildError

CPU = "cpu"
HOST = "host"  # this machine's CPU, in a list of CPUs
KINDS = ("hip", "cuda", CPU)  # in the order of an artefact's programs


def split_devices(device: str) -> list[str]:
    """Return each device of the list with its kind. Raises BuildError for empty and doubled names."""
    found: list[str] = []
    kind = ""
    for item in map(str.strip, device.split(",")):
        if item.partition(":")[0] in KINDS:
            kind = kind_of(item)
        elif ":" not in item:
            item = f"{kind}:{item}"
        if item.endswith(":"):
            raise BuildError(
                f"{device}: give a name before and after each comma, as in hip:gfx942,gfx1100,cpu"
            )
        item = CPU if item == f"{CPU}:{HOST}" else item.removeprefix(":")
        if item in found:
            raise BuildError(f"--device {device}: {name_of(item)} is there twice; leave one of them out")
        found.append(item)
    return found


def join_devices(devices: Iterable[str]) -> str:
    """Return the list of these devices; the opposite of `split_devices`."""
    return ",".join(
        each[0] if len(each) == 1 else f"{kind_of(each[0])}:{','.join(map(name_of, each))}"
        for each in by_kind(devices)
    )


def by_kind(devices: Iterable[str]) -> list[list[str]]:
    """Group devices by kind, keeping their order."""
    groups: dict[str, list[str]] = {}
    for each in devices:
        groups.setdefault(kind_of(each), []).append(each)
    return list(groups.values())


def kind_of(device: str) -> str:
    return device.partition(":")[0]


def name_of(device: str) -> str:
    """Return the chip or CPU: LLVM's name, or `host`."""
    return device.partition(":")[2] or HOST
