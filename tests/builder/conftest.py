"""Models compiled once for the whole session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.iree_local import open_local_task
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType
from tests.builder.compiled_model import HOST, OTHERS, ROUTED, TINY, CompiledModel

Recipe = tuple[ModelSpec, BuildOptions, Target]

WEIGHTS: tuple[WeightType, ...] = ("f32", "bf16", *(("int8",) if HOST.has_int8_dot else ()))
OPTIONS: dict[str, BuildOptions] = {
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
# The tiny model by weight type, with K/V in the type of its activations; OTHERS and ROUTED in f32; and
# `kv-q8_0`, in f32 with K/V in bytes.
MODELS: dict[str, Recipe] = {
    **{kind: (TINY, options, HOST) for kind, options in OPTIONS.items()},
    **{name: (spec, OPTIONS["f32"], HOST) for name, spec in {**OTHERS, "routed": ROUTED}.items()},
    "kv-q8_0": (TINY, replace(OPTIONS["f32"], kv="q8_0"), HOST),
}


class CompiledModels(Mapping[str, CompiledModel]):
    """Models by name, each compiled when it is first asked for.

    A test that asks for one which this CPU cannot run is skipped.
    """

    def __init__(
        self, recipes: Mapping[str, Recipe], device: Device, factory: pytest.TempPathFactory
    ) -> None:
        self._recipes, self._device, self._factory = recipes, device, factory
        self._made: dict[str, CompiledModel] = {}

    def __getitem__(self, name: str) -> CompiledModel:
        if name not in self._made:
            if name not in self._recipes:
                pytest.skip(f"this CPU does not run {name}")
            spec, options, target = self._recipes[name]
            folder = self._factory.mktemp(name)
            self._made[name] = CompiledModel.build(spec, options, self._device, folder, target)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    opened = open_local_task()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def models(device: Device, tmp_path_factory: pytest.TempPathFactory) -> CompiledModels:
    """MODELS."""
    return CompiledModels(MODELS, device, tmp_path_factory)
