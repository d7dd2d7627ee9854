"""What this package raises."""


class EmulatedGpuError(Exception):
    """The emulated GPU cannot be built, or did not understand a command."""
