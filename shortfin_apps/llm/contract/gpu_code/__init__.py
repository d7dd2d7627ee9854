"""AMD machine code in a VMFB: its code objects, and the occupancy (waves per SIMD) of their kernels."""
