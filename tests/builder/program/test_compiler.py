from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from iree.compiler import version
from iree.compiler.tools.binaries import find_tool

from shortfin_apps.llm.builder.program.compiler import compile_model, compile_text
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.components.runtime.vmfb import read_exports
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.iree_release import OF_SHORTFIN, compiler_release
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from tests.builder.compiled_model import GENERIC, HOST, TINY, WINDOWED
from tests.builder.specs import changed

ONE_LAYER = changed(TINY, layers=1)
SMALL = BuildOptions(prefill_batch_sizes=(2,), decode_batch_sizes=(2,), chunk_sizes=(), top_k=4)


COMMANDS = r"stream\.\w+\.(copy|clone|fill|update)"


def stream_functions(text: str, target: Target) -> list[str]:
    """The functions of the module, as the compiler schedules their commands."""
    run = subprocess.run(
        [find_tool("iree-compile"), "-", "--compile-to=stream", *target.flags],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split("util.func public ")[1:]


def commands_on(function: str, kind: str) -> list[str]:
    """Commands that copy or fill memory of the size of imported tensors of this type."""
    sizes = re.findall(rf"tensor<{kind}>\{{[^}}]*\}} in !stream\.resource<\w+>\{{(%\w+)\}}", function)
    assert sizes, "it is imported somewhere"
    commands = [line for line in function.splitlines() if re.search(COMMANDS, line)]
    return [line for line in commands if any(f"{{{size}}}" in line for size in set(sizes))]


def cache_commands(text: str) -> list[str]:
    """Commands of the compiled module that copy or fill the cache."""
    functions = stream_functions(text, resolve_target("cpu"))
    return [command for function in functions for command in commands_on(function, r"\?x1024xbf16")]


@pytest.mark.parametrize(
    ("target", "spec", "name"),
    [
        pytest.param(HOST, WINDOWED, "window_cache", id="kernels"),
        pytest.param(GENERIC, ONE_LAYER, "cache", id="generic", marks=pytest.mark.slow),
        pytest.param(GENERIC, WINDOWED, "window_cache", id="generic-windowed", marks=pytest.mark.slow),
    ],
)
def test_only_dispatches_write_the_cache(target: Target, spec: ModelSpec, name: str) -> None:
    """Of one layer in each slab."""
    text = ModelModule(spec, SMALL, target).text()
    assert cache_commands(text) == []
    # What that check is for: a cache that is not handed over is copied.
    assert cache_commands(text.replace(f"=> consume %{name}", f"=> %{name}")) != []


@pytest.mark.parametrize("device", ["cpu", pytest.param("hip:gfx942", marks=pytest.mark.slow)])
def test_no_entry_copies_a_table_by_slot_or_allocates_on_gpus(device: str) -> None:
    options = replace(SMALL, device=device, decode_loop_sizes=(2,))
    target = resolve_target(device)
    functions = stream_functions(ModelModule(ONE_LAYER, options, target).text(), target)
    draws = re.compile(r"@(decode_loop|sample|adjusted_sample|logprobs)_bs2\$async\(")
    drawing = [each for each in functions if draws.match(each)]
    assert len(drawing) == 4
    for function in drawing:
        assert commands_on(function, r"\?xi64") == []
        if "@adjusted_sample" in function:
            assert commands_on(function, rf"\?x{ONE_LAYER.vocab_size}xi32") == []
        assert target.is_cpu or "stream.resource.alloca" not in function


@pytest.mark.slow
def test_a_gpu_runs_one_command_buffer_that_writes_logits_where_the_caller_wants_them() -> None:
    options = replace(SMALL, device="hip:gfx942", extend_sizes=(64,), decode_loop_sizes=(2,))
    target = resolve_target(options.device)
    functions = stream_functions(ModelModule(ONE_LAYER, options, target).text(), target)
    for entry, rows in (("decode_bs2", 2), ("decode_loop_bs2", 2), ("extend_t64", 64)):
        [function] = [each for each in functions if each.startswith(f"@{entry}$async(")]
        assert function.count("stream.cmd.execute") == 1
        copies = [line for line in function.splitlines() if "stream.cmd.copy" in line]
        assert [line for line in copies if f"%c{rows * ONE_LAYER.vocab_size * 4} :" in line] == []


@pytest.mark.slow
def test_compiles_for_an_amd_gpu(tmp_path: Path) -> None:
    options = replace(SMALL, device="hip:gfx942", prefill_batch_sizes=(1,), decode_batch_sizes=(2,))
    result = compile_model(TINY, options, tmp_path / "model.vmfb", tmp_path / "kernels")
    assert (tmp_path / "model.vmfb").stat().st_size > 0
    assert result.entries == (
        *("prefill_bs1", "decode_bs2", "extend", "decode_loop_bs2"),
        *("sample_bs2", "adjusted_sample_bs2", "logprobs_bs2"),
    )
    assert (result.target.architecture, result.target.cpu) == ("amdgpu", "gfx942")
    exports = read_exports(tmp_path / "model.vmfb", "module")
    owned = {name for name, export in exports.items() if export.signature.workspace_bytes is not None}
    assert owned == set(result.entries) - {"prefill_bs1", "extend"}


def test_says_what_it_did(tmp_path: Path) -> None:
    steps: list[str] = []
    options = replace(SMALL, chunk_sizes=(32,), extend_sizes=(64,), decode_loop_sizes=(2,))
    result = compile_model(ONE_LAYER, options, tmp_path / "model.vmfb", tmp_path / "kernels", steps.append)
    assert result.entries == (
        "prefill_bs2",
        "prefill_bs2_s32",
        "decode_bs2",
        "extend",
        "extend_t64",
        *("decode_loop_bs2", "sample_bs2", "adjusted_sample_bs2", "logprobs_bs2"),
    )
    exports = read_exports(tmp_path / "model.vmfb", "module")
    assert all(export.signature.only_dispatches for export in exports.values())
    assert result.compiler_version == version.VERSION
    assert "--iree-llvmcpu-target-cpu=host" in result.flags
    assert result.target.cpu
    assert result.target.features
    assert len(steps) == 2


def test_the_same_model_makes_the_same_text() -> None:
    target = resolve_target("cpu")
    first, second = (ModelModule(ONE_LAYER, SMALL, target).text() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("device", ["cuda", "hip", "hip:", "cpu:nosuchcpu"])
def test_refuses_unknown_devices(device: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=device.removeprefix("cpu:")):
        compile_model(ONE_LAYER, replace(SMALL, device=device), tmp_path / "model.vmfb", tmp_path)


def test_integer_arithmetic_is_for_cpus(tmp_path: Path) -> None:
    options = replace(SMALL, weights="int8", device="hip:gfx942")
    with pytest.raises(BuildError, match="int8 are for CPUs"):
        compile_model(ONE_LAYER, options, tmp_path / "model.vmfb", tmp_path)


@pytest.mark.skipif(compiler_release() == OF_SHORTFIN, reason="needs the newest IREE, as sm_90 does")
def test_a_program_for_hopper_has_matmuls_that_load_by_tma(tmp_path: Path) -> None:
    spec = changed(
        ONE_LAYER, {"hidden_size": 2048, "heads": 16, "kv_heads": 4, "head_dim": 128, "features": 4096}
    )
    options = BuildOptions(
        device="cuda:sm_90", prefill_batch_sizes=(1,), decode_batch_sizes=(1,), extend_sizes=(256,)
    )
    compile_model(spec, options, tmp_path / "model.vmfb", tmp_path)
    program = (tmp_path / "model.vmfb").read_bytes()
    for name in (b"project_qkv_3072x2048_hopper_128x128", b"gated_linear_8192x2048_hopper_128x128"):
        assert name in program
    for name in (b"linear_2048x2048_hopper_128x64", b"linear_2048x4096_hopper_128x64"):
        assert name in program


def test_refuses_sizes_that_the_kernels_do_not_take(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="hidden_size 60"):
        compile_model(replace(ONE_LAYER, hidden_size=60), SMALL, tmp_path / "model.vmfb", tmp_path)


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "model.vmfb"
    out.write_bytes(b"before")
    with pytest.raises(BuildError, match="error"):
        compile_text("module { nonsense }", resolve_target("cpu").flags, out)
    assert [path.name for path in tmp_path.iterdir()] == ["model.vmfb"]
    assert out.read_bytes() == b"before"


def test_another_cpu_gets_other_features() -> None:
    old = resolve_target("cpu:haswell")
    assert old.cpu == "haswell"
    assert not old.has_bf16_dot
    assert not old.has_wide_vectors
