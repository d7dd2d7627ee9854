"""Weight types in the comparison, and each server's name for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Names of a weight type; None for `openvino` and `ort`: not measured.

    `ours` is for `shortfin-llm build --weights`; `llama` for llama-quantize (None: keep the file's types);
    `openvino` for optimum-cli's `--weight-format`; `ort` for onnxruntime-genai's model builder. `has_vllm`:
    measure vLLM's CPU build, too.
    """

    ours: str
    llama: str | None
    has_vllm: bool = False
    openvino: str | None = None
    ort: str | None = None


KINDS = {
    # onnxruntime-genai has no kernels for bf16 on a CPU.
    "bf16": WeightKind("bf16", "BF16", has_vllm=True, openvino="fp16", ort="fp32"),
    "q8_0": WeightKind("q8_0", "Q8_0", openvino="int8", ort="int8"),
    "q4_1": WeightKind("q4", None, openvino="int4", ort="int4"),  # the type of the model's GGUF file
    "int8": WeightKind("int8", "Q8_0", openvino="int8", ort="int8"),
    "own": WeightKind("auto", None),  # the types of the GGUF file, tensor by tensor
}
