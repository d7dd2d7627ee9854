"""Replays on fake devices of what an engine on another one did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.static_threshold import with_static_threshold
from shortfin_apps.llm.components.recorder.dump_file import Dump, read_dump, write_dump
from shortfin_apps.llm.components.recorder.flight_recorder import Recording
from shortfin_apps.llm.components.recorder.records import FORMAT_VERSION, Header
from shortfin_apps.llm.tools.dump_replay.replay import Replay
from tests.components.engine_fixture import Rig
from tests.components.fake_device import FakeDevice, FakeProgram, Faults, known, page_table_of

# A replay keeps no tables by slot: its edits have the counts. Others are results of the batch before.
NOT_COMPARED = {
    *("cache", "window_cache", "values", "indices", "logits"),
    *("last_tokens", "slots", "counts", "resets", "edits"),
}
Executed = list[tuple[str, dict[str, Any]]]  # entries with their arguments, but for slabs and results


def executed_by(program: FakeProgram) -> Executed:
    """What the program executes from now on, with the tokens that the token table has at that time."""
    executed: Executed = []
    run = program._run

    def noting(entry: str, arrays: list[Any]) -> Sequence[Any]:
        arguments = program.arguments_of(entry, arrays)
        if "tokens" in arguments and "last_tokens" in arguments:
            arguments["tokens"] = known(arguments["tokens"], arguments["last_tokens"])
        if entry.startswith("decode_loop"):
            # The steps of a loop keep its first block table while that has the pages that they read. A replay
            # makes a table for each step, of all pages that the requests have by then.
            read = arguments["positions"] // program.config.stride + 1
            for name in arguments.keys() & {"seq_block_ids", "window_block_ids"}:
                table = arguments[name][:, : max(read)]
                arguments[name] = np.where(np.arange(max(read)) < read[:, None], table, 0)
        kept = arguments.keys() - NOT_COMPARED
        executed.append((entry, {name: arguments[name].tolist() for name in kept}))
        return run(entry, arrays)

    program._run = noting  # type: ignore[method-assign]
    return executed


def dump_of(recording: Recording, path: Path, rig: Rig) -> Dump:
    """Written to a file and read again."""
    windows = rig.cache.window_usage()
    header = Header(
        format_version=FORMAT_VERSION,
        reason="a test",
        written_s=0.0,
        epoch_s=0.0,
        num_pages=rig.cache.usage().total + 1,
        num_window_pages=0 if windows is None else windows.total + 1,
        stride=rig.cache.stride,
        settings={"static_threshold": rig.static_threshold},
    )
    write_dump(path, header, recording)
    try:
        return read_dump(path)
    finally:
        path.unlink()


def fresh_program(like: FakeProgram) -> FakeProgram:
    """The same program on another device, which has no faults."""
    program = FakeProgram(
        like.config, Faults(), like.static_lengths, like.logits_result, like.extend_rank, like.extend_lengths
    )
    sizes = ("loop_sizes", "sample_sizes", "adjusted_sample_sizes", "logprob_sizes")
    for name in (*sizes, "reads_masked", "repeats"):
        setattr(program, name, getattr(like, name))
    return program


def replay_of(dump: Dump, program: FakeProgram) -> Replay:
    """On a device of its own, which has no tokens in its pages yet."""
    config, device = program.config, FakeDevice(program)
    slabs = page_table_of(device, config, dump.header.num_pages, dump.header.num_window_pages)
    threshold = dump.header.settings["static_threshold"]
    assert threshold is None or isinstance(threshold, int)
    used = with_static_threshold(program, threshold)
    return Replay(dump, BatchRunner(device, used, config, page_table=slabs), config)
