"""Dialects: the formats in which model families write reasoning and tool calls."""
