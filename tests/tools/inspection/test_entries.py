"""Entries: their types, and which kernels one invocation launches."""

from __future__ import annotations

import numpy as np
import pytest

from shortfin_apps.llm.components.invocation.invoker import Invoker, owned_bytes
from shortfin_apps.llm.components.runtime.bytecode import Call
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.tools.inspection.entries import (
    EntryFacts,
    dispatched_kernels,
    read_entries,
    read_signatures,
)
from shortfin_apps.llm.tools.inspection.kernels import read_kernels
from shortfin_apps.llm.tools.inspection.subject import open_directory
from tests.conftest import BuildTiny
from tests.hip import CHIPS, EmulatedGpus
from tests.matrices import slow_but
from tests.runtimes import needs_shortfin

# An invocation of one request's first tokens: each argument before the cache.
INVOCATIONS = {
    "decode_bs1": ([[5]], [1], [0], [[1, 2]]),
    "prefill_bs1": ([[5, 6, 7]], [0], [3], [[1, 2]]),
    "extend": ([5, 6, -1], [0], [0], [3], [[1, 2]], [7]),
}


def entries_of(build_tiny: BuildTiny, device: str) -> dict[str, EntryFacts]:
    subject = open_directory(build_tiny(BuildOptions(device=device)).vmfb.parent)
    return {entry.name: entry for entry in read_entries(subject, read_kernels(subject.vmfb))}


@pytest.mark.parametrize("device", slow_but(["cpu"], ["cpu", "hip:gfx942"]))
def test_entries_with_sizes_and_types(build_tiny: BuildTiny, device: str) -> None:
    entries = entries_of(build_tiny, device)
    sizes = (1, 2, 4, 8, 16, 32)
    assert list(entries) == [
        *([f"adjusted_sample_bs{rows}" for rows in sizes] if device != "cpu" else []),
        *(f"decode_bs{rows}" for rows in sizes),
        *([f"decode_loop_bs{rows}" for rows in sizes] if device != "cpu" else []),
        "extend",
        *([f"logprobs_bs{rows}" for rows in sizes] if device != "cpu" else []),
        *("prefill_bs1", "prefill_bs2", "prefill_bs4"),
        *([f"sample_bs{rows}" for rows in sizes] if device != "cpu" else []),
    ]
    decode = entries["decode_bs4"]
    assert (decode.family, decode.rows, decode.length) == ("decode", 4, 1)
    assert decode.arguments == {
        "tokens": "tensor<4x1xi64>",
        "seq_lens": "tensor<4xi64>",
        "start_positions": "tensor<4xi64>",
        "seq_block_ids": "tensor<4x?xi64>",
        "cache": "tensor<?x2048xbf16>",
    }
    assert decode.results is not None
    assert decode.results["indices"] == "tensor<4x1x64xi64>"
    assert (entries["extend"].rows, entries["extend"].length) == (None, None)
    assert (entries["prefill_bs2"].rows, entries["prefill_bs2"].length) == (2, None)
    classes = {name: entry.entry_class for name, entry in entries.items() if "logprobs" not in name}
    assert {name for name, each in classes.items() if each == "dynamic"} == {
        *("extend", "prefill_bs1", "prefill_bs2", "prefill_bs4")
    }
    assert {each for name, each in classes.items() if name.startswith("decode")} == {"static"}


@pytest.mark.parametrize("device", ["cpu", "hip:gfx942"])
def test_memory_of_an_entry_is_what_the_server_allocates_for_it(build_tiny: BuildTiny, device: str) -> None:
    options = BuildOptions(device=device, decode_batch_sizes=(2, 4), extend_sizes=(16,))
    subject = open_directory(build_tiny(options).vmfb.parent)
    entries = {entry.name: entry for entry in read_entries(subject, None)}
    values_and_indices, logits = 64 * (4 + 8), 272 * 4
    assert entries["decode_bs4"].result_bytes == 4 * (values_and_indices + logits)
    assert entries["extend"].result_bytes is entries["extend"].workspace_bytes is None
    workspaces = [entries[name].workspace_bytes for name in ("decode_bs2", "decode_bs4", "extend_t16")]
    kept = owned_bytes(read_signatures(subject))
    if device == "cpu":  # its temporaries depend on the contexts
        assert workspaces == [None] * 3
        assert kept == 0
    else:
        sizes = [size or 0 for size in workspaces]
        assert min(sizes) > 0
        assert kept > max(sizes)


