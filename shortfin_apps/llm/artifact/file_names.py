"""The files of an artefact, the directory that `build` writes and `serve` opens.

DIR/model.vmfb              the program
DIR/model.irpa              its parameters
DIR/config.json             how to invoke it (`ModelConfig`)
DIR/tokenizer.json          with tokenizer_config.json and generation_config.json beside it
DIR/self_test.json          what it computes for a few prompts (`SelfTestFile`), unless built without
DIR/manifest.json           how it was built (`Manifest`)

One for several kinds of CPU has, in place of the first two:

DIR/model.CPU.vmfb          the program for each, by its name in `--device`
DIR/model.irpa              their parameters, where all store weights alike; else
DIR/model.CPU.irpa          one for each way in which they do, by the first CPU that reads it
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
PROGRAM_FILE = r"model(\.[\w.+-]+)?\.(vmfb|irpa)"  # what programs and their parameters are named


def of_cpu(name: str, cpu: str) -> str:
    """The file of that kind for one of several CPUs: `model.CPU.vmfb` of VMFB."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{cpu}{dot}{suffix}"


def has_program(directory: Path) -> bool:
    """Whether a compiled model is in the directory. Raises OSError."""
    return any(directory.glob(of_cpu(VMFB, "*"))) or (directory / VMFB).exists()
