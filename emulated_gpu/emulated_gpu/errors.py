"""This package's exceptions."""


class EmulatedGpuError(Exception):
    """The emulated GPU cannot be built, or a command for it is invalid."""


class CodeObjectError(EmulatedGpuError):
    """A code object is damaged, or for an unknown chip."""
