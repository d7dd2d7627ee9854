"""OpenVINO GenAI from PyPI, with weights converted by optimum-intel and NNCF."""

from __future__ import annotations

from pathlib import Path

from bench.peers.in_process_peer import EnginePackage

BF16 = "fp16"  # its storage type for floating point; the server computes in bf16
# As in GGUF and in our server: blocks of 32 weights, each with a scale and a zero point.
FORMAT_OPTIONS = {BF16: (), "int8": (), "int4": ("--group-size", "32")}


def convert(programs: Path, source: Path, target: Path, weights: str) -> list[str | Path]:
    command: list[str | Path] = [programs / "optimum-cli", "export", "openvino", "--model", source]
    command += ["--task", "text-generation-with-past", "--weight-format", weights]
    return [*command, *FORMAT_OPTIONS[weights], target]


OPENVINO = EnginePackage(
    label="openvino",
    requirements=("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
    module="bench.peers.in_process.openvino_engine",
    disk_bytes=2_500_000_000,
    format_of=lambda kind: kind.openvino,
    convert=convert,
    options_of=lambda weights: ("--precision", "bf16") if weights == BF16 else (),
)
