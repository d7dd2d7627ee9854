"""`shortfin-llm inspect`: the contents of an artefact, and the GPU kernels in it."""
