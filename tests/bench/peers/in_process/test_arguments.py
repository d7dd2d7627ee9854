from __future__ import annotations

from pathlib import Path

from bench.peers.in_process.arguments import Arguments, parse_arguments


def test_the_engine_chooses_the_precision_unless_told() -> None:
    argv = ["model", "--port", "80", "--threads", "2"]
    assert parse_arguments(None, argv) == Arguments(Path("model"), 80, 2, None)
    assert parse_arguments(None, [*argv, "--precision", "bf16"]).precision == "bf16"
