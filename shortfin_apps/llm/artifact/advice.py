"""Suggests commands: to rebuild an artefact, and what to do with a path that is not an artefact."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import fields
from pathlib import Path

from shortfin_apps.llm.artifact.file_names import CONFIG, MANIFEST, has_program
from shortfin_apps.llm.contract.source_name import KINDS, SCHEMES, source_name
from shortfin_apps.llm.model.spec import OWN_TYPES, BuildOptions

_FLAGS = {"device_block_count": "--pages"}  # other flags have the name of their option
_WEIGHTS = ("weights", "block_types")


def rebuild_command(directory: Path, source: str, *options: BuildOptions) -> str:
    """Return a `shortfin-llm build` command that rebuilds `directory` from `source`.

    `options` has the options for each kind of device.
    """
    words = ["shortfin-llm", "build", source, "-o", str(directory), "--weights"]
    words.append(OWN_TYPES if options[0].block_types else options[0].weights)
    device = ",".join(each.device for each in options)
    flags = {} if device == BuildOptions().device else {"--device": [device]}
    for each in options:
        defaults = BuildOptions.for_device(each.device)
        for option in fields(BuildOptions):
            value = getattr(each, option.name)
            if value != getattr(defaults, option.name) and option.name not in _WEIGHTS:
                flag = _FLAGS.get(option.name, f"--{option.name.replace('_', '-')}")
                if isinstance(value, bool):
                    flags[flag if value else flag.replace("--", "--no-", 1)] = []
                else:
                    flags[flag] = [_text(value)]
    return shlex.join([*words, *(word for flag, values in flags.items() for word in (flag, *values))])


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value)


OUTPUTS = Path("artifacts")  # where `build` writes without --output
GGUF_MAGIC = b"GGUF"
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # a name on Hugging Face


def advice(path: Path) -> str:
    """Return why `path` is not an artefact, and commands that build and serve one. Raises OSError."""
    if str(path).startswith(SCHEMES) and not path.exists():
        return f"{path}: is a source to build, not a model directory; {_build_and_serve(str(path))}"
    if path.is_dir():
        return f"{path}: not an artefact, {MANIFEST} is missing; {_for_directory(path)}"
    if path.is_file():
        return f"{path}: {_for_file(path)}"
    if path.suffix == ".gguf":
        return f"{path}: no such file; {_build_something(OUTPUTS / path.stem)}"
    if REPOSITORY.fullmatch(str(path)):
        commands = _build_and_serve(f"hf:{path}")
        return f"{path}: no such directory; if it is a repository on Hugging Face, {commands}"
    return f"{path}: no such directory; {_build_something(path)}"


def _for_directory(path: Path) -> str:
    if _is_hugging_face(path):
        return f"it looks like a Hugging Face directory: {_build_and_serve(str(path))}"
    if inner := sorted(path.glob(f"*/{MANIFEST}")):
        return f"run `{_serve(inner[0].parent)}`"
    if files := sorted(path.glob("*.gguf")):
        return f"it contains GGUF files: {_build_and_serve(str(files[0]))}"
    is_empty = not any(path.iterdir())
    return _build_something(path if is_empty else Path("NEW_DIR"))  # `build` refuses foreign folders


def _for_file(path: Path) -> str:
    if is_gguf(path):
        return f"is a GGUF file, not a model directory; {_build_and_serve(str(path))}"
    if (path.parent / MANIFEST).is_file():
        return f"is a file in a model directory; run `{_serve(path.parent)}`"
    if _is_hugging_face(path.parent):
        commands = _build_and_serve(str(path.parent))
        return f"is a file in a Hugging Face directory, not a model directory; {commands}"
    return f"is a file, not a model directory; {_build_something(OUTPUTS / path.stem)}"


def is_gguf(path: Path) -> bool:
    """Return whether the file begins with GGUF's magic bytes. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def _is_hugging_face(directory: Path) -> bool:
    """Return whether the directory has a config.json but no VMFB, which an artefact would have."""
    return (directory / CONFIG).is_file() and not has_program(directory)


def _build_and_serve(source: str) -> str:
    out = OUTPUTS / source_name(source)
    if os.path.realpath(out) == os.path.realpath(source):
        out = out.with_name(f"{out.name}-compiled")
    return f"run `shortfin-llm build {shlex.quote(source)} -o {out}` and then `{_serve(out)}`"


def _build_something(out: Path) -> str:
    return f"`shortfin-llm build SOURCE -o {shlex.quote(str(out))}` makes one, where SOURCE is {KINDS}"


def _serve(directory: Path) -> str:
    return f"shortfin-llm serve {shlex.quote(str(directory))}"
