"""Edits of the PTX that Triton 3.9 generates, so that IREE can launch the kernel.

Triton adds two parameters for scratch memory, which IREE does not pass. The edit drops these parameters, and
refuses kernels that use them. IREE looks up a kernel by the name of its export, so the edit renames the
kernel.
"""

from __future__ import annotations

import re

from shortfin_apps.llm.contract.errors import BuildError

_ENTRY = re.compile(r"\.entry (?P<name>[\w$]+)\((?P<parameters>[^)]*)\)")


def for_iree(ptx: str, name: str, num_parameters: int) -> str:
    """Return the module with its kernel renamed to `name`, and only its first `num_parameters` parameters.

    Raises BuildError if the kernel uses parameters that IREE does not pass.
    """
    match = _ENTRY.search(ptx)
    if match is None:
        raise BuildError("Triton's PTX has no kernel; another release of Triton than 3.9?")
    parameters = [each.strip() for each in match["parameters"].split(",")]
    before, after = ptx[: match.start()], ptx[match.end() :]
    for parameter in parameters[num_parameters:]:
        if re.search(re.escape(parameter.split()[-1]) + r"\b", after):
            raise BuildError(f"kernel {name} uses {parameter}, which IREE does not pass")
    kept = ",\n\t".join(parameters[:num_parameters])
    return f"{before}.entry {name}(\n\t{kept}\n){after}"
