"""Dialects: how model families write thoughts and tool calls, one family per file."""
