from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles
from shortfin_apps.llm.builder.kernels.ahead_of_time.ptx import for_iree, without_newer_loads
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.contract.errors import BuildError

PTX = """\
.version 8.4
.target sm_90a
.visible .entry add(
	.param .u64 .ptr .global .align 16 add_param_0,
	.param .u32 add_param_1,
	.param .u64 .ptr .global .align 1 add_param_2,
	.param .u64 .ptr .global .align 1 add_param_3
)
.reqntid 128
{
	ld.param.b64 %rd1, [add_param_0];
	ret;
}
"""


def test_parameters_that_iree_does_not_pass_are_dropped() -> None:
    made = for_iree(PTX, "renamed", 2)
    assert (
        ".entry renamed(\n\t.param .u64 .ptr .global .align 16 add_param_0,\n\t.param .u32 add_param_1\n)"
        in made
    )
    assert "add_param_2" not in made
    assert made.endswith(PTX[PTX.index("\n.reqntid") :])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PTX.replace("[add_param_0]", "[add_param_3]"), r"uses .*add_param_3, which IREE does not pass"),
        (".version 8.4\n", "no kernel"),
    ],
)
def test_what_iree_cannot_launch_is_refused(text: str, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        for_iree(text, "add", 2)


SCRATCH_USED = PTX.replace("ret;", "ld.param.b64 \t%rd7, [add_param_2];\n\tst.global.b32 \t[%rd7], %r1;")
OPERAND_UNUSED = SCRATCH_USED.replace("ld.param.b64 %rd1, [add_param_0];", "")


def test_an_operand_takes_the_place_of_scratch_memory_at_a_multiple_of_128_bytes() -> None:
    made = for_iree(OPERAND_UNUSED, "renamed", 2, scratch=0)
    assert "add_param_2" not in made
    assert [line.strip() for line in made.splitlines()[-5:]] == [
        "ld.param.b64 \t%rd7, [add_param_0];",
        "add.s64 \t%rd7, %rd7, 127;",
        "and.b64 \t%rd7, %rd7, -128;",
        "st.global.b32 \t[%rd7], %r1;",
        "}",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SCRATCH_USED, r"uses its operand `scratch`"),
        (PTX.replace("[add_param_0]", "[add_param_1]"), r"does not load Triton's add_param_2"),
        (OPERAND_UNUSED.replace("}", "mov.b64 %rd3, add_param_2; }"), r"uses .*add_param_2, which IREE"),
        (
            OPERAND_UNUSED.replace("}", "ld.param.b64 %rd3, [add_param_3]; }"),
            r"uses .*add_param_3, which IREE",
        ),
    ],
)
def test_other_uses_of_scratch_memory_are_refused(text: str, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        for_iree(text, "add", 2, scratch=0)


WRITE = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
LOADS = f"""\
.version 8.6
.target sm_90a
	@%p1 {WRITE} [%rd1], [%rd2], 0x80;
	@%p1 fence.proxy.tensormap::generic.acquire.gpu [%rd1], 0x80;
	cp.async.bulk.commit_group ;
	cp.async.bulk.wait_group.read 0 ;
	{LOAD} [%r1], [%rd1, {{%r2, %r3}}], [%r4];
"""


def test_loads_by_tma_are_written_in_ptx_8_4() -> None:
    made = without_newer_loads(LOADS, "matmul")
    assert made.splitlines()[0] == ".version 8.4"
    assert LOAD.replace("shared::cta", "shared::cluster") in made
    assert LOAD not in made
    assert made.splitlines()[1:-1] == LOADS.splitlines()[1:-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LOADS.replace("8.6", "8.7"), "not in PTX 8.6"),
        (LOADS.replace("tensor.2d", "tensor.3d"), r"bulk copies that PTX 8.4 may lack: cp\S*\.3d\."),
        (
            LOADS.replace("2d.shared::cta", "2d.tile::gather4.shared::cta"),
            "bulk copies that PTX 8.4 may lack",
        ),
        (LOADS.replace("fence.proxy", "//"), "without a fence after it was written"),
        (LOADS.replace(".acquire.gpu", ".acquire.cta"), "without a fence after it was written"),
    ],
)
def test_what_ptx_8_4_may_lack_is_refused(text: str, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        without_newer_loads(text, "matmul")


def test_triton_makes_ptx_that_iree_can_launch() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
    from tests.builder.kernels.ahead_of_time.row_sums import row_sums

    kernel = Kernel(
        name="sums_of_rows",
        function=row_sums,
        interface=Interface(
            constants=("rows",),
            reads={"x": buffer("f32", "rows", 96)},
            writes={"sums": buffer("f32", "rows")},
        ),
        constexprs={"COLUMNS": 96, "BLOCK": 128, "ROWS": 4},
        grid=[Tiles("rows", 4)],
    )
    with pytest.raises(BuildError, match=r"sums_of_rows takes \d+ bytes .* --no-one-launch"):
        compile_kernel(replace(kernel, most_shared_bytes=0), "nvptx", "sm_90")
    code = compile_kernel(kernel, "nvptx", "sm_90")
    text = code.image.decode()
    assert ".entry sums_of_rows(" in text
    assert ".version 8.4" in text
    assert text[text.index(".entry") : text.index(")", text.index(".entry"))].count(".param") == 3
    assert code.threads == 128
    assert code.shared_bytes > 0
