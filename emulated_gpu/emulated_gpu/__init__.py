"""An emulated AMD GPU: a `libamdhip64.so` that executes AMD machine code on the host CPU."""
