"""Makes the artefact's self-test: what the reference computes for a few prompts."""
