from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.contract.config import ModelConfig, PagedKVCacheConfig
from shortfin_apps.llm.contract.errors import ArtifactError

Fields = dict[str, Any]
OPENERS: list[Callable[[Path], Artifact]] = [
    Artifact.open,
    lambda folder: Artifact.from_files(
        vmfb=folder / file_names.VMFB,
        parameters=(folder / file_names.PARAMETERS,),
        model_config=folder / file_names.CONFIG,
        tokenizer_json=folder / file_names.TOKENIZER,
    ),
]
opened = pytest.mark.parametrize("open_files", OPENERS, ids=["directory", "loose files"])


@pytest.fixture
def folder(tiny_artifact: Artifact, tmp_path: Path) -> Path:
    """A copy of an artefact that a test may change."""
    copy = tmp_path / "artefact"
    shutil.copytree(tiny_artifact.vmfb.parent, copy)
    for path in copy.iterdir():
        path.chmod(0o644)
    return copy


def edit(folder: Path, change: Callable[[Fields, Fields], None]) -> None:
    path = folder / file_names.CONFIG
    config = json.loads(path.read_text())
    change(config, config["paged_kv_cache"])
    path.write_text(json.dumps(config))


def raise_context(config: Fields, cache: Fields) -> None:
    config["max_seq_len"] *= 2


def narrow_window(config: Fields, cache: Fields) -> None:
    cache |= {"window_tokens": 16, "pools": {"window": config["transformer_block_count"]}}


def keep_states(config: Fields, cache: Fields) -> None:
    elements = cache["paged_kv_block_size_elements_per_device"][0]
    cache |= {"window_tokens": 2, "pools": {"whole": config["transformer_block_count"] - 1, "state": 1}}
    cache["paged_kv_block_size_elements_per_device"] = [elements // 2, elements // 2]


def longer_pages_of_fewer_blocks(config: Fields, cache: Fields) -> None:
    cache["block_seq_stride"] *= 2
    config["transformer_block_count"] //= 2


def more_heads_of_fewer_elements(config: Fields, cache: Fields) -> None:
    cache["attention_head_count_kv"] *= 2
    config["attn_head_dim"] //= 2


def two_slabs(config: Fields, cache: Fields) -> None:
    cache["paged_kv_block_size_elements_per_device"] *= 2


EDITS: list[tuple[Callable[[Fields, Fields], object], str]] = [
    (raise_context, "max_seq_len"),
    (narrow_window, "paged_kv_cache.window_tokens"),
    (keep_states, "paged_kv_cache.paged_kv_block_size_elements_per_device"),
    (longer_pages_of_fewer_blocks, "transformer_block_count"),
    (more_heads_of_fewer_elements, "attn_head_dim"),
    (two_slabs, "paged_kv_cache.paged_kv_block_size_elements_per_device"),
    (lambda config, cache: cache.update(kv_cache_dtype="float16"), "paged_kv_cache.kv_cache_dtype"),
    (lambda config, cache: config["prefill_batch_sizes"].append(3), "prefill_batch_sizes"),
    (lambda config, cache: config["decode_batch_sizes"].append(512), "decode_batch_sizes"),
    (lambda config, cache: cache.update(pool_heads={"whole": [1, 32]}), "paged_kv_cache.pool_heads"),
    (lambda config, cache: cache.update(values_in_keys=True), "paged_kv_cache.values_in_keys"),
    (lambda config, cache: config.update(has_prefill_position=False), "has_prefill_position"),
    (lambda config, cache: config.pop("has_prefill_position"), "has_prefill_position"),
    (lambda config, cache: config.update(module_name="other\x1b"), "module_name"),
    (lambda config, cache: config.update(logits_normalization="log_softmax"), "logits_normalization"),
    (lambda config, cache: config.update(attn_dtype="float32"), "attn_dtype"),
    (lambda config, cache: config.update(top_k=None), "top_k"),
    (lambda config, cache: config.update(top_k=8), "top_k"),
]


@opened
@pytest.mark.parametrize(("change", "name"), EDITS, ids=[name for _, name in EDITS])
def test_a_field_that_the_program_was_not_compiled_for_is_refused(
    folder: Path,
    change: Callable[[Fields, Fields], None],
    name: str,
    open_files: Callable[[Path], Artifact],
) -> None:
    edit(folder, change)
    with pytest.raises(ArtifactError, match=rf"config\.json: `{name}` is .*compiled for") as refused:
        open_files(folder)
    assert "\x1b" not in str(refused.value)


def test_every_field_is_compared() -> None:
    names = {name.rpartition(".")[2] for _, name in EDITS}
    together = {"block_seq_stride", "attention_head_count_kv", "pools"}  # edited with another
    free = {"device_block_count", "module_abi_version", "paged_kv_cache"}  # the second has one value
    fields = [*dataclasses.fields(ModelConfig), *dataclasses.fields(PagedKVCacheConfig)]
    assert {field.name for field in fields} == names | together | free


@opened
def test_fewer_tokens_sizes_and_pages_are_served(
    folder: Path, open_files: Callable[[Path], Artifact]
) -> None:
    def lower(config: Fields, cache: Fields) -> None:
        config |= {"max_seq_len": 64, "prefill_batch_sizes": [1], "decode_batch_sizes": [8, 4]}
        cache["device_block_count"] = 77
        del cache["paged_kv_block_size_elements_per_device"]

    edit(folder, lower)
    assert open_files(folder).config.max_seq_len == 64


@opened
def test_the_config_that_the_build_wrote_is_read_whatever_this_version_would_write(
    folder: Path, open_files: Callable[[Path], Artifact]
) -> None:
    """Defaults may differ between versions."""
    path = folder / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["all_options"][0]["context_length"] = 64
    path.write_text(json.dumps(manifest))
    assert open_files(folder).config.max_seq_len > 64
    edit(folder, lambda config, cache: None)
    with pytest.raises(ArtifactError, match="max_seq_len"):
        open_files(folder)


def test_options_of_no_build_are_refused(folder: Path) -> None:
    edit(folder, lambda config, cache: None)
    path = folder / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["all_options"][0]["top_k"] = 0
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"config\.json: the manifest's options.*--top-k"):
        Artifact.open(folder)


@pytest.mark.parametrize(("name", "value"), [("kv_heads", 0), ("head_dim", 0)])
def test_a_manifest_of_sizes_that_no_build_has_is_an_error(folder: Path, name: str, value: int) -> None:
    edit(folder, raise_context)
    path = folder / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    for mixer, _ in manifest["spec"]["layers"]:
        mixer[name] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError):
        Artifact.open(folder)
