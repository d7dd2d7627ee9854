from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching import make_mode
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionMode
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import ArtifactError
from tests.components.batching.modes.mode_inputs import ALL_ENTRIES, STRIDE, Entries, running
from tests.components.fake_device import fake_config


def mode(
    chunk: int = 128, budget: int = 256, span: int = 1024, idle: int | None = None
) -> ExtendAttentionMode:
    tokens = TokenBudget(while_decoding=budget, idle=idle or budget, context_span=span)
    return ExtendAttentionMode(stride=STRIDE, chunk_tokens=chunk, budget=tokens)


LEAST_32 = TokenBudget(while_decoding=256, idle=256, context_span=1024, least=32)  # as of `mode()`


def next_batch(batching: ExtendAttentionMode, requests: Iterable[Request]) -> Batch:
    batch = batching.next_batch([r for r in requests if r.num_unplanned])
    assert batch is not None
    assert batch.family is EntryFamily.EXTEND
    return batch


def spans(tasks: Iterable[LlmTaskInput]) -> list[tuple[int, int]]:
    """`start_position` and cumulative `seq_len` of each."""
    return [(task.start_position, task.seq_len) for task in tasks]


def run(batch: Batch) -> None:
    for task in batch.tasks:
        task.request.num_computed = task.request.num_planned = task.seq_len


def test_the_two_requests_of_the_design_document() -> None:
    """250 and 300 tokens, stride 16, chunk 128, budget 256."""
    requests = [running("R1", 250), running("R2", 300)]
    batching = mode()
    seen = []
    for _ in range(3):
        batch = next_batch(batching, requests)
        seen.append((sum(len(t.token_ids) for t in batch.tasks), spans(batch.tasks)))
        run(batch)
    assert seen == [
        (256, [(0, 128), (0, 128)]),
        (250, [(128, 250), (128, 256)]),
        (44, [(256, 300)]),
    ]
    assert not any(r.num_unplanned for r in requests)


def test_sixty_four_decodes_beside_two_chunks_in_one_invocation() -> None:
    decodes = [running(f"d{i}", 50 + i, computed=49 + i) for i in range(64)]
    prefills = [running("p1", 128), running("p2", 64)]
    batch = next_batch(mode(), [*prefills, *decodes])
    lengths = [len(task.token_ids) for task in batch.tasks]
    assert lengths == [1] * 64 + [128, 64]
    assert sum(lengths) == 256


def test_a_decode_costs_one_token() -> None:
    batch = next_batch(mode(), [running(str(i), 20, computed=19) for i in range(256)])
    assert len(batch.tasks) == 256


def test_a_single_prompt_takes_more_than_a_chunk() -> None:
    assert spans(next_batch(mode(), [running("r", 600)]).tasks) == [(0, 256)]


def test_a_long_prompt_does_not_keep_a_short_one_out() -> None:
    batch = next_batch(mode(), [running("long", 4096), running("short", 20)])
    assert spans(batch.tasks) == [(0, 224), (0, 20)]


def test_decodes_leave_a_page_to_a_waiting_prompt_and_rotate() -> None:
    decodes = [running(str(i), 20, computed=19) for i in range(60)]
    prompt = running("prompt", 64)
    batching, turn, served = mode(chunk=32, budget=32), count(), dict.fromkeys(range(60), 0)
    for _ in range(4):
        batch = next_batch(batching, [*decodes, prompt])
        assert len(batch.tasks[-1].token_ids) == 16
        for task in batch.tasks:
            task.request.last_turn = next(turn)
            if task.request is not prompt:
                served[int(task.request.request_id)] += 1
        prompt.num_planned += 16
    assert prompt.num_unplanned == 0
    assert sum(served.values()) == 4 * 16
    assert max(served.values()) <= min(served.values()) + 1 <= 2


@pytest.mark.parametrize(("context", "chunk"), [(0, 240), (512, 160), (1024, 112), (3072, 48), (12000, 16)])
def test_while_decoding_a_chunk_gets_shorter_as_its_context_grows(context: int, chunk: int) -> None:
    decode = running("decode", 20, computed=19)
    prompt = running("prompt", context + 4096, context)
    assert [len(task.token_ids) for task in next_batch(mode(), [decode, prompt]).tasks] == [1, chunk]
    assert [len(task.token_ids) for task in next_batch(mode(), [prompt]).tasks] == [256]


def test_a_tuned_budget_has_room_for_the_decodes_beside_its_prompts() -> None:
    batching = mode()
    batching.budget = LEAST_32
    decodes = [running(f"d{index}", 40, computed=39) for index in range(20)]
    batch = next_batch(batching, [running("a", 512), *decodes])
    assert [len(task.token_ids) for task in batch.tasks] == [1] * 20 + [32]


