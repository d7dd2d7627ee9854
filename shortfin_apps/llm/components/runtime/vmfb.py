"""Reads the entries that a VMFB exports, without opening a device.

Both runtimes use this module, because only iree.runtime exposes reflection data. This is possible because
both load bytecode of the same IREE release.
"""

from __future__ import annotations

import lzma
import mmap
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shortfin_apps.llm.components.runtime.declaration import parse_declaration
from shortfin_apps.llm.components.runtime.device import EntrySignature
from shortfin_apps.llm.components.runtime.device_errors import wrong_chip_error
from shortfin_apps.llm.contract.abi import (
    ASYNC_SUFFIX,
    CALLER_OWNED,
    COMPUTE_UNITS,
    ONLY_DISPATCHES,
    TAKES_FOLLOWERS,
    TAKES_HIDDEN,
    WORKSPACE_BYTES,
    WORKSPACE_QUERY_SUFFIX,
)
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.iree_release import runtime_release

_ZIP_MAGIC = b"PK\x03\x04"
# What zipfile raises for damaged archives, besides its own error: wrong offsets, sizes, flags and methods.
_OF_DAMAGE = (
    *(zipfile.BadZipFile, EOFError, RuntimeError, ValueError, ArithmeticError),
    *(zlib.error, lzma.LZMAError),
)
_FLATBUFFER_IDENTIFIER = slice(8, 12)  # after the size prefix and the root offset
_REBUILD = "rebuild it with `shortfin-llm build`"
_MISSING_DEVICE = re.compile(r"HAL device `__device_(\d+)` not found")


@dataclass(frozen=True, slots=True)
class Export:
    """An entry and the name of its function: `<entry>$async` if the VMFB has that, else `<entry>`.

    A function that `is_async` takes a wait fence and a signal fence after the entry's arguments.
    """

    function: str
    is_async: bool
    signature: EntrySignature


def read_exports(path: Path, module_name: str) -> Mapping[str, Export]:
    """Return the entries of a VMFB by name.

    Raises ArtifactError if the VMFB is damaged, was compiled by another IREE release, or has a module with
    another name than `module_name`.
    """
    import iree.runtime as iree

    check_file(path)
    try:
        module = mapped_module(iree.VmInstance(), path)
        found_name = module.name
        functions = sorted(module.function_names)  # `f` sorts before `f$async`, which replaces it
        exports = [_export(module, function) for function in functions if _is_entry(function)]
    except Exception as error:  # the binding raises many builtin exceptions for IREE's statuses
        raise load_error(path, error) from None
    if found_name != module_name:
        raise ArtifactError(
            f"{path}: the module is called {found_name!r} where `module_name` in config.json says "
            f"{module_name!r}; correct that field"
        )
    return MappingProxyType({export.signature.name: export for export in exports})


def mapped_module(instance: Any, path: Path) -> Any:
    """Load a VMFB as an `iree.runtime.VmModule`, with the file mapped read-only.

    `VmModule.mmap` would open the file for writing, which fails on read-only volumes and other users' files.
    """
    import iree.runtime as iree

    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return iree.VmModule.wrap_buffer(instance, mapped, close_buffer=True)


def check_file(path: Path) -> None:
    """Raise ArtifactError unless the file is a complete VMFB; IREE's loader may crash on a damaged one.

    Only IREE's default format is accepted: a VMFB that is also a ZIP archive, and therefore has checksums.
    """
    try:
        with path.open("rb") as file:
            head = file.read(12)
        if not head.startswith(_ZIP_MAGIC):
            raise ArtifactError(f"{path}: {_describe(head)}")
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            names = archive.namelist()
    except _OF_DAMAGE as error:
        raise ArtifactError(f"{path}: the VMFB is damaged or cut short ({error}); {_REBUILD}") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from None
    if damaged is not None:
        raise ArtifactError(f"{path}: the VMFB is damaged (checksum of {damaged} is wrong); {_REBUILD}")
    if "module.fb" not in names:
        raise ArtifactError(f"{path}: a ZIP archive but not a VMFB; give the file that iree-compile made")


def _describe(head: bytes) -> str:
    if head[_FLATBUFFER_IDENTIFIER] == b"IREE":
        return "a VMFB without checksums; compile it again without `--iree-vm-emit-polyglot-zip=false`"
    return "not a VMFB; give the file that iree-compile made"


def load_error(path: Path, error: Exception) -> ArtifactError:
    """Return an ArtifactError that explains a runtime's error on loading a VMFB and its parameters."""
    text = str(error)
    reason = text.splitlines()[0] if text else type(error).__name__
    if "bytecode version" in text or "module features" in text:
        return ArtifactError(
            f"{path}: compiled by another release of IREE than {runtime_release()}, the one installed here "
            f"({reason}); {_REBUILD}"
        )
    if (missing := _MISSING_DEVICE.search(reason)) and (given := int(missing[1])):
        return ArtifactError(
            f"{path}: its pipeline stages need more devices than the {given} that it is given; give one GPU "
            "per stage with `--device-ids`, and `--runtime shortfin`"
        )
    if "hipErrorNoBinaryForGpu" in text:
        return wrong_chip_error(path)
    if "RESOURCE_EXHAUSTED" in text:
        return ArtifactError(f"{path}: the device has not enough memory for its parameters ({reason})")
    if "HIP driver error" in text or "CUDA driver error" in text:
        return ArtifactError(f"{path}: the GPU failed while it was loaded ({reason}); try again")
    if "parameter" in text:
        return ArtifactError(
            f"{path}: its parameters do not fit ({reason}); give the .irpa it was built with"
        )
    if "no executable loader" in text or "executable format" in text or "target" in text:
        return ArtifactError(f"{path}: compiled for another device ({reason}); rebuild it with `--device`")
    return ArtifactError(f"{path}: cannot be loaded ({reason}); {_REBUILD}")


def _is_entry(function: str) -> bool:
    return not (function.startswith("__") or function.endswith(WORKSPACE_QUERY_SUFFIX))


def _export(module: Any, function: str) -> Export:
    name = function.removesuffix(ASYNC_SUFFIX)
    reflection = module.lookup_function(function).reflection
    arguments, results = parse_declaration(reflection.get("iree.abi.declaration", "")) or (None, None)
    is_async = function != name or reflection.get("iree.abi.model") == "coarse-fences"
    only_dispatches = reflection.get(ONLY_DISPATCHES) == "true"
    workspace_bytes = int(reflection[WORKSPACE_BYTES]) if reflection.get(CALLER_OWNED) == "true" else None
    units = reflection.get(COMPUTE_UNITS)
    signature = EntrySignature(
        name,
        arguments,
        results,
        only_dispatches,
        workspace_bytes,
        compute_units=None if units is None else int(units),
        takes_followers=reflection.get(TAKES_FOLLOWERS) == "true",
        takes_hidden=reflection.get(TAKES_HIDDEN) == "true",
    )
    return Export(function, is_async, signature)
