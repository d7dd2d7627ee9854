from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles
from shortfin_apps.llm.builder.kernels.ahead_of_time.ptx import for_iree
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
    code = compile_kernel(kernel, "nvptx", "sm_90")
    text = code.image.decode()
    assert ".entry sums_of_rows(" in text
    assert ".version 8.4" in text
    assert text[text.index(".entry") : text.index(")", text.index(".entry"))].count(".param") == 3
    assert code.threads == 128
    assert code.shared_bytes > 0
