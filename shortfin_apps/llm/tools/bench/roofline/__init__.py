"""`shortfin-llm bench roofline`: compares the entries of a compiled model with the machine's limits."""
