"""The graph's operations as hand-written vector kernels, for CPUs."""

from __future__ import annotations

import math
from typing import Any

from shortfin_apps.llm.build.graph_cpu_attention import choose_attention
from shortfin_apps.llm.build.graph_form import Batch
from shortfin_apps.llm.build.graph_target import Target
from shortfin_apps.llm.build.graph_text import Emitter, Tensor, tensor_type
from shortfin_apps.llm.build.graph_weights import WeightTypes
from shortfin_apps.llm.build.kernels import render
from shortfin_apps.llm.build.quantise import BLOCK
from shortfin_apps.llm.build.spec import BuildOptions, LlamaSpec
from shortfin_apps.llm.build.weight_layout import LANES, num_panels
from shortfin_apps.llm.errors import BuildError

AMX_SIZE = 32  # bf16 of one row of a tile, and columns of two
AMX_ROWS_BYTES = 768 << 10  # rows of a workgroup, which stay in the second-level cache beside its weights


class CpuForm:
    """Implements Form over weights in panels (see weight_layout.py).

    Raises BuildError for a model whose sizes do not fill vectors.
    """

    def __init__(self, spec: LlamaSpec, options: BuildOptions, target: Target, weights: WeightTypes) -> None:
        for name in ("hidden_size", "intermediate_size"):
            if getattr(spec, name) % LANES:
                raise BuildError(
                    f"{name} {getattr(spec, name)} is not a multiple of {LANES}, as CPU kernels need"
                )
        self._spec = spec
        self._options = options
        self._target = target
        self._weights = weights
        self._kernels: dict[str, str] = {}
        self._attention = choose_attention(spec, options, target, self._kernel)

    def declarations(self) -> list[str]:
        return list(self._kernels.values())

    def embedding(self, e: Emitter, tokens: Tensor) -> Tensor:
        table, *scales = self._weights.load(e, "token_embd.weight")
        assert isinstance(table.shape[2], int)
        pair = table.shape[2] // (2 * LANES)
        last = e.constant(self._spec.vocab_size - 1)
        lines, value = _widened(table, scales)
        body = f"""\
  %d = linalg.index 1 : index
  %id = arith.index_cast %a : i64 to index
  %row = arith.minui %id, {last} : index
  %columns = arith.constant {2 * LANES} : index
  %pair = arith.constant {pair} : index
  %panel = arith.divui %row, %columns : index
  %column = arith.remui %row, %columns : index
  %k = arith.divui %d, %pair : index
  %parity = arith.remui %d, %pair : index
  %first = arith.muli %column, %pair : index
  %element = arith.addi %first, %parity : index
  %w = tensor.extract {table.name}[%panel, %k, %element] : {table.type}
{lines}  linalg.yield {value} : f32"""
        shape = (tokens.shape[0], self._spec.hidden_size)
        return e.elementwise("td", ("td", shape, "f32"), [(tokens, "t")], body)

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        kernel = self._kernel(
            "rms_norm",
            "rms_norm",
            size=self._spec.hidden_size,
            eps=self._spec.rms_norm_eps,
            dtype=self._options.activations,
            lanes=math.gcd(self._spec.hidden_size, LANES),
            has_bf16=self._dot2,
            row_block=4,
        )
        rows = x.shape[0]
        result = (x.shape, self._options.activations)
        return e.dispatch(kernel, [rows], [rows], [x, *self._weights.load(e, weight)], [result])[0]

    def linear(self, e: Emitter, x: Tensor, weight: str, residual: Tensor | None = None) -> Tensor:
        out_features = self._weights.shape(weight)[0]
        padded = -(-out_features // LANES) * LANES
        reads = [x, *self._weights.load(e, weight)] + ([residual] if residual else [])
        kernel = self._matmul(weight, "residual" if residual else "store")
        rows = x.shape[0]
        out = e.dispatch(kernel, [rows], [rows], reads, [((rows, padded), "f32")])[0]
        if padded == out_features:
            return out
        return e.tensor(
            f"tensor.extract_slice {out.name}[0, 0] [{rows}, {out_features}] [1, 1] : {out.type} to "
            f"{tensor_type((rows, out_features), 'f32')}",
            (rows, out_features),
            "f32",
        )

    def gated_linear(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        rows = x.shape[0]
        result = ((rows, self._spec.intermediate_size), self._options.activations)
        kernel = self._matmul(weight, "silu")
        return e.dispatch(kernel, [rows], [rows], [x, *self._weights.load(e, weight)], [result])[0]

    def rope_store(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        return self._attention.rope_store(e, qkv, layer, batch)

    def attention(self, e: Emitter, q: Tensor, layer: int, batch: Batch) -> Tensor:
        return self._attention.attention(e, q, layer, batch)

    def top_k(self, e: Emitter, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        assert isinstance(vocab, int)
        k = self._options.top_k
        kernel = self._kernel(
            "top_k",
            f"top_k_{k}_of_{vocab}",
            size=vocab,
            padded=vocab,
            k=k,
            lanes=math.gcd(vocab, LANES),
            tile=max(1, round(math.sqrt(vocab) / LANES)) * LANES,
        )
        values, indices = e.dispatch(
            kernel, [rows], [rows], [logits], [((rows, k), "f32"), ((rows, k), "i64")]
        )
        return values, indices

    def _matmul(self, weight: str, epilogue: str) -> str:
        out_features, in_features = self._weights.shape(weight)
        panels = num_panels(out_features)
        bits = self._weights.layout(weight).bits
        name = f"matmul_{out_features}x{in_features}_{epilogue}" + (f"_q{bits}" if bits else "")
        shape = {
            "n": out_features,
            "k_size": in_features,
            "epilogue": epilogue,
            "panels_per_group": max(1, panels // 32),
            "bits": bits,
        }
        if self._dot2 and self._target.has_amx and out_features % AMX_SIZE == in_features % AMX_SIZE == 0:
            row_block = min(512, AMX_ROWS_BYTES // (2 * in_features) // AMX_SIZE * AMX_SIZE)
            return self._kernel("matmul_amx", name, **shape, row_block=max(row_block, AMX_SIZE), max_chunk=10)
        tile_rows = 8 if self._target.has_wide_vectors else 2
        return self._kernel(
            "matmul",
            name,
            **shape,
            row_block=128,
            dtype=self._options.activations,
            dot2=self._dot2,
            lanes=LANES,
            tile_rows=tile_rows,
            tail_sizes=[size for size in (4, 2, 1) if size < tile_rows],
        )

    @property
    def _dot2(self) -> bool:
        return self._options.activations == "bf16" and self._target.has_bf16_dot

    def _kernel(self, template: str, name: str, **parameters: Any) -> str:
        if name not in self._kernels:
            self._kernels[name] = render(template, name, **parameters)
        return name


def _widened(table: Tensor, scales: list[Tensor]) -> tuple[str, str]:
    """What makes f32 of an element %w of panels, and its name; %panel, %column and %d say where it is."""
    if scales:
        lines = f"""\
  %block_size = arith.constant {BLOCK} : index
  %block = arith.divui %d, %block_size : index
  %s = tensor.extract {scales[0].name}[%panel, %block, %column] : {scales[0].type}
  %scale = arith.extf %s : f16 to f32
  %quant = arith.sitofp %w : i8 to f32
  %value = arith.mulf %quant, %scale : f32
"""
        return lines, "%value"
    if table.dtype == "f32":
        return "", "%w"
    return f"  %value = arith.extf %w : {table.dtype} to f32\n", "%value"
