"""The calls in a VMFB's bytecode, against small functions compiled here and against `random:tiny`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from iree.compiler.tools.binaries import find_tool

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.runtime.bytecode import Call, read_calls
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.iree_release import OF_SHORTFIN, compiler_release
from shortfin_apps.llm.model.spec import BuildOptions
from tests.conftest import BuildTiny
from tests.runtimes import of_shortfins_release

MODULE = """
vm.module @module {
  vm.import private @test.take(%a : i32, %b : i32, %c : i64 ...) -> i32
  vm.import private @test.hold(%a : !vm.buffer, %b : i32, %c : !vm.buffer) -> !vm.buffer
  vm.global.ref private mutable @first : !vm.buffer
  vm.global.ref private mutable @second : !vm.buffer
  vm.import private @test.give(%a : i32) -> (i32, i64)
  vm.export @straight
  vm.func @straight(%x : i32, %y : i64) -> i64 attributes {inlining_policy = #util.inline.never} {
    %zero = vm.const.i32.zero
    %seven = vm.const.i32 7
    %wide = vm.const.i64 123456789012
    %min = vm.min.i64.s %y, %wide : i64
    %taken = vm.call.variadic @test.take(%seven, %x, [%min, %wide]) : (i32, i32, i64 ...) -> i32
    %sum = vm.add.i32 %taken, %seven : i32
    %again:2 = vm.call @test.give(%zero) : (i32) -> (i32, i64)
    %last = vm.call.variadic @test.take(%again#0, %seven, []) : (i32, i32, i64 ...) -> i32
    %which = vm.select.i32 %sum, %last, %zero : i32
    %end:2 = vm.call @test.give(%which) : (i32) -> (i32, i64)
    %both = vm.add.i64 %end#1, %again#1 : i64
    vm.return %both : i64
  }
  vm.export @refers
  vm.func @refers(%x : !vm.buffer, %y : !vm.buffer) -> !vm.buffer {
    %seven = vm.const.i32 7
    vm.global.store.ref %y, @first : !vm.buffer
    %second = vm.global.load.ref @second : !vm.buffer
    %one = vm.call @test.hold(%x, %seven, %second) : (!vm.buffer, i32, !vm.buffer) -> !vm.buffer
    vm.global.store.ref %one, @second : !vm.buffer
    %first = vm.global.load.ref @first : !vm.buffer
    %two = vm.call @test.hold(%second, %seven, %first) : (!vm.buffer, i32, !vm.buffer) -> !vm.buffer
    %three = vm.call @test.hold(%first, %seven, %two) : (!vm.buffer, i32, !vm.buffer) -> !vm.buffer
    vm.return %three : !vm.buffer
  }
  vm.export @calls
  vm.func @calls(%x : i32, %y : i64) -> i64 {
    %result = vm.call @straight(%x, %y) : (i32, i64) -> i64
    vm.return %result : i64
  }
  vm.export @branches
  vm.func @branches(%x : i32) -> i32 {
    vm.cond_br %x, ^bb1, ^bb2
  ^bb1:
    %seven = vm.const.i32 7
    %given:2 = vm.call @test.give(%seven) : (i32) -> (i32, i64)
    vm.return %given#0 : i32
  ^bb2:
    vm.return %x : i32
  }
}
"""


@pytest.fixture(scope="module")
def vmfb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytecode")
    source, out = folder / "module.mlir", folder / "module.vmfb"
    source.write_text(MODULE, encoding="utf-8")
    command = [find_tool("iree-compile"), str(source), "-o", str(out), "--compile-mode=vm"]
    subprocess.run(command, check=True, capture_output=True)
    return out


@of_shortfins_release
def test_calls_are_in_order_with_their_constants(vmfb: Path) -> None:
    calls = read_calls(vmfb)["straight"]
    assert calls is not None
    assert [(call.function, call.arguments) for call in calls] == [
        ("test.take", (7, None, None, None)),
        ("test.give", (0,)),
        ("test.take", (None, 7)),
        ("test.give", (None,)),
    ]


@of_shortfins_release
def test_references_are_known_by_the_global_that_they_were_loaded_from(vmfb: Path) -> None:
    assert read_calls(vmfb)["refers"] == (
        Call("test.hold", (None, 7, None), (None, None, 1)),
        Call("test.hold", (None, 7, None), (1, None, 0)),
        Call("test.hold", (None, 7, None), (0, None, None)),
    )


@pytest.mark.parametrize("function", ["branches", "calls"])
def test_functions_whose_own_calls_are_not_all_are_left_out(vmfb: Path, function: str) -> None:
    assert read_calls(vmfb)[function] is None


@of_shortfins_release
def test_every_entry_of_a_model_is_read(tiny_artifact: Artifact, build_tiny: BuildTiny) -> None:
    for artifact in (tiny_artifact, build_tiny(BuildOptions(device="hip:gfx942"))):
        assert artifact.manifest is not None
        calls = read_calls(artifact.vmfb)
        for entry in artifact.manifest.program.entries:
            functions = [call.function for call in calls[f"{entry}$async"] or ()]
            assert "hal.device.queue.execute" in " ".join(functions)
            dispatches = functions.count("hal.command_buffer.dispatch")
            computes_layers = not entry.startswith(("sample", "logprobs"))
            assert dispatches > (len(artifact.manifest.spec.layers) if computes_layers else 1)


def test_a_damaged_file_is_refused(vmfb: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.vmfb"
    cut.write_bytes(vmfb.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="damaged or cut short"):
        read_calls(cut)


@pytest.mark.skipif(compiler_release() == OF_SHORTFIN, reason="its bytecode is known")
def test_bytecode_of_another_release_is_not_guessed_at(vmfb: Path) -> None:
    assert set(read_calls(vmfb).values()) == {None}
