"""`shortfin-llm verify`: checks an artefact's files, and its results on each available device."""
