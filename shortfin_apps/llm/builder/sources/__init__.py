"""Model sources: one module per kind; `catalogue.open_source` picks the one for a given name."""
