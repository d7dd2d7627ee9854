"""The sources of models, such as GGUF files; `catalogue.open_source` opens the one that the user names."""
