from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.sources.random_tiny import HYBRID_SPEC, LATENT_SPEC, SPEC
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError, BuildError
from shortfin_apps.llm.model.config import model_config, with_invariance
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from tests.builder.compiled_model import OTHERS
from tests.builder.specs import changed, with_blocks

LARGE = changed(
    SPEC, {"kv_heads": 8, "heads": 32, "head_dim": 128, "max_position_embeddings": 131072}, layers=32
)


def test_fields() -> None:
    config = model_config(SPEC, BuildOptions(kv="f16"))
    assert config.max_seq_len == SPEC.max_position_embeddings
    assert (config.transformer_block_count, config.attn_head_dim, config.top_k) == (2, 16, 64)
    assert config.has_prefill_position
    cache = config.paged_kv_cache
    assert cache.kv_cache_dtype == "float16"
    assert cache.paged_kv_block_size_elements_per_device == (2 * 2 * 16 * 2 * 16,)
    assert cache.device_block_count == 8 * 64 + 1
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_rows_in_bytes_have_scales_behind_their_heads_and_whole_lines_of_sixteen() -> None:
    config = model_config(SPEC, BuildOptions(kv="q8_0"))
    cache = config.paged_kv_cache
    assert (cache.kv_cache_dtype, config.attn_dtype) == ("int8", "bfloat16")
    # Two heads of 16 bytes and their scales are 40 bytes.
    assert cache.paged_kv_block_size_elements_per_device == (2 * 2 * 16 * 48,)
    assert config.token_elements == 2 * 2 * 48
    without = replace(config, paged_kv_cache=replace(cache, paged_kv_block_size_elements_per_device=None))
    assert without.page_elements == config.page_elements
    narrow, wide = (model_config(LARGE, BuildOptions(kv=kv)) for kv in ("q8_0", "bf16"))
    assert narrow.page_elements[0] / (2 * wide.page_elements[0]) == (128 + 4) / 256
    assert narrow.paged_kv_cache.device_block_count > wide.paged_kv_cache.device_block_count


def test_heads_in_bytes_are_whole_scales_long() -> None:
    with pytest.raises(BuildError, match="--kv: q8_0 needs heads in multiples of 4, not of 18"):
        model_config(changed(SPEC, {"head_dim": 18}), BuildOptions(kv="q8_0"))


def test_context_is_capped_unless_asked_for() -> None:
    assert model_config(LARGE, BuildOptions()).max_seq_len == 8192
    assert model_config(LARGE, BuildOptions(context_length=20000)).max_seq_len == 20000


@given(
    layers=st.integers(1, 80),
    heads=st.sampled_from([1, 2, 8, 32]),
    context=st.integers(128, 131072),
    asked=st.none() | st.integers(128, 131072),
)
def test_pages_hold_a_context_and_fit_a_gibibyte(
    layers: int, heads: int, context: int, asked: int | None
) -> None:
    spec = changed(LARGE, {"kv_heads": heads, "max_position_embeddings": context}, layers=layers)
    if asked is not None:
        asked = min(asked, context)
    config = model_config(spec, BuildOptions(context_length=asked))
    pages, page_bytes = config.paged_kv_cache.device_block_count, config.page_elements[0] * 2
    one_context = -(-config.max_seq_len // 16) + 1
    assert one_context <= pages <= 8 * one_context
    assert pages * page_bytes <= 1 << 30 or pages == one_context


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 2048}, "--context-length: 2048 exceeds the 1024"),
        ({"context_length": 8, "chunk_sizes": ()}, "--context-length: 8 is less than a page"),
        ({"chunk_sizes": (100,)}, "--chunk-sizes: 100 is not a multiple of the page of 16"),
        ({"chunk_sizes": (2048,)}, "--chunk-sizes: 2048 exceeds the context length of 1024"),
        ({"extend_sizes": (0,)}, "--extend-sizes: must be positive, not 0"),
        ({"decode_loop_sizes": (0,)}, "--decode-loop-sizes: must be positive, not 0"),
        ({"prefill_batch_sizes": ()}, "at least one prefill and one decode"),
        ({"decode_batch_sizes": (0, 1)}, "--decode-batch-sizes: must be positive, not 0"),
        ({"decode_batch_sizes": (1, 1)}, "--decode-batch-sizes: each size once"),
        ({"top_k": 300}, "--top-k: 300 exceeds the vocabulary of 272"),
        ({"top_k": 0}, "--top-k: must be positive"),
        ({"device_block_count": 1}, "--pages: must be at least 2"),
        ({"block_seq_stride": 0}, "--block-seq-stride: must be positive"),
        (
            {"batch_invariant": True},
            "--batch-invariant: is for AMD GPUs, .* CPUs give the same bits without it",
        ),
        ({"batch_invariant": True, "device": "cuda:sm_90"}, "--batch-invariant: is for AMD GPUs"),
    ],
)
def test_refuses_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        model_config(SPEC, BuildOptions(**options))


def test_pages_as_asked() -> None:
    config = model_config(SPEC, BuildOptions(device_block_count=7))
    assert config.paged_kv_cache.device_block_count == 7


WINDOWED = changed(
    SPEC, layers=6, at={0: {"window": 64}, 1: {"window": 64}, 3: {"window": 64}, 4: {"window": 64}}
)


