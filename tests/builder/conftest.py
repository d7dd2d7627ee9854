"""Models compiled once for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast, get_args

import pytest

from shortfin_apps.llm.builder.model.spec import BuildOptions, KVType, WeightType
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.iree_device import open_local_task
from tests.builder.compiled_model import HOST, TINY, CompiledModel
from tests.hip import EmulatedGpus


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    opened = open_local_task()
    yield opened
    opened.close()


class Models(dict[str, CompiledModel]):
    """The tiny model by name, compiled when it is first asked for.

    A name is a type of weights, for this CPU, or `<type>-<chip>` for an emulated AMD GPU; K/V are of the type
    of the model's activations.
    """

    def __init__(self, cpu: Device, gpus: EmulatedGpus, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._cpu = cpu
        self._gpus = gpus
        self._folders = folders

    def __missing__(self, name: str) -> CompiledModel:
        kind, _, chip = name.partition("-")
        device = self._gpus.open(chip) if chip else self._cpu
        target = resolve_target(f"hip:{chip}") if chip else HOST
        folder = self._folders.mktemp(name)
        self[name] = CompiledModel.build(TINY, _options(kind), device, folder, target)
        return self[name]

    def close(self) -> None:
        for name, model in self.items():
            if "-" in name:
                model.device.close()


def _options(kind: str) -> BuildOptions:
    assert kind in get_args(WeightType)
    return BuildOptions(
        weights=cast(WeightType, kind),
        kv=cast(KVType, kind) if kind in get_args(KVType) else "bf16",
        prefill_batch_sizes=(1, 3),
        decode_batch_sizes=(1, 2, 4),
        chunk_sizes=(32,),
        extend_sizes=(64,),
        top_k=8,
    )


@pytest.fixture(scope="session")
def models(
    device: Device, emulated_gpus: EmulatedGpus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Models]:
    made = Models(device, emulated_gpus, tmp_path_factory)
    yield made
    made.close()
