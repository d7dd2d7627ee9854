"""Artefacts, a loaded model and a server for checks, each made when a check first needs it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.file_names import MANIFEST
from shortfin_apps.llm.builder.cli import served_folder
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.page_table import make_page_cache, make_runner
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.runtime.check import check_program
from shortfin_apps.llm.components.runtime.device import CPU_NAMES, GPU_NAMES, Device, Program
from shortfin_apps.llm.components.runtime.memory import HIP, loaded_library
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.components.self_test.locate import Location, Locator
from shortfin_apps.llm.components.self_test.self_test import EntryFailure, Outcome, SelfTest
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import missing_extra
from shortfin_apps.llm.contract.gpu_code.chips import Chip
from shortfin_apps.llm.contract.host_gpu import HostGpu
from shortfin_apps.llm.contract.self_test_file import SelfTestFile
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.offline.local_model import LocalModel
from shortfin_apps.llm.offline.loop_thread import LoopThread
from shortfin_apps.llm.offline.settings import local_config
from shortfin_apps.llm.tools.qualify.facts import chip_of
from shortfin_apps.llm.tools.qualify.outcome import Skipped
from shortfin_apps.llm.tools.qualify.place import device_ids
from shortfin_apps.llm.tools.verify.run import self_test_pages

if TYPE_CHECKING:
    from shortfin_apps.llm.tools.bench.roofline.measure import Machine

T = TypeVar("T")

TINY = "random:tiny"
# Few buckets, so that a build takes seconds and an emulated GPU runs them in seconds.
_FEW = {"prefill_batch_sizes": (1,), "decode_batch_sizes": (1, 4), "extend_sizes": (64,)}
_SHORT: dict[str, Any] = {**_FEW, "context_length": 256}
FEW_PAGES = 16  # for 240 tokens: enough for any one request of a check, and too few for all


@dataclass(frozen=True, slots=True)
class Plan:
    """The subject, an artefact's directory or `random:tiny`, and the device as `build` names it."""

    subject: str
    device: str
    soak_minutes: float = 0.0

    @property
    def is_artefact(self) -> bool:
        return (Path(self.subject) / MANIFEST).exists()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A program on a device, with pages, and the results that its entries must reproduce."""

    device: Device
    program: Program
    config: ModelConfig
    runner: BatchRunner
    cache: KVCache
    file: SelfTestFile
    same_bits: bool
    kernels: tuple[str, ...]

    @classmethod
    def load(cls, artifact: Artifact, device: Device) -> LoadedModel:
        """Load an artefact's program. Raises ArtifactError, and Skipped if it has no self-test."""
        manifest, config = artifact.manifest, artifact.config
        assert manifest is not None, "a directory has one"
        if artifact.self_test is None:
            raise Skipped("the artefact has no self-test; `shortfin-llm build` adds one")
        program = device.load_program(artifact.vmfb, artifact.parameters, config.module_name)
        check_program(program, config)
        pages = self_test_pages(config)
        window_pages = 0 if config.window_tokens is None else pages
        return cls(
            device=device,
            program=program,
            config=config,
            runner=make_runner(device, program, config, pages, window_pages),
            cache=make_page_cache(config, "none", pages, window_pages),
            file=SelfTestFile.load(artifact.self_test),
            same_bits=gives_same_bits(artifact),
            kernels=manifest.program.kernels,
        )

    def self_test(self) -> Outcome:
        return SelfTest(self.runner, self.cache, self.file).run()

    def locate(self, failures: list[EntryFailure], outcome: Outcome) -> Location | None:
        locator = Locator(self.device, self.program, self.config, self.file, self.same_bits)
        return locator.locate_first(failures, outcome)


def gives_same_bits(artifact: Artifact) -> bool:
    """Whether the artefact promises a token the same bits in every schedule (docs/determinism.md)."""
    manifest = artifact.manifest
    assert manifest is not None, "a directory has one"
    return manifest.gives_same_bits


