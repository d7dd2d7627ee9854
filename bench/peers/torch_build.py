"""The build of torch that vLLM's CPU build and the converters of other engines use."""

from __future__ import annotations

from bench.peers.cache import Cache

TORCH = ("torch", "2.13.0+cpu")  # not on PyPI, whose build has a GPU's libraries
# Packages depend on these, which on PyPI are built for CUDA's torch: they break the import of transformers,
# and a text model does not need them.
UNFIT = ("torchvision", "torchaudio", "torchcodec")


def remove_unfit(cache: Cache, environment: str) -> None:
    """Uninstalls them, if they are there. Raises SetUpError."""
    python = cache.bin_of(environment) / "python"
    cache.run(environment, [python, "-m", "pip", "uninstall", "--yes", *UNFIT])
