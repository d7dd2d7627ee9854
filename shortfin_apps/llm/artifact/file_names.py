"""The files of an artefact, the directory that `build` writes and `serve` opens.

DIR/model.vmfb              the program
DIR/model.irpa              the program's parameters
DIR/config.json             how to invoke the program (`ModelConfig`)
DIR/tokenizer.json          with tokenizer_config.json and generation_config.json next to it
DIR/self_test.json          expected results for a few prompts (`SelfTestFile`), unless built without these
DIR/manifest.json           how the artefact was built (`Manifest`)

An artefact for several devices has, instead of the first three files:

DIR/model.NAME.vmfb         a program for each CPU and chip, by its name in `--device`
DIR/model.irpa              the programs' parameters, if all programs use the same weight layout; otherwise
DIR/model.NAME.irpa         one file per weight layout, named after the first device whose program reads it
DIR/config.json             how to invoke the programs, if that is the same for CPUs and GPUs; otherwise
DIR/config.KIND.json        one file per kind of device: cpu, hip or cuda
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
TEXTS = (TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG)
FILES = (VMFB, PARAMETERS, CONFIG, *TEXTS, SELF_TEST)  # of an artefact with one program
# Names of programs, and of their parameters and configs.
PROGRAM_FILE = r"(model(\.[\w.+-]+)?\.(vmfb|irpa)|config(\.\w+)?\.json)"


def of_device(name: str, device: str) -> str:
    """Return a file's name in an artefact for several devices, such as `model.CPU.vmfb` for VMFB."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{device}{dot}{suffix}"


def has_program(directory: Path) -> bool:
    """Return whether the directory has a VMFB, for one or several devices. Raises OSError."""
    return any(directory.glob(of_device(VMFB, "*"))) or (directory / VMFB).exists()
