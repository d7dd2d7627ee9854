"""The files of an artefact, the directory that `build` writes and `serve` opens.

DIR/model.vmfb              the program
DIR/model.irpa              the program's parameters
DIR/config.json             how to invoke the program (`ModelConfig`)
DIR/tokenizer.json          with tokenizer_config.json and generation_config.json next to it
DIR/self_test.json          expected results for a few prompts (`SelfTestFile`), unless built without these
DIR/manifest.json           how the artefact was built (`Manifest`)

An artefact for several kinds of CPU has, instead of the first two files:

DIR/model.CPU.vmfb          a program for each kind of CPU, by its name in `--device`
DIR/model.irpa              the programs' parameters, if all programs use the same weight layout; otherwise
DIR/model.CPU.irpa          one file per weight layout, named after the first CPU whose program reads the file
"""

from __future__ import annotations

from pathlib import Path

VMFB = "model.vmfb"
PARAMETERS = "model.irpa"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
SELF_TEST = "self_test.json"
MANIFEST = "manifest.json"
TEXTS = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG)
FILES = (VMFB, PARAMETERS, *TEXTS, SELF_TEST)  # of an artefact with one program
PROGRAM_FILE = r"model(\.[\w.+-]+)?\.(vmfb|irpa)"  # names of programs and their parameters


def of_cpu(name: str, cpu: str) -> str:
    """Return a file's name in an artefact for several kinds of CPU, such as `model.CPU.vmfb` for VMFB."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{cpu}{dot}{suffix}"


def has_program(directory: Path) -> bool:
    """Return whether the directory has a VMFB, for one or several kinds of CPU. Raises OSError."""
    return any(directory.glob(of_cpu(VMFB, "*"))) or (directory / VMFB).exists()
