"""`shortfin-llm generate` and `shortfin-llm chat`: a served model on the terminal."""
