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
from shortfin_apps.llm.build.spec import BuildOptions, LlamaSpec
from shortfin_apps.llm.errors import BuildError

LANES = 16  # f32 of one panel and of one vector; narrower registers take a vector in parts
AMX_SIZE = 32  # bf16 of one row of a tile, and columns of two
AMX_ROWS_BYTES = 768 << 10  # rows of a workgroup, which stay in the second-level cache beside its weights


class CpuForm:
    """Implements Form. Weights are packed into panels once, when the module is loaded.

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
        self._packed: dict[str, str] = {}
        self._attention = choose_attention(spec, options, target, self._kernel)

    def declarations(self) -> list[str]:
        return [*self._packed.values(), *self._kernels.values()]

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        kernel = self._kernel(
            "rms_norm",
            "rms_norm",
            size=self._spec.hidden_size,
            eps=self._spec.rms_norm_eps,
            dtype=self._options.weights,
            lanes=math.gcd(self._spec.hidden_size, LANES),
            row_block=4,
        )
        rows = x.shape[0]
        result = (x.shape, self._options.weights)
        return e.dispatch(kernel, [rows], [rows], [x, self._weights.load(e, weight)], [result])[0]

    def linear(self, e: Emitter, x: Tensor, weight: str, residual: Tensor | None = None) -> Tensor:
        out_features = self._weights.shape(weight)[0]
        padded = -(-out_features // LANES) * LANES
        reads = [x, self._pack(e, weight)] + ([residual] if residual else [])
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
        result = ((rows, self._spec.intermediate_size), self._options.weights)
        kernel = self._matmul(weight, "silu")
        return e.dispatch(kernel, [rows], [rows], [x, self._pack(e, weight, gated=True)], [result])[0]

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
        panels = -(-out_features // (2 * LANES))
        name = f"matmul_{out_features}x{in_features}_{epilogue}"
        shape = {
            "n": out_features,
            "k_size": in_features,
            "epilogue": epilogue,
            "panels_per_group": max(1, panels // 32),
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
            dtype=self._options.weights,
            dot2=self._dot2,
            lanes=LANES,
            tile_rows=tile_rows,
            tail_sizes=[size for size in (4, 2, 1) if size < tile_rows],
        )

    @property
    def _dot2(self) -> bool:
        return self._options.weights == "bf16" and self._target.has_bf16_dot

    def _pack(self, e: Emitter, weight: str, gated: bool = False) -> Tensor:
        """The packed form of `weight` (see the matmul kernel); one global, which all entries share."""
        out_features, in_features = self._weights.shape(weight)
        pair = 2 if self._dot2 else 1
        panels = -(-out_features // (2 * LANES))
        shape = (panels, in_features // pair, 2 * LANES * pair)
        name = f"packed.{weight}"
        if name not in self._packed:
            init = Emitter()
            packed = self._pack_gated(init, weight, pair) if gated else self._pack_plain(init, weight, pair)
            packed = init.reshape(packed, shape)
            init.line(f'util.global.store {packed.name}, @"{name}" : {packed.type}')
            body = "\n".join(init.lines)
            self._packed[name] = (
                f'util.global private @"{name}" : {packed.type}\nutil.initializer {{\n{body}\nutil.return\n}}'
            )
        return e.load(name, shape, self._options.weights)

    def _pack_plain(self, e: Emitter, weight: str, pair: int) -> Tensor:
        """[out, in] -> [out / panel, in / pair, panel, pair]."""
        source = self._weights.load(e, weight)
        out_features, in_features = self._weights.shape(weight)
        shape = (-(-out_features // (2 * LANES)), in_features // pair, 2 * LANES, pair)
        return self._emit_pack(e, source, shape, "0, 1", (2 * LANES, pair))

    def _pack_gated(self, e: Emitter, weight: str, pair: int) -> Tensor:
        """[(gate, up) * features, in] -> [1, features / lanes, in / pair, (gate, up), lanes, pair]."""
        rows, in_features = self._weights.shape(weight)
        source = e.reshape(self._weights.load(e, weight), (2, rows // 2, in_features))
        shape = (1, rows // 2 // LANES, in_features // pair, 2, LANES, pair)
        return self._emit_pack(e, source, shape, "0, 1, 2", (2, LANES, pair))

    @staticmethod
    def _emit_pack(
        e: Emitter, source: Tensor, shape: tuple[int, ...], dims: str, tiles: tuple[int, ...]
    ) -> Tensor:
        zero = e.value(f"arith.constant 0.0 : {source.dtype}")
        out = e.empty(shape, source.dtype)
        return e.tensor(
            f"linalg.pack {source.name} padding_value({zero} : {source.dtype}) inner_dims_pos = [{dims}] "
            f"inner_tiles = [{', '.join(map(str, tiles))}] into {out.name} : {source.type} -> {out.type}",
            shape,
            source.dtype,
        )

    def _kernel(self, template: str, name: str, **parameters: Any) -> str:
        if name not in self._kernels:
            self._kernels[name] = render(template, name, **parameters)
        return name
