"""`shortfin-llm bench`: throughput and latency of any OpenAI-compatible server."""
