from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.tools.inspection.kernels import KernelFacts
from shortfin_apps.llm.tools.inspection.remarks import Remark, remarks

PLAIN = KernelFacts(
    name="decode_bs4$async_dispatch_3_matmul_4x64x64_bf16xbf16xf32",
    workgroup=(64, 1, 1),
    lanes=64,
    num_vgprs=40,
    num_agprs=0,
    num_sgprs=20,
    num_vgpr_spills=0,
    num_sgpr_spills=0,
    lds_bytes=0,
    scratch_bytes=0,
    waves=8.0,
    num_instructions=100,
    num_matrix_instructions=4,
    loads=((2, 3), (16, 3)),
)


def named(operation: str) -> KernelFacts:
    return replace(PLAIN, name=f"extend$async_dispatch_3_{operation}", num_matrix_instructions=0)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (PLAIN, ()),
        (replace(PLAIN, num_vgpr_spills=1), (Remark.SPILLS,)),
        (replace(PLAIN, num_sgpr_spills=1), (Remark.SPILLS,)),
        (replace(PLAIN, scratch_bytes=4), (Remark.SCRATCH,)),
        (replace(PLAIN, loads=((2, 4), (16, 3))), (Remark.NARROW,)),
        (replace(PLAIN, loads=((1, 4),)), (Remark.NARROW,)),
        (replace(PLAIN, loads=((4, 4), (16, 3))), ()),
        (replace(PLAIN, loads=()), ()),
        (replace(PLAIN, workgroup=(1, 1, 1)), (Remark.ONE_LANE,)),
        (replace(PLAIN, workgroup=None), ()),
        (named("matmul_4x64x64_bf16xbf16xf32"), (Remark.NO_MATRIX,)),
        (named("matmul_16x64x64_bf16xbf16xf32"), (Remark.NO_MATRIX,)),
        (named("matmul_Dx64x64_bf16xbf16xf32"), (Remark.NO_MATRIX,)),
        (named("matmul_1x64x64_bf16xbf16xf32"), ()),
        (named("attention_4xDx2x16xbf16"), (Remark.NO_MATRIX,)),
        (named("reduction_4x64_f32"), ()),
        (named("elementwise_4_i64"), ()),
        (
            replace(PLAIN, scratch_bytes=4, num_vgpr_spills=1, workgroup=(1, 1, 1)),
            (Remark.SPILLS, Remark.SCRATCH, Remark.ONE_LANE),
        ),
    ],
)
def test_remarks(kernel: KernelFacts, expected: tuple[Remark, ...]) -> None:
    assert remarks(kernel) == expected


def test_each_remark_has_a_meaning() -> None:
    assert len({remark.meaning for remark in Remark}) == len(Remark)
