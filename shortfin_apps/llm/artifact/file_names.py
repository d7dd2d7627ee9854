"""The files of an artefact, the directory that `build` writes and `serve` opens.

DIR/model.vmfb              the program
DIR/model.irpa              its parameters
DIR/config.json             how to invoke it (`ModelConfig`)
DIR/tokenizer.json          with tokenizer_config.json and generation_config.json beside it
DIR/manifest.json           how it was built (`Manifest`)
"""

from __future__ import annotations

VMFB = "model.vmfb"
PARAMETERS = "model.irpa"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
MANIFEST = "manifest.json"
FILES = (VMFB, PARAMETERS, CONFIG, TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG)
