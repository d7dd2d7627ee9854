"""An emulated AMD GPU: a HIP library (`libamdhip64.so`) that executes AMD machine code on the host CPU."""
