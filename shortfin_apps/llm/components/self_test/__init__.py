"""Self-test: runs every entry on prompts with known results, before a server accepts requests."""
