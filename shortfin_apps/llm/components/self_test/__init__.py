"""The self-test: runs every entry on prompts whose results are known, before a server takes requests."""
