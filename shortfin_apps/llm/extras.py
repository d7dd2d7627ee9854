"""The package's optional dependencies.

An extra's modules are imported where they are used. `main` prints `missing_extra` when one is not installed.
"""

from __future__ import annotations

# The extra that installs each module, as in pyproject.toml.
EXTRA_OF = {
    **dict.fromkeys(("gguf", "safetensors", "filelock", "platformdirs"), "build"),
    **dict.fromkeys(("elftools", "tinygrad"), "gpu-build"),
    "huggingface_hub": "hub",
    **dict.fromkeys(("prompt_toolkit", "markdown_it", "shtab", "aiohttp", "httpx_aiohttp"), "terminal"),
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Returns a sentence that says which extra to install, or None if the module is not one of an extra."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_OF:
        return None
    return f"this needs {module}: run `pip install 'shortfin-llm[{EXTRA_OF[module]}]'`"