class Bench:
    """Makes what checks need, and keeps it for later checks. Callers must call `close`."""

    def __init__(
        self,
        plan: Plan,
        open_device: Callable[[str], Device] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.known_bits: dict[Any, bytes] | None = None  # of the subject's first self-test
        self._open_device = open_device
        self._clock = clock
        self._limit_s = clock()
        self._server: tuple[Path, LoopThread, LocalModel] | None = None
        self._failed: set[str] = set()

    def begin(self, limit_s: float) -> None:
        """Start a check that may take so many seconds."""
        self._limit_s = self._clock() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that the current check may still take."""
        return max(0.0, self._limit_s - self._clock())

    @property
    def chip(self) -> Chip | None:
        return chip_of(self.plan.device)

    @property
    def kind(self) -> str:
        """The device's kind, as `serve --device` takes it."""
        return self.plan.device.partition(":")[0]

    @property
    def is_on_gpu(self) -> bool:
        return self.kind not in CPU_NAMES

    @property
    def is_emulated(self) -> bool:
        """Whether the GPU is emulated_gpu's, which has no clock. The device must be open."""
        library = loaded_library(HIP) if GPU_NAMES.get(self.kind) == "hip" else None
        return library is not None and hasattr(library, "emulated_gpu_report")

    @cached_property
    def artifact(self) -> Artifact:
        """The artefact to qualify; `random:tiny` is built now."""
        if self.plan.subject != TINY:
            chip = self.plan.device.partition(":")[2]
            host = HostGpu(GPU_NAMES[self.kind], chip) if chip and self.is_on_gpu else None
            return self._made("the artefact", lambda: Artifact.open(Path(self.plan.subject), host=host))
        return self._tiny(self.plan.device, **_FEW, context_length=1024)

    @cached_property
    def exact(self) -> Artifact:
        """`random:tiny` for the device in f32, where rounding seldom chooses another token."""
        return self._tiny(self.plan.device, **_SHORT, weights="f32", kv="f32")

    @cached_property
    def invariant(self) -> Artifact:
        """`random:tiny` for the device, with the same bits in all schedules where the device can do that.

        In bf16: without matrix instructions, as of RDNA in f32, entries add in other orders.
        """
        is_amd = GPU_NAMES.get(self.kind) == "hip"
        return self._tiny(self.plan.device, **_SHORT, batch_invariant=is_amd)

    @cached_property
    def exact_on_cpu(self) -> Artifact:
        """The same model for this CPU."""
        return self._tiny("cpu", **_SHORT, weights="f32", kv="f32")

    @cached_property
    def device(self) -> Device:
        def opened() -> Device:
            if self._open_device is not None:
                return self._open_device(self.kind)
            return open_device(self.kind, device_ids=device_ids(self.plan.device))

        return self._made("the device", opened)

    @cached_property
    def model(self) -> LoadedModel:
        """The subject, loaded once. `reload` loads it again."""
        return self.reload()

    @cached_property
    def exact_model(self) -> LoadedModel:
        return LoadedModel.load(self.exact, self.device)

    @cached_property
    def machine(self) -> Machine:
        """Probes of bandwidth and matmul speed, compiled for the device."""
        require_compiler()
        from shortfin_apps.llm.tools.bench.roofline.measure import load_machine  # imports the compiler

        manifest = self.artifact.manifest
        assert manifest is not None, "a directory has one"
        return load_machine(self.device, manifest.spec, manifest.options)

    def reload(self) -> LoadedModel:
        """Load the subject's parameters into new memory of the device."""
        return LoadedModel.load(self.artifact, self.device)

    def server(self, artifact: Artifact, **settings: Any) -> tuple[LoopThread, LocalModel]:
        """Return a running server of `artifact`, without a port, and its event loop's thread.

        There is one at a time; that of another artefact is stopped first.
        """
        folder = artifact.vmfb.parent
        if self._server is not None and self._server[0] == folder:
            return self._server[1:]
        self.stop_server()
        assert self.device is not None  # opened, or the check is skipped
        ids = device_ids(self.plan.device)
        given = {"device": self.kind, "dump_dir": "off", "self_test": "off", **settings}
        given |= {"device_ids": ids} if ids else {}
        model = LocalModel.load(local_config(folder, given, lambda note: None))
        thread = LoopThread(model.running)
        self._server = folder, thread, model
        return thread, model

    def stop_server(self) -> None:
        if self._server is not None:
            thread, self._server = self._server[1], None
            thread.stop()

    def forget_model(self) -> None:
        """Free the subject's memory on the device, for a server that loads it itself."""
        vars(self).pop("model", None)
        gc.collect()

    def close(self) -> None:
        self.stop_server()
        for name in ("model", "exact_model", "machine"):
            vars(self).pop(name, None)
        if "device" in vars(self):
            with suppress(Exception):  # a device that failed cannot be closed
                self.device.close()

    def _tiny(self, device: str, **options: Any) -> Artifact:
        chosen = BuildOptions.for_device(device, **options)
        return self._made(f"{TINY} in {chosen.weights} for {device}", lambda: _built(TINY, chosen))

    def _made(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` returns. Its error fails one check; checks that need the same are skipped."""
        if name in self._failed:
            raise Skipped(f"needs {name}, which failed above")
        try:
            return make()
        except Skipped:
            raise
        except Exception:
            self._failed.add(name)
            raise


def require_compiler() -> None:
    if find_spec("iree.compiler") is None:
        raise Skipped("needs IREE's compiler: run `pip install 'shortfin-llm[build]'`")


def _built(source: str, options: BuildOptions) -> Artifact:
    """Return the artefact from the cache, built now unless it is there. Raises BuildError and Skipped."""
    folder = served_folder(source, [options], False)
    if find_spec("iree.compiler") is None and (folder / MANIFEST).exists():
        return Artifact.open(folder)  # of a cache that was copied here
    require_compiler()
    try:
        from shortfin_apps.llm.builder.builder import build  # imports the compiler

        return build(source, folder, options, QuietProgress())
    except ModuleNotFoundError as error:
        if (needed := missing_extra(error)) is None:
            raise
        raise Skipped(needed) from error
