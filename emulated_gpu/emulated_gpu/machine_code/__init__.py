"""Reads AMD code objects and decodes the instructions in them."""