def test_a_decode_loop_returns_token_ids_and_what_a_decode_returns(build_tiny: BuildTiny) -> None:
    options = BuildOptions(prefill_batch_sizes=(1,), decode_batch_sizes=(4,), decode_loop_sizes=(4,))
    subject = open_directory(build_tiny(options).vmfb.parent)
    entries = {entry.name: entry for entry in read_entries(subject, None)}
    loop, decode = entries["decode_loop_bs4"], entries["decode_bs4"]
    assert decode.results is not None
    assert loop.results == {"token_ids": "tensor<4xi64>", **decode.results}
    assert loop.arguments == {
        **dict.fromkeys(("tokens", "slots", "positions"), "tensor<4xi64>"),
        "seq_block_ids": "tensor<4x?xi64>",
        "sampling": "tensor<6x4xi64>",
        "last_tokens": "tensor<?xi64>",
        "cache": "tensor<?x2048xbf16>",
    }


@needs_shortfin
@pytest.mark.timeout(300)
@pytest.mark.emulated
@pytest.mark.parametrize("chip", CHIPS)
def test_launches_are_those_that_a_gpu_counts(
    build_tiny: BuildTiny, emulated_gpus: EmulatedGpus, chip: str
) -> None:
    artifact = build_tiny(BuildOptions(device=f"hip:{chip}"))
    entries = entries_of(build_tiny, f"hip:{chip}")
    gpu = emulated_gpus.open(chip)
    try:
        program = gpu.load_program(artifact.vmfb, artifact.parameters, artifact.config.module_name)
        cache = gpu.allocate((4, *artifact.config.page_elements), artifact.config.paged_kv_cache.dtype)
        invoker = Invoker(gpu, program)
        for name, arguments in INVOCATIONS.items():
            uploaded = [gpu.upload(np.array(argument, np.int64)) for argument in arguments]
            invoker.submit(name, [*uploaded, cache]).wait()  # the first allocates its results
            emulated_gpus.control.clear_report()
            invoker.submit(name, [*uploaded, cache]).wait()
            counted = emulated_gpus.control.report().kernels
            assert {kernel: each.launches for kernel, each in counted.items()} == entries[name].launches
    finally:
        gpu.close()


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
def test_launches_are_of_the_entries_own_kernels(build_tiny: BuildTiny, chip: str) -> None:
    """IREE names a kernel by the entry that it was made for; equal ones of other entries are dropped."""
    code = read_kernels(build_tiny(BuildOptions(device=f"hip:{chip}")).vmfb)
    assert code is not None
    entries = entries_of(build_tiny, f"hip:{chip}")
    for kernel in code.kernels:
        made_for = kernel.name.partition("$async_dispatch_")[0]
        if made_for in entries:  # the rest runs once, when the program is loaded
            launches = entries[made_for].launches
            assert launches is not None
            assert kernel.name in launches
    for entry in entries.values():
        assert entry.launches is not None
        assert sum(entry.launches.values()) == entry.num_dispatches


def test_a_program_for_a_cpu_counts_dispatches_without_kernels(build_tiny: BuildTiny) -> None:
    for entry in entries_of(build_tiny, "cpu").values():
        assert entry.num_dispatches is not None
        assert entry.num_dispatches > 2  # it has two layers
        assert entry.launches is None


def test_dispatches_are_found_among_other_calls() -> None:
    nothing = (None,) * 7
    loaded = (None, 4, *nothing[2:])
    calls = [
        Call("hal.command_buffer.create", (None, 1, 2, 0, 0), nothing[:5]),
        Call("hal.command_buffer.dispatch", (None, None, 3, 8, 1, 1, 0), loaded),
        Call("hal.command_buffer.execution_barrier", (None, 0, 0, 0), nothing[:4]),
        Call("hal.command_buffer.dispatch.indirect", (None, None, 5, 0, None, None, 0), loaded),
        Call("hal.command_buffer.dispatch", (None, None, None, 8, 1, 1, 0), nothing),
    ]
    assert dispatched_kernels(calls) == ((4, 3), (4, 5), (None, None))
