"""Attention over pages and what feeds it, as hand-written CPU kernels: the matrix unit's, or vectors'.

The two store K and V differently, each as its own attention reads them; nobody else looks into a page.
"""

from __future__ import annotations

from typing import Any, Protocol

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.graph.token_layout import attention_tiles
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.kernels.cpu.paged_attention import PagedAttentionGeometry
from shortfin_apps.llm.builder.kernels.cpu.rope_store import RopeStoreGeometry
from shortfin_apps.llm.builder.model.spec import BuildOptions, LlamaSpec
from shortfin_apps.llm.builder.target import Target

_LANES = 16  # f32 of one vector, and rows and columns of one accumulator tile
_MOST_QUERIES = 64  # of one AMX tile of tokens: what is kept of each must fit the nearest cache
_STEP_SLOTS = 64


class CpuAttention(Protocol):
    def attend(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        """[tokens, qkv features] f32 -> [tokens, heads * head_dim], in the activations' type. k and v go to
        the batch's cache, over which q attends."""
        ...


def choose_attention(spec: LlamaSpec, options: BuildOptions, target: Target, render: Render) -> CpuAttention:
    """AMX where the CPU has it and the model fills its tiles."""
    whole_tiles = spec.head_dim % (2 * _LANES) == options.block_seq_stride % _LANES == 0
    if target.has_amx and options.activations == options.kv == "bf16" and whole_tiles:
        return AmxAttention(spec, options, render)
    return VectorAttention(spec, options, target, render)


class AmxAttention:
    def __init__(self, spec: LlamaSpec, options: BuildOptions, render: Render) -> None:
        self._spec = spec
        self._options = options
        self._render = render
        self._group = spec.num_attention_heads // spec.num_key_value_heads

    def attend(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        if batch.chunk == 1:
            return self._decode(e, qkv, layer, batch)
        q = self._rope_store(e, qkv, layer, batch)
        kernel = self._render("amx/paged_attention", "paged_attention", **self.parameters(batch))
        workload, constants = _grid(e, layer, batch, _LANES)
        return e.dispatch(
            kernel,
            workload,
            constants,
            [q, *_geometry(e, batch, _LANES), batch.seq_lens, batch.blocks, batch.cache],
            [self._result(batch)],
        )[0]

    def parameters(self, batch: Batch) -> dict[str, Any]:
        """The attention kernels'."""
        most_tokens = 1 if batch.chunk == 1 else _LANES
        tile_tokens = max(1, min(most_tokens, _MOST_QUERIES // self._group))
        shape = _shape(self._spec, self._options, batch)
        return shape | {"tile_tokens": tile_tokens, "step_slots": _STEP_SLOTS}

    def _rope_store(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        """-> [kv_heads, tokens, group * head_dim] bf16"""
        kernel = self._render("amx/rope_store", "rope_store", **_shape(self._spec, self._options, batch))
        workload, constants = _grid(e, layer, batch, _LANES)
        shape = (self._spec.num_key_value_heads, batch.tokens, self._group * self._spec.head_dim)
        q, batch.cache = e.dispatch(
            kernel,
            workload,
            constants,
            [qkv, batch.rotary, *_geometry(e, batch, _LANES), batch.seq_lens, batch.blocks],
            [(shape, "bf16"), batch.cache],
        )
        return q

    def _decode(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        """Both, of rows of one token each."""
        kernel = self._render("amx/decode_attention", "decode_attention", **self.parameters(batch))
        batch.cache, out = e.dispatch(
            kernel,
            [batch.rows],
            [batch.rows, batch.width, batch.pages, layer],
            [qkv, batch.rotary, batch.starts, batch.seq_lens, batch.blocks],
            [batch.cache, self._result(batch)],
        )
        return out

    def _result(self, batch: Batch) -> tuple[tuple[Dim, int], str]:
        return (batch.tokens, self._spec.num_attention_heads * self._spec.head_dim), "bf16"


class VectorAttention:
    def __init__(self, spec: LlamaSpec, options: BuildOptions, target: Target, render: Render) -> None:
        self._spec = spec
        self._options = options
        self._target = target
        self._render = render

    def _rope_store(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        """-> [tokens, heads * head_dim] f32"""
        spec = self._spec
        geometry = RopeStoreGeometry(kv_dtype=self._options.kv, **_shape(spec, self._options, batch))
        kernel = self._render("cpu/rope_store", "rope_store", g=geometry)
        workload, constants = _grid(e, layer, batch, self._options.block_seq_stride)
        q, batch.cache = e.dispatch(
            kernel,
            workload,
            constants,
            [qkv, batch.rotary, batch.token_rows, batch.positions, batch.seq_lens, batch.blocks],
            [((batch.tokens, spec.num_attention_heads * spec.head_dim), "f32"), batch.cache],
        )
        return q

    def attend(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        q = self._rope_store(e, qkv, layer, batch)
        geometry = PagedAttentionGeometry(
            dtype=self._options.activations,
            kv_dtype=self._options.kv,
            has_wide_vectors=self._target.has_wide_vectors,
            **_shape(self._spec, self._options, batch),
        )
        kernel = self._render("cpu/paged_attention", "paged_attention", g=geometry)
        size = geometry.tile_tokens
        workload, constants = _grid(e, layer, batch, size)
        return e.dispatch(
            kernel,
            workload,
            constants,
            [q, *_geometry(e, batch, size), batch.seq_lens, batch.blocks, batch.cache],
            [(q.shape, self._options.activations)],
        )[0]


def _shape(spec: LlamaSpec, options: BuildOptions, batch: Batch) -> dict[str, Any]:
    return {
        "q_heads": spec.num_attention_heads,
        "kv_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "stride": options.block_seq_stride,
        "page_elements": batch.cache.shape[1],
    }


def _grid(e: Emitter, layer: int, batch: Batch, block: int) -> tuple[list[Dim], list[Dim]]:
    """Workload and constants: a workgroup takes `block` tokens where rows are whole pages, else one."""
    block = block if batch.whole_pages else 1
    constants = [batch.tokens, batch.rows, block, batch.width, batch.pages, layer]
    return [_quotient(e, batch.tokens, block)], constants


def _geometry(e: Emitter, batch: Batch, size: int) -> list[Tensor]:
    """Rows, positions and tiles of up to `size` tokens, of every token."""
    if batch.tiles is None:
        batch.tiles = attention_tiles(
            e, batch.token_rows, batch.positions, batch.starts, batch.seq_lens, size
        )
    return [batch.token_rows, batch.positions, batch.tiles]


def _quotient(e: Emitter, dividend: Dim, divisor: int) -> Dim:
    if isinstance(dividend, int):
        return dividend // divisor
    if divisor == 1:
        return dividend
    return e.value(f"arith.divui {dividend}, {e.constant(divisor)} : index")