def test_a_tuned_budget_leaves_proposed_tokens_the_whole_budget() -> None:
    batching = mode()
    batch = next_batch(batching, [running("d", 40, computed=39)])
    before = batching.spare_tokens(batch)
    batching.budget = LEAST_32
    assert batching.spare_tokens(batch) == before == 255


def test_the_idle_budget_may_be_larger() -> None:
    batching, prompt = mode(budget=192, idle=512), running("prompt", 1024)
    decode = running("decode", 20, computed=19)
    assert spans(next_batch(batching, [prompt]).tasks) == [(0, 512)]
    assert spans(next_batch(batching, [decode, prompt]).tasks) == [(19, 20), (0, 176)]


def test_a_prompt_deep_in_its_context_leaves_the_rest_to_shallow_ones() -> None:
    decode = running("decode", 20, computed=19)
    prompts = [running("deep", 8192, 3072), running("fresh", 400), running("later", 400)]
    batch = next_batch(mode(chunk=32), [decode, *prompts])
    assert spans(batch.tasks) == [(19, 20), (3072, 3104), (0, 80), (0, 32)]


def test_prompts_deep_in_their_context_do_not_keep_a_short_one_out() -> None:
    decode = running("decode", 20, computed=19)
    prompts = [running("deep", 8192, 3072), running("deeper", 8192, 4096), running("short", 40)]
    batch = next_batch(mode(), [decode, *prompts])
    assert spans(batch.tasks) == [(19, 20), (3072, 3120), (0, 40)]


def test_nothing_to_do() -> None:
    assert mode().next_batch([]) is None


def test_a_budget_without_room_for_both_is_refused() -> None:
    with pytest.raises(AssertionError, match="no room"):
        mode(budget=16)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 24), st.booleans()), min_size=1, max_size=24),
    st.integers(1, 12),
    st.integers(2, 20),
    st.sampled_from([1, 100, 1024]),
)
def test_every_batch_keeps_the_budget_and_every_request_advances_in_order(
    shapes: list[tuple[int, int, bool]], chunk_pages: int, budget_pages: int, span: int
) -> None:
    requests = []
    for index, (length, cached_pages, is_decode) in enumerate(shapes):
        computed = length - 1 if is_decode else min(cached_pages * STRIDE, (length - 1) // STRIDE * STRIDE)
        requests.append(running(str(index), length, computed))
    batching = mode(chunk_pages * STRIDE, budget_pages * STRIDE, span)
    for _ in range(2000):
        left = [r for r in requests if r.num_unplanned]
        if not left:
            return
        batch = next_batch(batching, left)
        assert len({task.request.request_id for task in batch.tasks}) == len(batch.tasks)
        assert sum(padded(task) for task in batch.tasks) <= budget_pages * STRIDE
        for task in batch.tasks:
            assert task.start_position == task.request.num_planned
            assert len(task.token_ids) == 1 or task.start_position % STRIDE == 0
            assert task.completes or task.seq_len % STRIDE == 0
        oldest = next((r for r in left if r.num_unplanned > 1), None)
        assert oldest is None or any(task.request is oldest for task in batch.tasks)
        run(batch)
    raise AssertionError("never finished")


def padded(task: LlmTaskInput) -> int:
    """The tokens that a task takes from the budget."""
    size = len(task.token_ids)
    return 1 if task.request.num_unplanned == 1 else -(-size // STRIDE) * STRIDE


def test_a_budget_without_room_for_a_decode_beside_a_page_is_refused() -> None:
    with pytest.raises(ArtifactError, match="`--token-budget 8` or more"):
        make_mode(BatchSettings(batch_mode="extend-attention", token_budget=4), fake_config(), ALL_ENTRIES)
    make_mode(BatchSettings(batch_mode="extend-attention", token_budget=5), fake_config(), ALL_ENTRIES)


def test_the_default_budget_holds_two_pages_of_any_size() -> None:
    make_mode(BatchSettings(batch_mode="extend-attention"), fake_config(stride=512), ALL_ENTRIES)


def test_a_vmfb_without_extend_entries_is_refused() -> None:
    with pytest.raises(ArtifactError, match="no `extend` entry"):
        make_mode(BatchSettings(batch_mode="extend-attention"), fake_config(), Entries(has_extend=False))


def test_what_the_budget_has_left_counts_pages_of_prompts_by_their_context() -> None:
    """A page at 1,024 tokens of context costs two pages."""
    batching = mode(budget=256)
    decode, prompt = running("d", 20, computed=19), running("p", 2048, computed=1024)
    alone = Batch(EntryFamily.EXTEND, (LlmTaskInput.next_of(decode, 1),))
    beside = Batch(EntryFamily.EXTEND, (*alone.tasks, LlmTaskInput.next_of(prompt, 3 * STRIDE)))
    assert batching.spare_tokens(alone) == 255
    assert batching.spare_tokens(beside) == 255 - 6 * STRIDE
