from __future__ import annotations

from bench.gpu.one_program import WithoutEntries
from tests.components.fake_device import FakeProgram, fake_config


def test_entries_are_hidden_by_the_beginning_of_their_names() -> None:
    program = FakeProgram(fake_config(), sample_sizes=(2,), adjusted_sample_sizes=(2, 4))
    left = WithoutEntries(program, "adjusted_sample").entries
    assert set(program.entries) - set(left) == {"adjusted_sample_bs2", "adjusted_sample_bs4"}
    assert left["sample_bs2"] == program.entries["sample_bs2"]
