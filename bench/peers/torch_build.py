"""The build of torch for vLLM's CPU build and for the converters of other engines."""

from __future__ import annotations

from bench.peers.cache import Cache

TORCH = ("torch", "2.13.0+cpu")  # not on PyPI, where the build includes GPU libraries
# Dependencies that PyPI has only for CUDA's torch: they break the import of transformers, and text models do
# not need them.
UNFIT = ("torchvision", "torchaudio", "torchcodec")


def remove_unfit(cache: Cache, environment: str) -> None:
    """Uninstall UNFIT packages if they are installed. Raises SetUpError."""
    python = cache.bin_of(environment) / "python"
    cache.run(environment, [python, "-m", "pip", "uninstall", "--yes", *UNFIT])
