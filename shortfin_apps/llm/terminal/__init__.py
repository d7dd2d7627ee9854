"""`shortfin-llm generate` and `shortfin-llm chat`: use a served model from the terminal."""
