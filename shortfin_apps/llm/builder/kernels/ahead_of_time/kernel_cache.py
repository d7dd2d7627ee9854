"""A cache of compiled Triton kernels, shared by the builds of all models.

ROOT/CHIP/KEY       the SHA-256 of the remainder, then a kernel's code; the modification time is the last use

Triton's own cache is not used because it does not check what it reads, ignores the sources' paths that are in
debug information, fails if the folder is read-only or the disk is full, and keeps every intermediate stage.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from shortfin_apps.llm.builder.kernels.ahead_of_time import compile as compile_module
from shortfin_apps.llm.builder.kernels.ahead_of_time import llvm_ir, ptx
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel

_CODE = (compile_module, llvm_ir, ptx)  # everything that makes code, except the kernels and Triton


class KernelCache:
    """Compiled kernels for one chip. Processes can share the folder `root`.

    A missing or damaged file is a miss, and a file that cannot be written is left out.
    """

    def __init__(self, root: Path, chip: str) -> None:
        self._folder = root / chip

    def load(self, kernel: Kernel) -> CodeObject | None:
        """Return the kernel's code, or None if it is not in the cache."""
        path = self._folder / self._key(kernel)
        try:
            code = _decode(path.read_bytes())
        except OSError:
            return None
        with suppress(OSError):  # a read-only folder
            os.utime(path)
        return code

    def store(self, kernel: Kernel, code: CodeObject) -> None:
        path = self._folder / self._key(kernel)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_encode(code))
            partial.replace(path)
        except OSError:  # read-only, or a full disk
            with suppress(OSError):
                partial.unlink()

    def _key(self, kernel: Kernel) -> str:
        """Return a hash of everything that the code depends on."""
        from triton._C.libtriton import get_cache_invalidating_env_vars

        parts = (
            *(kernel.name, kernel.function.cache_key, kernel.tuning),
            kernel.function.fn.__code__.co_filename,  # which debug information contains
            *(kernel.interface, sorted(kernel.constexprs.items())),
            *(self._folder.name, version("triton"), sorted(get_cache_invalidating_env_vars().items())),
            _code_hash(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _code_hash() -> str:
    texts = [Path(str(module.__file__)).read_bytes() for module in _CODE]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _encode(code: CodeObject) -> bytes:
    head = json.dumps({"threads": code.threads, "shared_bytes": code.shared_bytes})
    body = head.encode() + b"\n" + code.image
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decode(data: bytes) -> CodeObject | None:
    """Return the code, or None if the file is damaged."""
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    head, _, image = body.partition(b"\n")
    return CodeObject(image, **json.loads(head))
