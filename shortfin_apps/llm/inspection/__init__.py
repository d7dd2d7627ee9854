"""`shortfin-llm inspect`: what an artefact holds, and the GPU kernels in it."""
