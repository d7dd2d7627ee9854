"""Edits of the PTX that Triton 3.9 generates, so that IREE can launch the kernel.

Triton adds two parameters for scratch memory, which IREE does not pass. The edit drops these parameters. A
kernel that uses the first one, global memory for each workgroup, must have an operand `scratch`, which takes
its place; other uses are refused. IREE looks up a kernel by the name of its export, so the edit renames the
kernel.

Triton has TMA loads for PTX 8.6 and newer, but drivers of CUDA 12.4 take PTX 8.4 at most. The only newer part
of these kernels is the name of the loads' state space, so an edit replaces the name and the version.
"""

from __future__ import annotations

import re

from shortfin_apps.llm.contract.errors import BuildError

SCRATCH = "scratch"  # name of the operand that takes the place of Triton's global scratch memory
SCRATCH_ALIGNMENT = 128  # bytes, for tensor maps; IREE aligns buffers to 64
_ENTRY = re.compile(r"\.entry (?P<name>[\w$]+)\((?P<parameters>[^)]*)\)")
_NEW_VERSION, _VERSION = ".version 8.6\n", ".version 8.4\n"
_BULK_COPY = re.compile(r"\bcp\.(?:reduce\.)?async\.bulk\.(?!commit_group|wait_group)[\w.:]+")
_LOAD = re.compile(
    r"(cp\.async\.bulk\.tensor\.[25]d\.shared::)cta(\.global\.mbarrier::complete_tx::bytes)(?![\w.:])"
)
_WRITTEN_MAP = re.compile(r"\btensormap\.cp_fenceproxy\.global\.shared::cta\.\S*\.release\.gpu\.")
_READ_MAP = re.compile(r"\bfence\.proxy\.tensormap::generic\.acquire\.gpu")


def for_iree(ptx: str, name: str, num_parameters: int, scratch: int | None = None) -> str:
    """Return the module with its kernel renamed to `name`, and only its first `num_parameters` parameters.

    `scratch`: index of the parameter that takes the place of Triton's global scratch memory, if there is one.
    Raises BuildError if the kernel uses parameters that IREE does not pass.
    """
    match = _ENTRY.search(ptx)
    if match is None:
        raise BuildError("Triton's PTX has no kernel; another release of Triton than 3.9?")
    parameters = [each.strip() for each in match["parameters"].split(",")]
    before, after = ptx[: match.start()], ptx[match.end() :]
    if scratch is not None:
        given, replaced = (_name(parameters[n]) for n in (scratch, num_parameters))
        after = _with_scratch(after, replaced, given, name)
    for parameter in parameters[num_parameters:]:
        if _uses(after, _name(parameter)):
            raise BuildError(f"kernel {name} uses {parameter}, which IREE does not pass")
    kept = ",\n\t".join(parameters[:num_parameters])
    return f"{before}.entry {name}(\n\t{kept}\n){after}"


def without_newer_loads(ptx: str, name: str) -> str:
    """Return the module of a kernel with TMA loads in PTX 8.4.

    These loads write to "shared::cta", the workgroup's memory. PTX 8.4 only has "shared::cluster", which is
    the same memory as there is no cluster. Raises BuildError for other bulk copies, and if a tensor map is
    read without the fence that drops a former map at its address from the TMA unit's cache.
    """
    if ptx.count(_NEW_VERSION) != 1:
        raise BuildError(f"kernel {name} is not in PTX 8.6; another release of Triton than 3.9?")
    if others := {copy for copy in _BULK_COPY.findall(ptx) if not _LOAD.fullmatch(copy)}:
        raise BuildError(f"kernel {name} has bulk copies that PTX 8.4 may lack: {', '.join(sorted(others))}")
    if len(_WRITTEN_MAP.findall(ptx)) != len(_READ_MAP.findall(ptx)):
        raise BuildError(f"kernel {name} reads a tensor map without a fence after it was written")
    return _LOAD.sub(r"\1cluster\2", ptx.replace(_NEW_VERSION, _VERSION))


def _with_scratch(body: str, replaced: str, given: str, name: str) -> str:
    """Replace the parameter `replaced` by the address `given`, rounded up to SCRATCH_ALIGNMENT bytes."""
    if _uses(body, given):
        raise BuildError(f"kernel {name} uses its operand `{SCRATCH}`, which is Triton's scratch memory")
    round_up = rf"\n\tadd.s64 \t\1, \1, {SCRATCH_ALIGNMENT - 1};\n\tand.b64 \t\1, \1, -{SCRATCH_ALIGNMENT};"
    load = re.compile(rf"ld\.param\.b64\s+(%rd\d+), \[{re.escape(replaced)}\];")
    made, count = load.subn(rf"ld.param.b64 \t\1, [{given}];{round_up}", body)
    if not count:
        raise BuildError(f"kernel {name} has an operand `{SCRATCH}`, but does not load Triton's {replaced}")
    return made


def _name(parameter: str) -> str:
    return parameter.split()[-1]


def _uses(body: str, parameter: str) -> bool:
    return re.search(re.escape(parameter) + r"\b", body) is not None
