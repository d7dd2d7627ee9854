from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.rebuild import rebuild_command
from shortfin_apps.llm.builder import cli
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import Q8_0

EVERYTHING = BuildOptions(
    device="hip:gfx942",
    weights="f16",
    kv="f16",
    prefill_batch_sizes=(2,),
    decode_batch_sizes=(1, 64),
    chunk_sizes=(128, 512),
    extend_sizes=(256,),
    block_seq_stride=32,
    context_length=4096,
    device_block_count=100,
    top_k=8,
    batch_invariant=True,
)


def test_defaults_are_left_out_but_for_the_types_of_weights() -> None:
    command = "shortfin-llm build random:tiny -o m --weights bf16"
    assert rebuild_command(Path("m"), "random:tiny", BuildOptions()) == command


def test_weights_of_several_types_are_the_source_s_own() -> None:
    options = BuildOptions(weights="q4", block_types=(("blk.0.ffn_down.weight", Q8_0),))
    assert rebuild_command(Path("m"), "x.gguf", options) == "shortfin-llm build x.gguf -o m --weights auto"


@pytest.mark.parametrize(
    "options",
    [
        EVERYTHING,
        BuildOptions(),
        BuildOptions(prefill_batch_sizes=(), decode_batch_sizes=(8,)),
        BuildOptions(device="hip:gfx942"),  # with a CPU's defaults
        BuildOptions.for_device("hip:gfx942"),
    ],
)
def test_the_command_asks_for_the_same_options(options: BuildOptions) -> None:
    command = rebuild_command(Path("my model"), "a source.gguf", options)
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(shlex.split(command)[1:])
    assert cli.options_of(args) == options
    assert (args.source, args.output) == ("a source.gguf", Path("my model"))
