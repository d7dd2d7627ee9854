"""The JSON files of upstream's server: the model config of its exporter, and server settings."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.server.config import ServerConfig, ServerConfigError
from shortfin_apps.llm.serving.server.flags import add_arguments, from_arguments

EXPORTED: dict[str, Any] = {  # as upstream's exporter writes it for a toy Llama
    "module_name": "module",
    "module_abi_version": 1,
    "max_seq_len": 128,
    "attn_head_dim": 32,
    "prefill_batch_sizes": [1, 4],
    "has_prefill_position": False,
    "decode_batch_sizes": [4, 8],
    "transformer_block_count": 3,
    "logits_normalization": "none",
    "top_k": None,
    "paged_kv_cache": {
        "attention_head_count_kv": 4,
        "block_seq_stride": 16,
        "device_block_count": 64,
        "kv_cache_dtype": "float16",
        "paged_kv_block_size_elements_per_device": [12288],
    },
}
OPTIONAL = ("module_name", "module_abi_version", "has_prefill_position", "logits_normalization", "top_k")
REQUIRED = sorted(EXPORTED.keys() - set(OPTIONAL) - {"paged_kv_cache"})
SLABS = "paged_kv_block_size_elements_per_device"
SERVER: dict[str, Any] = {  # every field of upstream's ServerParams, at its default
    "prefix_sharing_algorithm": "none",
    "program_isolation": "per_call",
    "decode_config": None,
    "use_native_impls": False,
    "chunk_block_size": None,
    "device_ids": [],
    "amdgpu_async_allocations": False,
    "amdgpu_async_caching": False,
    "amdgpu_allocators": None,
    "amdgpu_allow_device_reuse": False,
}


def changed(path: str, value: object) -> dict[str, Any]:
    """EXPORTED with one field changed; `paged_kv_cache.NAME` is a field of the cache."""
    raw = copy.deepcopy(EXPORTED)
    *outer, name = path.split(".")
    (raw[outer[0]] if outer else raw)[name] = value
    return raw


def without(path: str) -> dict[str, Any]:
    raw = copy.deepcopy(EXPORTED)
    *outer, name = path.split(".")
    del (raw[outer[0]] if outer else raw)[name]
    return raw


def serve(tmp_path: Path, settings: object, *argv: str) -> ServerConfig:
    path = tmp_path / "server_config.json"
    path.write_text(json.dumps(settings))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(["DIR", "--server_config", str(path), *argv]))


def test_the_exported_config_survives_a_round_trip() -> None:
    config = ModelConfig.from_dict(EXPORTED)
    assert (config.stride, config.page_elements, config.top_k) == (16, (12288,), None)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_dict().keys() - {"attn_dtype"} == EXPORTED.keys()


@pytest.mark.parametrize("field", [*OPTIONAL, f"paged_kv_cache.{SLABS}"])
def test_an_optional_field_may_be_null_or_absent(field: str) -> None:
    """Without sizes there is one slab, and a page has layers x (K, V) x heads x stride x dim elements."""
    assert ModelConfig.from_dict(without(field)) == ModelConfig.from_dict(changed(field, None))
    assert ModelConfig.from_dict(without(field)).page_elements == (3 * 2 * 4 * 16 * 32,)


def test_unknown_fields_are_ignored_in_the_cache_and_refused_elsewhere() -> None:
    assert ModelConfig.from_dict(changed("paged_kv_cache.x", 1)) == ModelConfig.from_dict(EXPORTED)
    with pytest.raises(ArtifactError, match="'x'"):
        ModelConfig.from_dict(changed("x", 1))


def test_a_slab_for_each_pipeline_stage() -> None:
    config = ModelConfig.from_dict(changed(f"paged_kv_cache.{SLABS}", [8192, 4096]))
    assert config.page_elements == (8192, 4096)


@pytest.mark.parametrize("field", [*REQUIRED, "paged_kv_cache", "paged_kv_cache.kv_cache_dtype"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ArtifactError, match=f"`{field}` is missing"):
        ModelConfig.from_dict(without(field))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 0),
        ("max_seq_len", "128"),
        ("prefill_batch_sizes", 4),
        ("decode_batch_sizes", []),
        ("has_prefill_position", "yes"),
        ("module_name", 5),
        ("module_abi_version", 2),
        ("logits_normalization", "sigmoid"),
        ("paged_kv_cache.kv_cache_dtype", "f16"),
        ("paged_kv_cache.block_seq_stride", 0),
        ("paged_kv_cache.window_tokens", 0),
        (f"paged_kv_cache.{SLABS}", []),
        (f"paged_kv_cache.{SLABS}", [1.5]),
        (f"paged_kv_cache.{SLABS}", "12288"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ArtifactError, match=field.rpartition(".")[2]):
        ModelConfig.from_dict(changed(field, value))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from([*EXPORTED, *(f"paged_kv_cache.{name}" for name in EXPORTED["paged_kv_cache"])])


@given(field=fields, value=json_values)
def test_any_other_value_loads_or_is_refused(field: str, value: object) -> None:
    try:
        config = ModelConfig.from_dict(changed(field, value))
    except ArtifactError:
        return
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_every_setting_of_upstreams_server_config_is_accepted(tmp_path: Path) -> None:
    config = serve(tmp_path, SERVER)
    assert (config.engine.prefix_cache, config.engine.device_ids) == ("none", ())


def test_null_keeps_the_default_of_a_setting(tmp_path: Path) -> None:
    assert serve(tmp_path, dict.fromkeys(SERVER)) == serve(tmp_path, {})


def test_a_flag_wins_over_upstreams_file(tmp_path: Path) -> None:
    settings = {**SERVER, "device_ids": ["0", "1"], "chunk_block_size": 2}
    config = serve(tmp_path, settings, "--chunk_block_size=3", "--prefix_sharing_algorithm=trie")
    assert (config.engine.prefix_cache, config.engine.device_ids) == ("trie", ("0", "1"))


def test_an_unknown_setting_is_refused_as_upstream_does(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError, match="`batch_size`"):
        serve(tmp_path, {**SERVER, "batch_size": 4})
