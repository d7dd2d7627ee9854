"""When an invocation may start, in the commands that IREE makes of its entry."""

from __future__ import annotations

import pytest
from iree import compiler

from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from tests.builder.compiled_model import HYBRID, OTHERS, ROUTED, TINY
from tests.builder.uncompiled import text_of

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize(
    ("spec", "one_launch"),
    [(TINY, True), (TINY, False), (HYBRID, False), (ROUTED, False), (OTHERS["featured"], False)],
    ids=["one launch", "tiny", "hybrid", "routed", "featured"],
)
def test_nothing_of_an_invocation_runs_before_its_fence(spec: ModelSpec, one_launch: bool) -> None:
    """IREE computes what needs no argument, such as a constant to start with, without waiting for anything.

    The workspace belongs to the caller, and the invocation before may still use it then.
    """
    options = BuildOptions(
        device="hip:gfx942", prefill_batch_sizes=(1,), decode_batch_sizes=(4,), one_launch=one_launch
    )
    flags = [*resolve_target(options.device).flags, "--compile-to=stream"]
    text = compiler.compile_str(text_of(spec, options), extra_args=flags).decode()
    invocations = [part for part in text.split("util.func public @")[1:] if "stream.cmd.execute" in part]
    assert len(invocations) > 4
    for part in invocations:
        executed = [line for line in part.splitlines() if "stream.cmd.execute" in line]
        assert all(" await(" in line for line in executed), part[: part.index("(")]
