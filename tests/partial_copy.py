"""An artefact for a GPU and a CPU without the GPU's files, as in a copy for machines without one."""

from __future__ import annotations

import json
from pathlib import Path

from shortfin_apps.llm.artifact import file_names

LEFT_OUT = ("model.gfx942.irpa", "model.gfx942.vmfb")


def add_missing_gpu(folder: Path) -> None:
    """List a program for gfx942, whose files are not there, before the only one of the artefact."""
    path = folder / file_names.MANIFEST
    path.chmod(0o644)
    manifest = json.loads(path.read_text())
    [program] = manifest["programs"]
    parameters, vmfb = LEFT_OUT
    target = {"device": "hip:gfx942", "architecture": "amdgpu", "cpu": "gfx942", "features": []}
    manifest["programs"].insert(0, program | {"vmfb": vmfb, "parameters": parameters, "target": target})
    manifest["files"] |= {name: {"sha256": "0" * 64, "size_bytes": 1} for name in LEFT_OUT}
    path.write_text(json.dumps(manifest))
