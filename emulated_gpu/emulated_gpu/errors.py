"""This package's exceptions."""


class EmulatedGpuError(Exception):
    """The emulated GPU cannot be built, or did not understand a command."""


class CodeObjectError(EmulatedGpuError):
    """A code object is damaged, or for an unknown chip."""
