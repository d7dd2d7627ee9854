"""onnxruntime-genai from PyPI, with weights converted by its model builder."""

from __future__ import annotations

from pathlib import Path

from bench.peers.in_process_peer import EnginePackage


def convert(programs: Path, source: Path, target: Path, weights: str) -> list[str | Path]:
    command: list[str | Path] = [programs / "python", "-m", "onnxruntime_genai.models.builder"]
    return [*command, "-i", source, "-o", target, "-p", weights, "-e", "cpu", "-c", target / "cache"]


ORT = EnginePackage(
    label="ort",
    requirements=("onnxruntime-genai==0.18.0", "transformers<5.6", "onnx-ir", "onnx"),
    module="bench.peers.in_process.ort_engine",
    disk_bytes=2_500_000_000,
    format_of=lambda kind: kind.ort,
    convert=convert,
)
