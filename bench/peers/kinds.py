"""Weight types of the comparison, and each server's name for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightKind:
    """`ours` is for `shortfin-llm build --weights`, and `llama` for llama-quantize: None takes the file as it
    is. vLLM's CPU build is measured where `has_vllm`.
    """

    ours: str
    llama: str | None
    has_vllm: bool = False


KINDS = {
    "bf16": WeightKind("bf16", "BF16", has_vllm=True),
    "q8_0": WeightKind("q8_0", "Q8_0"),
    "q4_1": WeightKind("q4", None),  # the type of the model's GGUF file
    "int8": WeightKind("int8", "Q8_0"),
    "own": WeightKind("auto", None),  # the types of the GGUF file, tensor by tensor
}
