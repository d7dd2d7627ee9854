"""A batching service for large language models compiled by IREE."""

__version__ = "0.1.0"
