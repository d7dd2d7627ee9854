"""AMD machine code in a VMFB: its code objects, and how many waves of a kernel fit."""
