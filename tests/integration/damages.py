"""Ways to damage a model, its files or a server that runs it, one each."""

from __future__ import annotations

import json
import mmap
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

from shortfin_apps.llm.artifact.artifact import Artifact, Manifest
from shortfin_apps.llm.artifact.file_names import MANIFEST, TOKENIZER, VMFB
from shortfin_apps.llm.artifact.file_record import record
from shortfin_apps.llm.builder.graph import rotary
from shortfin_apps.llm.builder.sources.random_tiny import RandomTinySource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.invocation.batch_runner import Array
from shortfin_apps.llm.components.invocation.block_tables import BlockTables, PageList
from shortfin_apps.llm.components.invocation.launch import Launch
from shortfin_apps.llm.components.invocation.loop_state import Fields
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.contract.self_test_file import SelfTestFile
from tests.compiled_programs import compile_program
from tests.components.self_test.compiled import Built, module_text
from tests.integration.damaged_server import RARE, SHARED, Server

BF16_NAN = 0x7FC0
_ZIP_HEADER = struct.Struct("<4s5H3I2H")  # of a file in an archive


def change(path: Path, offset: int, octets: bytes) -> None:
    """In its place, so that a process that has mapped the file sees it."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[offset : offset + len(octets)] = octets


def _built(directory: Path) -> Built:
    artifact = Artifact.open(directory, check_sizes=False)
    manifest, self_test = artifact.manifest, artifact.self_test
    assert manifest is not None
    assert self_test is not None
    [parameters] = artifact.parameters
    return Built(
        spec=manifest.spec,
        options=manifest.options,
        config=artifact.config,
        vmfb=artifact.vmfb,
        parameters=parameters,
        file=SelfTestFile.load(self_test),
    )


def flip_weight(bit: int) -> Callable[[Path], None]:
    """Flips a bit of one bf16 of the keys' weights."""

    def flip(directory: Path) -> None:
        built = _built(directory)
        spec = built.spec
        keys = spec.attention.q_features * spec.hidden_size  # behind the queries
        built.flip("blk.1.attn_qkv.weight", 2, keys, bit)

    return flip


def spoil_rare_token(directory: Path) -> None:
    """Makes the first number of the embedding of RARE NaN, in `random:tiny`."""
    built, name = _built(directory), "token_embd.weight"
    layout = weight_layout(name, built.spec, built.options, resolve_target(built.options.device))
    sound = RandomTinySource().tensor(name)
    spoiled = sound.copy()
    spoiled[RARE, 0] = np.nan
    stored = [layout.store(each)[0].astype(ml_dtypes.bfloat16).ravel() for each in (sound, spoiled)]
    [place] = np.flatnonzero(np.isnan(stored[1]))  # as the CPU's kernels read the matrix
    start = built.offset(name)
    assert built.parameters.read_bytes()[start:].startswith(stored[0].tobytes())
    change(built.parameters, start + 2 * int(place), BF16_NAN.to_bytes(2, "little"))


def spoil_norm(directory: Path) -> None:
    """Makes a factor of a layer's norm NaN."""
    built = _built(directory)
    change(built.parameters, built.offset("blk.1.attn_norm.weight"), np.float32(np.nan).tobytes())


def flip_code(directory: Path) -> None:
    """Flips a bit in the middle of the program."""
    path = directory / VMFB
    middle = path.stat().st_size // 2
    change(path, middle, bytes([path.read_bytes()[middle] ^ 1]))


def turn_back(*, is_far: bool) -> Callable[[Path], None]:
    """Changes the sign of a cosine among the program's constants, and the checksum with it: of position 5 and
    all that are 5 more than a multiple of 64, or of the positions from 64 to 127.
    """

    def turn(directory: Path) -> None:
        built = _built(directory)
        tables = rotary.Rotary(built.spec.attention.rotation, built.config.max_seq_len)
        row = tables._coarse[1] if is_far else tables._fine[5]
        content = built.vmfb.read_bytes()
        assert content.count(row.tobytes()) == 1
        change(built.vmfb, content.index(row.tobytes()), (-row[0, :1]).tobytes())
        _renew_checksums(built.vmfb)

    return turn


