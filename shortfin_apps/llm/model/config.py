"""Create the artefact's `config.json` from the model and the build's options."""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.contract.config import SCALE_BYTES, ModelConfig, PagedKVCacheConfig, Pool
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.kv_layout import KV_DTYPE_NAMES, KeysValues, kv_dtype
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

DEFAULT_CONTEXT_LENGTH = 8192
DEFAULT_CONTEXTS = 8  # sequences of maximum length that the pages hold
DEFAULT_SLAB_BYTES = 1 << 30


def model_config(spec: ModelSpec, options: BuildOptions) -> ModelConfig:
    """Create the config. Raises BuildError, naming the flag, if an option does not fit the model."""
    _check_sizes(options)
    dims = [layout.head_dim for _, layout in spec.kv_layouts if isinstance(layout, KeysValues)]
    if options.kv == "q8_0" and (odd := [dim for dim in dims if dim % SCALE_BYTES]):
        raise BuildError(f"--kv: q8_0 needs heads in multiples of {SCALE_BYTES}, not of {odd[0]}")
    _check_batch_invariant(spec, options)
    max_seq_len = context_length(spec, options)
    if too_long := [size for size in options.chunk_sizes if size > max_seq_len]:
        raise BuildError(f"--chunk-sizes: {too_long[0]} exceeds the context length of {max_seq_len} tokens")
    if options.top_k > spec.vocab_size:
        raise BuildError(f"--top-k: {options.top_k} exceeds the vocabulary of {spec.vocab_size} tokens")
    spec = within(spec, max_seq_len)
    elements = pool_elements(spec, options)
    # Pages of states are not counted here: the server chooses their number.
    of_tokens = sum(count for pool, count in elements.items() if pool != "state")
    stored, heads = spec.keys_values, pool_heads(spec)
    return ModelConfig(
        max_seq_len=max_seq_len,
        transformer_block_count=len(spec.kv_layouts),
        attn_head_dim=stored.head_dim,
        prefill_batch_sizes=options.prefill_batch_sizes,
        decode_batch_sizes=options.decode_batch_sizes,
        has_prefill_position=True,
        attn_dtype=KV_DTYPE_NAMES[options.query_dtype],
        top_k=options.top_k,
        paged_kv_cache=PagedKVCacheConfig(
            attention_head_count_kv=stored.kv_heads,
            block_seq_stride=options.block_seq_stride,
            device_block_count=_page_count(options, max_seq_len, of_tokens),
            kv_cache_dtype=KV_DTYPE_NAMES[options.kv],
            paged_kv_block_size_elements_per_device=tuple(elements.values()),
            window_tokens=window_of(spec),
            pools=None if elements.keys() == {"whole"} else {p: len(its) for p, its in spec.pools.items()},
            pool_heads=heads if len(set(heads.values())) > 1 else None,
            values_in_keys=stored.planes(options.stores_values) == 1 or None,
        ),
    )


def with_invariance(spec: ModelSpec, options: BuildOptions) -> BuildOptions:
    """Return the options with the default of `batch_invariant` on AMD GPUs; on other devices unchanged.

    It is on where it was counted to cost less than 5 % of a prefill (docs/determinism.md): for latent
    attention the matmuls by head get smaller tiles, and a state cannot have it.
    """
    if options.batch_invariant is not None or not options.device.startswith("hip"):
        return options
    is_latent = any(isinstance(block, LatentAttention) for layer in spec.all_layers for block in layer)
    return replace(options, batch_invariant=not is_latent and "state" not in spec.pools)


def _check_batch_invariant(spec: ModelSpec, options: BuildOptions) -> None:
    if not options.batch_invariant:
        return
    if not options.device.startswith("hip"):
        why = (
            "CPUs give the same bits without it"
            if options.device.startswith("cpu")
            else "see docs/determinism.md"
        )
        raise BuildError(f"--batch-invariant: is for AMD GPUs, as in --device hip:gfx942; {why}")
    if "state" in spec.pools:
        raise BuildError(
            "--batch-invariant: layers with a state compute a prompt in another order than a decode"
        )


