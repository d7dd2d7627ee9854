from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time.llvm_ir import MAX_SHARED_BYTES, for_iree
from shortfin_apps.llm.contract.errors import BuildError

IR = """\
@global_smem = external local_unnamed_addr addrspace(3) global [0 x i8], align 16
declare i32 @llvm.amdgcn.workitem.id.x()
define amdgpu_kernel void @add(ptr addrspace(1) inreg readonly align 16 captures(none) %0, i32 inreg %1, \
ptr addrspace(1) inreg %2, ptr addrspace(1) inreg %3) local_unnamed_addr #0 {
  %5 = load i32, ptr addrspace(1) %0
  br label %6

6:
  %7 = phi i32 [ %5, %4 ], [ %1, %6 ]
  br label %6
}
"""


def test_parameters_that_iree_does_not_pass_are_dropped() -> None:
    made = for_iree(IR, "renamed", 2, 0)
    head = next(line for line in made.splitlines() if line.startswith("define"))
    assert head.startswith("define amdgpu_kernel void @renamed(ptr addrspace(1) inreg readonly")
    assert head.endswith("captures(none) %0, i32 inreg %1) local_unnamed_addr #0 {")


def test_the_entry_block_keeps_the_number_that_phis_name() -> None:
    assert "#0 {\n4:\n  %5 = load" in for_iree(IR, "add", 2, 0)


def test_shared_memory_becomes_static() -> None:
    made = for_iree(IR, "add", 2, 4096)
    assert (
        "@global_smem = internal local_unnamed_addr addrspace(3) global [4096 x i8] poison, align 16" in made
    )


@pytest.mark.parametrize(
    ("ir", "words"),
    [
        (IR.replace("load i32, ptr addrspace(1) %0", "load i32, ptr addrspace(1) %3"), "uses ptr.*%3"),
        (IR.replace("inreg %3)", "%3, i64 %8)"), "uses i64 %8"),
        (
            IR.replace("  br label %6\n\n", "  call ptr @llvm.amdgcn.dispatch.ptr()\n\n", 1),
            r"needs dispatch\.ptr",
        ),
        ("define void @add() {\n}\n", "no kernel"),
    ],
)
def test_what_iree_cannot_launch_is_refused(ir: str, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        for_iree(ir, "add", 2, 0)


def test_more_shared_memory_than_a_workgroup_has_is_refused() -> None:
    with pytest.raises(BuildError, match="kernel add needs 65537 bytes of LDS"):
        for_iree(IR, "add", 2, MAX_SHARED_BYTES + 1)
