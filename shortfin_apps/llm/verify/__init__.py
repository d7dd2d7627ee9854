"""`shortfin-llm verify`: what is in an artefact, and what it computes on each device at hand."""
