"""The model families, by the architecture a source names, and shapes derived from their tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model import llama
from shortfin_apps.llm.model.operations import ModelTensor, Operation
from shortfin_apps.llm.model.spec import ModelSpec


class Family(Protocol):
    """A module such as llama.py."""

    def tensors(self, spec: ModelSpec) -> Iterable[ModelTensor]: ...

    def operations(self, spec: ModelSpec) -> Iterable[Operation]: ...


FAMILIES: dict[str, Family] = dict.fromkeys(
    (
        *("gemma2", "gemma3", "gpt-oss", "granite", "llama", "mistral", "olmo2", "phi3"),
        *("qwen2", "qwen3", "qwen3_moe", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "smollm3"),
    ),
    llama,
)
SUPPORTED = (  # for users
    "Llama 2 and 3, SmolLM2 and 3, TinyLlama, Mistral, Mixtral, Qwen2, Qwen2.5, Qwen3 and its mixtures of "
    "experts, Qwen3-Next, Qwen3.5 and its mixtures, Phi-3, Phi-4-mini, Granite (dense), OLMo2, Gemma 2, "
    "Gemma 3 and gpt-oss"
)


def family_of(spec: ModelSpec) -> Family:
    """Return the model's family.

    Raises BuildError if this version does not know it, as for a newer artefact.
    """
    if spec.architecture not in FAMILIES:
        raise BuildError(
            f"architecture `{spec.architecture}` is not known to this version of shortfin-llm, which knows "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[spec.architecture]


def operations(spec: ModelSpec) -> list[Operation]:
    """List the model's operations, from the value `tokens` to the value `logits`."""
    return list(family_of(spec).operations(spec))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a source must have: GGUF's name -> shape."""
    return {tensor.name: tensor.shape for tensor in family_of(spec).tensors(spec)}


def weight_parts(spec: ModelSpec) -> dict[str, list[ModelTensor]]:
    """Return the stored weights, in an invocation's read order: name -> tensors stacked on rows."""
    parts: dict[str, list[ModelTensor]] = {}
    for tensor in family_of(spec).tensors(spec):
        parts.setdefault(tensor.weight, []).append(tensor)
    return parts


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the stored weights: name -> shape."""
    return {name: _shape(parts) for name, parts in weight_parts(spec).items()}


def _shape(parts: Sequence[ModelTensor]) -> tuple[int, ...]:
    rows, last = sum(part.shape[0] for part in parts), parts[-1]
    if last.expert is None:
        return rows, *last.shape[1:]
    experts = last.expert + 1
    return experts, rows // experts, *last.shape[1:]
