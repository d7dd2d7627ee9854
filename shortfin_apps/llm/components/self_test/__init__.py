"""Self-test: runs every entry on prompts with known results, at startup and while the server is idle."""
