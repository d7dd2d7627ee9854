from __future__ import annotations

from collections.abc import Sequence

import pytest

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.tuning import (
    LEAST_TOKENS,
    MAX_GAP_S,
    MIXED_WORTH_DECODES,
    TIME_LIMIT_S,
    TYPICAL_ROWS,
    WORTH_DECODES,
    tokens_beside_decodes,
    tokens_within_gap,
)
from shortfin_apps.llm.components.runtime.device import DeviceBuffer, EntrySignature
from tests.components.fake_device import FakeDevice, FakePending, FakeProgram, array_of, fake_config


class Timed(FakeProgram):
    """Takes `decode_s` for a decode, and `token_s` for each token of another entry."""

    decode_s = 0.010
    token_s = 0.0005
    now = 0.0

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> FakePending:
        tokens = array_of(arguments[0]).size
        self.now += self.decode_s if entry.startswith("decode") else self.token_s * tokens
        return super().submit(entry, arguments)

    def clock(self) -> float:
        return self.now


def runner_of(program: Timed) -> BatchRunner:
    config = fake_config()
    device = FakeDevice(program)
    slab = device.allocate((32, 4), config.paged_kv_cache.dtype)
    return BatchRunner(device, program, config, page_table=[slab], clock=program.clock)


def found(program: Timed, most_tokens: int = 320, *, mixes: bool = False) -> int | None:
    return tokens_beside_decodes(runner_of(program), most_tokens, program.clock, mixes=mixes)


@pytest.mark.parametrize(
    ("token_s", "most", "tokens"),
    [
        (0.001, 320, 148),  # 16 decodes are 160 tokens
        (0.00001, 320, 260),  # a third more would be more than an invocation has
        (0.00001, 100, 84),
        (0.1, 320, LEAST_TOKENS),
        (0.0005, 40, None),
    ],
)
def test_a_prefill_beside_decodes_takes_as_long_as_16_of_them_or_has_the_least_tokens(
    token_s: float, most: int, tokens: int | None
) -> None:
    program = Timed(fake_config())
    program.token_s = token_s
    assert found(program, most) == tokens


@pytest.mark.parametrize(
    ("token_s", "most", "tokens"),
    [
        (0.0001, 320, 148),  # 2 decodes are 200 tokens, and 8 of them decodes
        (0.00001, 320, 260),
        (0.1, 320, LEAST_TOKENS),
        (0.0001, 40, None),
    ],
)
def test_an_invocation_of_both_takes_as_long_as_two_decodes_or_has_the_least_tokens(
    token_s: float, most: int, tokens: int | None
) -> None:
    program = Timed(fake_config(), extend_rank=1)
    program.token_s = token_s
    assert found(program, most, mixes=True) == tokens
    assert not any(name.startswith("prefill") for name, _ in program.calls)


@pytest.mark.parametrize(("mixes", "worth_decodes"), [(False, WORTH_DECODES), (True, MIXED_WORTH_DECODES)])
def test_prompts_of_a_slow_model_are_not_measured(mixes: bool, worth_decodes: int) -> None:
    program = Timed(fake_config(), extend_rank=1)
    program.decode_s = TIME_LIMIT_S / worth_decodes
    assert found(program, mixes=mixes) == LEAST_TOKENS
    assert all(name.startswith("decode") for name, _ in program.calls)


@pytest.mark.parametrize("extend_rank", [0, 2])
def test_a_program_without_a_packed_extend_keeps_its_budget_where_both_share_an_invocation(
    extend_rank: int,
) -> None:
    assert found(Timed(fake_config(), extend_rank=extend_rank), mixes=True) is None


class OfOneLength(Timed):
    """Has no prefill that takes any length."""

    @property
    def entries(self) -> dict[str, EntrySignature]:
        return {name: each for name, each in super().entries.items() if not name.endswith("prefill_bs1")}


def test_a_program_whose_prefills_have_one_length_each_is_not_tuned() -> None:
    assert found(OfOneLength(fake_config(), static_lengths=(8,))) is None


def test_the_typical_decode_is_compiled_or_the_largest_is_taken() -> None:
    assert TYPICAL_ROWS == 8
    program = Timed(fake_config())
    found(program)
    decodes = [name for name, _ in program.calls if name.startswith("decode")]
    assert len(set(decodes)) == 1


@pytest.mark.parametrize(
    ("token_s", "most", "tokens"),
    [
        (MAX_GAP_S / 2048, 2048, 2048),
        (MAX_GAP_S / 2047, 2048, 1024),
        (MAX_GAP_S / 1023, 2048, None),
        (0.00001, 2048, 2048),
        (0.00001, 1000, None),
    ],
)
def test_a_gpu_prefills_as_much_as_the_gap_allows(token_s: float, most: int, tokens: int | None) -> None:
    program = Timed(fake_config())
    program.token_s = token_s
    assert tokens_within_gap(runner_of(program), 512, most) == tokens


def test_a_gpu_that_takes_long_for_a_decode_is_not_asked_for_long_prefills() -> None:
    program = Timed(fake_config())
    program.decode_s = MAX_GAP_S / 4
    assert tokens_within_gap(runner_of(program), 512, 2048) is None
    assert all(name.startswith("decode") for name, _ in program.calls)


def test_a_gpu_program_whose_prefills_have_one_length_keeps_its_budget() -> None:
    assert tokens_within_gap(runner_of(OfOneLength(fake_config(), static_lengths=(8,))), 512, 2048) is None
