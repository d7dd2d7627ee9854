"""Model sources: one module per kind; `catalogue.open_source` selects one by name."""