def _renew_checksums(path: Path) -> None:
    """Those of the files in a ZIP archive that have others now."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    content = path.read_bytes()
    for member in members:
        begin = member.header_offset + _ZIP_HEADER.size
        begin += sum(_ZIP_HEADER.unpack_from(content, member.header_offset)[-2:])
        crc = zlib.crc32(content[begin : begin + member.file_size])
        if crc != member.CRC:
            was = struct.pack("<I", member.CRC)
            assert content.count(was) == 2, "in its header and in the directory"
            for offset in (content.index(was), content.rindex(was)):
                change(path, offset, struct.pack("<I", crc))


def _rebuild(directory: Path, text: str) -> None:
    """Puts the program in the artefact, and its hash in the manifest, as a build that made it would have."""
    vmfb = directory / VMFB
    vmfb.write_bytes(compile_program(text, resolve_target("cpu")).read_bytes())
    manifest = Manifest.load(directory / MANIFEST)
    files = manifest.files | {VMFB: record(vmfb)}
    (directory / MANIFEST).write_bytes(replace(manifest, files=files).to_json())


def _text(directory: Path) -> str:
    built = _built(directory)
    return module_text(built.spec, built.options, resolve_target("cpu"))


def miscompile_entry(directory: Path) -> None:
    """One entry alone takes the norms of two layers for each other."""
    text = _text(directory)
    begin = text.index("@decode_bs4$async")
    end = text.find("util.func public", begin)
    body = text[begin : end if end > 0 else len(text)]
    names = [f'@"blk.{layer}.attn_norm.weight"' for layer in range(2)]
    assert all(name in body for name in names)
    wrong = body.replace(names[0], "@").replace(names[1], names[0]).replace("@ :", f"{names[1]} :")
    _rebuild(directory, text.replace(body, wrong))


def swap_rotation(directory: Path) -> None:
    """Queries and keys of all entries rotate two of their dimensions with each other's frequencies."""
    right = rotary.rotary_frequencies

    def swapped(*arguments: Any) -> Any:
        frequencies = right(*arguments)
        frequencies[[0, 1]] = frequencies[[1, 0]]
        return frequencies

    with patch.object(rotary, "rotary_frequencies", swapped):
        _rebuild(directory, _text(directory))


def swap_tokens(directory: Path) -> None:
    """Two tokens of the tokenizer have each other's text."""
    path = directory / TOKENIZER
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))


def change_shared_page(change_rows: Callable[[Array, int], None]) -> Callable[[Server], None]:
    """Changes the slab [pages, elements] on the engine's thread: the second page of the cached prompt SHARED,
    whose id is given, before the first batch with a task that found it in the cache.
    """

    def plant(server: Server) -> None:
        runner = server.runner
        launch, device = runner.launch, runner._device

        def change_and_launch(
            batch: Batch, fields: Fields | None = None, slots: Sequence[int] | None = None
        ) -> Launch:
            for task in batch.tasks[:1]:
                if task.start_position == len(SHARED):
                    slab = np.array(device.download(runner._page_table[0]))
                    change_rows(slab, task.page_ids[1])
                    runner._page_table[0] = device.upload(slab)
                    runner.launch = launch  # type: ignore[method-assign]
            return launch(batch, fields, slots)

        runner.launch = change_and_launch  # type: ignore[method-assign]

    return plant


def make_stale(slab: Array, page_id: int) -> None:
    """Gives the page the keys and values of other tokens: those of the page before it."""
    slab[page_id] = slab[page_id - 1 if page_id > 1 else page_id + 1]


def spoil_page(slab: Array, page_id: int) -> None:
    slab[page_id, 0] = np.nan


class _OneWrongPage:
    """Block tables, of which one once has a page of another task in its first row."""

    def __init__(self, server: Server) -> None:
        self._runner = server.runner
        self._tables = self._runner._block_tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)

    def on_device(self, page_lists: Sequence[PageList], rows: int, blocks: int) -> DeviceBuffer:
        if len(page_lists) < 2 or len(page_lists[0]) < 2:
            return self._tables.on_device(page_lists, rows, blocks)
        self._runner._block_tables = self._tables
        wrong = [list(page_ids) for page_ids in page_lists]
        wrong[0][0] = wrong[1][-1]
        return BlockTables(self._runner._upload).on_device(wrong, rows, blocks)


def mix_up_pages(server: Server) -> None:
    server.runner._block_tables = _OneWrongPage(server)  # type: ignore[assignment]


def draw_by_another_seed(server: Server) -> None:
    """The next request that samples draws by another seed than it, and its receipt, says."""
    engine = server.engine
    add = engine.add

    def add_and_forget(call: GenerateCall) -> None:
        if call.params.seed is not None:
            engine.add = add  # type: ignore[method-assign]
            call = replace(call, params=replace(call.params, seed=call.params.seed + 1))
        add(call)

    engine.add = add_and_forget  # type: ignore[method-assign]