def _check_sizes(options: BuildOptions) -> None:
    stride = options.block_seq_stride
    _require_positive("--block-seq-stride", (stride,))
    _require_positive("--top-k", (options.top_k,))
    _require_positive("--prefill-batch-sizes", options.prefill_batch_sizes)
    _require_positive("--decode-batch-sizes", options.decode_batch_sizes)
    if not options.prefill_batch_sizes or not options.decode_batch_sizes:
        raise BuildError("at least one prefill and one decode batch size are needed")
    _require_positive("--chunk-sizes", options.chunk_sizes)
    _require_positive("--extend-sizes", options.extend_sizes)
    _require_positive("--decode-loop-sizes", options.loop_sizes)
    if odd := [size for size in options.chunk_sizes if size % stride]:
        raise BuildError(f"--chunk-sizes: {odd[0]} is not a multiple of the page of {stride} tokens")
    if options.device_block_count is not None and options.device_block_count < 2:
        raise BuildError("--pages: must be at least 2, as the first page is scratch")


def _require_positive(flag: str, values: tuple[int, ...]) -> None:
    if any(value < 1 for value in values):
        raise BuildError(f"{flag}: must be positive, not {min(values)}")
    if len(set(values)) != len(values):
        raise BuildError(f"{flag}: each size once, please")


def context_length(spec: ModelSpec, options: BuildOptions) -> int:
    """Return the maximum number of tokens of a sequence.

    Raises BuildError, naming the flag, if the requested context exceeds the model's or is less than a page.
    """
    own, asked, stride = spec.max_position_embeddings, options.context_length, options.block_seq_stride
    if asked is not None and asked > own:
        raise BuildError(f"--context-length: {asked} exceeds the {own} tokens that {spec.name} was made for")
    length = min(own, DEFAULT_CONTEXT_LENGTH) if asked is None else asked
    if length < stride:
        raise BuildError(f"--context-length: {length} is less than a page of {stride} tokens")
    return length


def within(spec: ModelSpec, context: int) -> ModelSpec:
    """Return the model for sequences of at most `context` tokens: without windows of at least this size.

    If layers with and without a window differ in heads, windows stay, as a pool has rows of one size.
    """
    if len(set(pool_heads(spec).values())) > 1:
        return spec
    layers = tuple(tuple(block.within(context) for block in layer) for layer in spec.layers)
    draft = None if spec.draft is None else spec.draft.within(context)
    return replace(spec, layers=layers, draft=draft)


def pool_heads(spec: ModelSpec) -> dict[Pool, tuple[int, int]]:
    """Return the number of K/V heads, and their size, in each pool of keys and values."""
    layouts = (layout for _, layout in spec.kv_layouts if isinstance(layout, KeysValues))
    return {layout.pool: (layout.kv_heads, layout.head_dim) for layout in layouts}


def pool_planes(spec: ModelSpec, pool: Pool, options: BuildOptions) -> int:
    """Return the cache rows per token and layer in a pool; for states, which have no rows, 2."""
    layouts = (layout for _, layout in spec.kv_layouts if layout.pool == pool)
    kept = (layout for layout in layouts if isinstance(layout, KeysValues))
    return next((layout.planes(options.stores_values) for layout in kept), 2)


def window_of(spec: ModelSpec) -> int | None:
    """Return the size of the largest window (a state counts as 2); None if no layer has either."""
    windows = {layout.window for _, layout in spec.kv_layouts} - {None}
    return max((window for window in windows if window is not None), default=None)


def pool_elements(spec: ModelSpec, options: BuildOptions) -> dict[Pool, int]:
    """Return the number of elements of one page, for each pool of the model."""
    elements = dict.fromkeys(spec.pools, 0)
    for _, layout in spec.kv_layouts:
        elements[layout.pool] += layout.page_elements(
            options.kv, options.block_seq_stride, options.stores_values
        )
    return elements


def _page_count(options: BuildOptions, max_seq_len: int, elements: int) -> int:
    """Return the number of pages, including the scratch page; `elements`: cache elements of one page.

    By default: enough for 8 sequences of maximum length, at most 1 GiB, but at least enough for one sequence.
    """
    if options.device_block_count is not None:
        return options.device_block_count
    context_pages = -(-max_seq_len // options.block_seq_stride)
    most = DEFAULT_SLAB_BYTES // (elements * kv_dtype(options.kv).itemsize)
    return max(context_pages + 1, min(DEFAULT_CONTEXTS * context_pages + 1, most))
