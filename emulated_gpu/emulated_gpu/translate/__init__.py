"""Translates a code object's machine code to a program that the emulator in `emulated_gpu/wave` runs."""

from emulated_gpu.translate.kernel import translate, translate_code
from emulated_gpu.translate.program import pack

__all__ = ["pack", "translate", "translate_code"]
