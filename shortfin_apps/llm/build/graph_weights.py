"""Which parameters the graph reads, by name, shape and type."""

from __future__ import annotations

from shortfin_apps.llm.build.graph_text import Emitter, Tensor, tensor_type
from shortfin_apps.llm.build.spec import BuildOptions, LlamaSpec

SCOPE = "model"


def parameter_types(spec: LlamaSpec, options: BuildOptions) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every parameter of the compiled module: name -> (shape, dtype), dtype as in BuildOptions."""
    hidden, ffn, weights = spec.hidden_size, spec.intermediate_size, options.weights
    types: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((spec.vocab_size, hidden), weights)
    }
    for layer in range(spec.num_hidden_layers):
        block = f"blk.{layer}."
        types[block + "attn_norm.weight"] = ((hidden,), "f32")
        types[block + "attn_qkv.weight"] = ((spec.qkv_features, hidden), weights)
        types[block + "attn_output.weight"] = ((hidden, spec.num_attention_heads * spec.head_dim), weights)
        types[block + "ffn_norm.weight"] = ((hidden,), "f32")
        types[block + "ffn_gate_up.weight"] = ((2 * ffn, hidden), weights)
        types[block + "ffn_down.weight"] = ((hidden, ffn), weights)
    types["output_norm.weight"] = ((hidden,), "f32")
    if not spec.tie_word_embeddings:
        types["output.weight"] = ((spec.vocab_size, hidden), weights)
    return types


class WeightTypes:
    """The parameters as globals of the module."""

    def __init__(self, spec: LlamaSpec, options: BuildOptions) -> None:
        self._types = parameter_types(spec, options)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._types[name][0]

    def load(self, e: Emitter, name: str) -> Tensor:
        return e.load(name, *self._types[name])

    def declarations(self) -> list[str]:
        return [
            f'util.global private @"{name}" = #flow.parameter.named<"{SCOPE}"::"{name}"> : '
            f"{tensor_type(shape, dtype)}"
            for name, (shape, dtype) in self._types.items()
        ]
