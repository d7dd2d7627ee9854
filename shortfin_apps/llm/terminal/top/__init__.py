"""`shortfin-llm top`: a live table of a running server."""
