"""`shortfin-llm batch`: answers a file of requests with a file of results, in OpenAI's batch format."""
