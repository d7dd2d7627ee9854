"""Models compiled once for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.model.spec import BuildOptions, WeightType
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.iree_local import open_local_task
from tests.builder.compiled_model import HOST, OTHERS, ROUTED, TINY, CompiledModel

WEIGHTS: tuple[WeightType, ...] = ("f32", "bf16", *(("int8",) if HOST.has_int8_dot else ()))


class CompiledModels(dict[str, CompiledModel]):
    """Models by name; a test that asks for one which this CPU cannot run is skipped."""

    def __missing__(self, name: str) -> CompiledModel:
        pytest.skip(f"this CPU does not run {name}")


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    opened = open_local_task()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def models(device: Device, tmp_path_factory: pytest.TempPathFactory) -> CompiledModels:
    """The tiny model by weight type, with K/V in the type of its activations; OTHERS and ROUTED in f32.

    And `kv-q8_0`, in f32 with K/V in bytes.
    """
    options = {
        kind: BuildOptions(
            weights=kind,
            kv="f32" if kind == "f32" else "bf16",
            prefill_batch_sizes=(1, 3),
            decode_batch_sizes=(1, 2, 4),
            chunk_sizes=(32,),
            extend_sizes=(64,),
            decode_loop_sizes=(4,),
            top_k=8,
        )
        for kind in WEIGHTS
    }
    made = {
        kind: CompiledModel.build(TINY, chosen, device, tmp_path_factory.mktemp(kind))
        for kind, chosen in options.items()
    }
    others = {
        name: CompiledModel.build(spec, options["f32"], device, tmp_path_factory.mktemp(name))
        for name, spec in {**OTHERS, "routed": ROUTED}.items()
    }
    in_bytes = replace(options["f32"], kv="q8_0")
    others["kv-q8_0"] = CompiledModel.build(TINY, in_bytes, device, tmp_path_factory.mktemp("kv-q8_0"))
    return CompiledModels(made | others)
