"""Tests of the emulated GPU."""