def test_layers_with_a_window_have_a_slab_of_their_own() -> None:
    config = model_config(WINDOWED, BuildOptions())
    of_a_layer = 2 * 16 * SPEC.attention.kv_features
    assert tuple(WINDOWED.pools.values()) == ((2, 5), (0, 1, 3, 4))
    assert config.page_elements == (2 * of_a_layer, 4 * of_a_layer)
    assert config.window_tokens == 64
    assert [slab.pool for slab in config.slabs] == ["whole", "window"]
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_a_model_whose_layers_all_have_a_window_gives_up_pages_of_its_only_slab() -> None:
    spec = changed(WINDOWED, {"window": 64})
    config = model_config(spec, BuildOptions())
    assert tuple(spec.pools.values()) == (tuple(range(6)),)
    assert (config.window_tokens, [slab.pool for slab in config.slabs]) == (64, ["window"])
    assert not config.has_window_table
    assert ModelConfig.from_dict(config.to_dict()) == config
    whole = model_config(spec, BuildOptions(context_length=64))
    assert whole.window_tokens is None


def test_states_are_f32_in_a_slab_of_their_own() -> None:
    net = DeltaNet(key_heads=2, value_heads=4, key_dim=12, value_dim=20)
    spec = with_blocks(changed(SPEC, layers=5), {0: net, 1: net, 3: net})
    config = model_config(spec, BuildOptions(kv="bf16"))
    past, state = 3 * (12 + 12 + 20), 12 * 20  # of a value head
    of_a_layer = 2 * 16 * SPEC.attention.kv_features
    assert tuple(spec.pools.values()) == ((2, 4), (0, 1, 3))
    assert config.page_elements == (2 * of_a_layer, 2 * 3 * 4 * (past + state))
    assert (config.window_tokens, config.pools) == (2, {"whole": 2, "state": 3})
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"pools": {"whole": 0, "state": 2}},
        {"pools": {"whole": 1, "state": 2}},
        {"pools": {"state": 1, "whole": 1}},
        {"pools": {"window": 1, "state": 1}},
        {"pools": {"whole": 1, "other": 1}},
        {"pools": {"state": 2}},
        {"pools": {}},
        {"pools": ["whole", "state"]},
        {"pools": None},
        {"window_tokens": None},
    ],
)
def test_pools_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    net = DeltaNet(key_heads=2, value_heads=4, key_dim=12, value_dim=20)
    fields = model_config(with_blocks(changed(SPEC, layers=2), {0: net}), BuildOptions()).to_dict()
    fields["paged_kv_cache"] |= changes
    with pytest.raises(ArtifactError, match="pools"):
        ModelConfig.from_dict(fields)


@pytest.mark.parametrize(
    ("spec", "context"),
    [
        (SPEC, None),
        (WINDOWED, 64),  # the window sees every token
    ],
)
def test_layers_that_are_alike_share_pages(spec: ModelSpec, context: int | None) -> None:
    config = model_config(spec, BuildOptions(context_length=context))
    assert (len(config.page_elements), config.window_tokens) == (1, None)
    assert "window_tokens" not in config.to_dict()["paged_kv_cache"], "upstream does not know it"


OTHER_HEADS = OTHERS["other-heads"]  # 2 heads of 16 in a window of 37 tokens, and 1 of 32


@pytest.mark.parametrize("context", [32, 512])
def test_pools_with_other_heads_are_kept_whatever_the_context(context: int) -> None:
    """As a pool has rows of one size."""
    config = model_config(OTHER_HEADS, BuildOptions(context_length=context, kv="q8_0"))
    assert config.pools == {"whole": 1, "window": 1}
    assert (config.heads_of("whole"), config.heads_of("window")) == ((1, 32), (2, 16))
    assert config.token_elements == 2 * 48 + 2 * 48  # a row of 36 or 40 bytes in lines of 16
    assert config.token_elements * config.stride == sum(config.page_elements)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_equal_heads_are_not_listed() -> None:
    config = model_config(OTHERS["windowed"], BuildOptions())
    assert config.heads_of("window") == config.heads_of("whole")
    assert "pool_heads" not in config.to_dict()["paged_kv_cache"]


@pytest.mark.parametrize(
    "heads", [["whole"], {"state": [1, 32]}, {"whole": 1}, {"whole": [1]}, {"whole": [1, 0]}]
)
def test_heads_of_pools_are_checked(heads: object) -> None:
    raw = model_config(OTHER_HEADS, BuildOptions()).to_dict()
    raw["paged_kv_cache"]["pool_heads"] = heads
    with pytest.raises(ArtifactError, match="pool_heads"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("spec", "device", "given", "expected"),
    [
        (SPEC, "hip:gfx942", None, True),
        (SPEC, "hip:gfx1100,gfx1151", None, True),
        (SPEC, "hip:gfx1100", False, False),
        (HYBRID_SPEC, "hip:gfx1100", None, False),
        (LATENT_SPEC, "hip:gfx1100", None, False),
        (LATENT_SPEC, "hip:gfx1100", True, True),
        (SPEC, "cpu", None, None),
        (SPEC, "cuda:sm_90", None, None),
    ],
)
def test_amd_gpus_are_batch_invariant_where_it_is_cheap(
    spec: ModelSpec, device: str, given: bool | None, expected: bool | None
) -> None:
    options = with_invariance(spec, BuildOptions(device=device, batch_invariant=given))
    assert options.batch_invariant is expected
    model_config(spec, options)
