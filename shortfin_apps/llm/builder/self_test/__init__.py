"""The artefact's self-test: the reference's results for a few prompts."""
