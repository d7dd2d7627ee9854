"""Where models come from: one module a kind of source, `catalogue.open_source` to tell them apart."""
