"""Command lines of `serve`, read as the server reads them."""

from __future__ import annotations

import argparse

from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.flags import add_arguments, from_arguments


def parse(*argv: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(argv))


def notes_of(*argv: str) -> list[str]:
    """Notes on a command line that is accepted."""
    notes: list[str] = []
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    from_arguments(parser.parse_args(argv), notes.append)
    return notes
