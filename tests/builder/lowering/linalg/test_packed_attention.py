"""Attention of packed rows: the addresses it loads, and what IREE makes of its reductions for AMD GPUs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from iree.compiler import ir
from iree.compiler.tools.binaries import find_tool

from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from tests.builder.compiled_model import GENERIC, TINY
from tests.builder.specs import changed
from tests.runtimes import of_shortfins_release

# Of a size that the Triton kernels do not take.
ONE_LAYER = changed(TINY, {"hidden_size": 72}, layers=1)
LARGE_HEADS = changed(ONE_LAYER, {"heads": 6, "kv_heads": 2, "head_dim": 128})
OPTIONS = BuildOptions(prefill_batch_sizes=(1,), decode_batch_sizes=(1,), chunk_sizes=(), top_k=4)


@dataclass(frozen=True)
class Reduction:
    """A loop that IREE spreads over a workgroup (see docs/iree/partial_reduction.mlir)."""

    size: int | None  # None if dynamic
    tile: int
    asks_for_index: bool
    gathers: bool  # its body loads from addresses that it computes

    @property
    def is_sound(self) -> bool:
        """Whether IREE 3.9 computes it right, up to 4,096 elements where the size is dynamic."""
        if self.size is None:
            return not self.asks_for_index and not self.gathers
        return self.size % self.tile == 0 and (self.tile == self.size or not self.asks_for_index)


def operations(root: ir.OperationBase, name: str) -> list[ir.OperationBase]:
    found = []

    def visit(op: ir.OperationBase) -> ir.WalkResult:
        if op.name == name:
            found.append(op)
        return ir.WalkResult.ADVANCE

    root.operation.walk(visit)
    return found


def reductions(generic: ir.OperationBase) -> Iterator[Reduction]:
    config = str(generic.attributes["lowering_config"]) if "lowering_config" in generic.attributes else ""
    tiles = re.search(r"partial_reduction = \[([\d, ]+)\]", config)
    for loop, tile in enumerate(map(int, tiles[1].split(", ")) if tiles else ()):
        if tile > 1:
            indices = [int(op.attributes["dim"]) for op in operations(generic, "linalg.index")]
            gathers = bool(operations(generic, "tensor.extract"))
            yield Reduction(size(generic, loop), tile, loop in indices, gathers)


def size(generic: ir.OperationBase, loop: int) -> int | None:
    for operand, attribute in zip(generic.operands, generic.attributes["indexing_maps"], strict=True):
        shape = ir.ShapedType(operand.type)
        for dimension, result in enumerate(attribute.value.results):
            if ir.AffineDimExpr.isinstance(result) and ir.AffineDimExpr(result).position == loop:
                return None if shape.is_dynamic_dim(dimension) else shape.get_dim_size(dimension)
    raise AssertionError("a loop of a generic is in one of its maps")


def extend_dispatches(spec: ModelSpec, device: str, folder: Path) -> list[str]:
    """The configured executables of `extend`."""
    target = resolve_target(device)
    subprocess.run(
        [
            *(find_tool("iree-compile"), "-", "--compile-to=executable-configurations", "-o", "-"),
            f"--iree-hal-dump-executable-configurations-to={folder}",
            *target.flags,
        ],
        input=ModelModule(spec, replace(OPTIONS, device=device), target).text(),
        capture_output=True,
        text=True,
        check=True,
    )
    return [path.read_text(encoding="utf-8") for path in folder.glob("*extend$async*.mlir")]


@pytest.mark.slow
@of_shortfins_release
@pytest.mark.parametrize("spec", [ONE_LAYER, LARGE_HEADS], ids=["tiny", "heads-of-128"])
@pytest.mark.parametrize("device", ["hip:gfx942", "hip:gfx1100"])
def test_iree_computes_each_reduction_of_an_extend_right(
    spec: ModelSpec, device: str, tmp_path: Path
) -> None:
    found: list[Reduction] = []
    with ir.Context():
        for text in extend_dispatches(spec, device, tmp_path):
            module = ir.Module.parse(text)  # its operations are valid as long as it is
            for generic in operations(module.operation, "linalg.generic"):
                found += reductions(generic)
    assert found
    assert [reduction for reduction in found if not reduction.is_sound] == []
    # Over the tiles of slots, of which 4,096 are a context of two million tokens.
    assert [reduction.tile for reduction in found if reduction.size is None] == [4096]


def test_pages_and_rows_are_bounded_before_they_are_loaded() -> None:
    with ir.Context():
        module = ir.Module.parse(ModelModule(ONE_LAYER, OPTIONS, GENERIC).text())
        [extend] = [f for f in operations(module.operation, "util.func") if "@extend$" in str(f)[:80]]
        loads = operations(extend, "tensor.extract")
        tables = [load for load in loads if str(load.operands[0].type) == "tensor<?x?xi64>"]
        rows = [load for load in loads if str(load.operands[0].type) == "tensor<?x32xbf16>"]
        assert (len(tables), len(rows)) == (2, 2)  # for writing and for reading; K and V
        assert {load.operands[2].owner.name for load in tables} == {"arith.minui"}
        assert {load.operands[1].owner.name for load in rows} == {"arith.minui"}
