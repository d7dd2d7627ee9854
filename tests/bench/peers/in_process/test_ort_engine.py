from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.peers.in_process.arguments import Arguments
from bench.peers.in_process.ort_engine import MAX_BATCH, GeneratorBatch, Generators, StaticBatches, padded


class Rows:
    """A batch whose rows all get the same token."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._token_id = 0

    def next_token_ids(self) -> list[int]:
        self._token_id += 1
        return [self._token_id] * self._rows


class Begun:
    """Begins batches, and remembers them."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[list[int]], int]] = []

    def __call__(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Rows:
        self.batches.append(([list(prompt) for prompt in prompts], max_tokens))
        return Rows(len(prompts))


def test_requests_for_as_many_tokens_are_one_batch_and_others_wait() -> None:
    begun = Begun()
    engine = StaticBatches(begun)
    for key, max_tokens in ((0, 2), (1, 3), (2, 2)):
        engine.add(key, [key], max_tokens)
    assert engine.step() == [(0, 1), (2, 1)]
    engine.add(3, [3], 3)
    assert engine.step() == [(0, 2), (2, 2)]
    assert engine.is_busy()
    assert engine.step() == [(1, 1), (3, 1)]
    assert begun.batches == [([[0], [2]], 2), ([[1], [3]], 3)]
    for _ in range(2):
        engine.step()
    assert not engine.is_busy()


def test_a_batch_has_a_largest_size() -> None:
    engine = StaticBatches(Begun())
    for key in range(MAX_BATCH + 1):
        engine.add(key, [key], 1)
    assert len(engine.step()) == MAX_BATCH
    assert engine.step() == [(MAX_BATCH, 1)]


class Generator:
    """Stands in for the engine's."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def append_tokens(self, rows: Any) -> None:
        self.calls.append(f"append {rows}")

    def generate_next_token(self) -> None:
        self.calls.append("generate")

    def get_next_tokens(self) -> tuple[float, ...]:
        return (7.0, 8.0)


def test_the_prompts_are_computed_with_the_first_token() -> None:
    generator = Generator()
    batch = GeneratorBatch(generator, "rows")
    assert [batch.next_token_ids() for _ in range(2)] == [[7, 8], [7, 8]]
    assert generator.calls == ["append rows", "generate", "generate"]


def test_shorter_prompts_are_padded_on_the_right() -> None:
    assert padded([[5, 6, 7], [8]], 2) == [[5, 6, 7], [8, 2, 2]]


class Settings(dict[str, Any]):
    """Stands in for Config and GeneratorParams."""

    def __init__(self, _: object) -> None:
        super().__init__()

    def overlay(self, text: str) -> None:
        self["overlay"] = text

    def set_search_options(self, **options: Any) -> None:
        self.update(options)


class Recorded(Generator):
    """A generator that keeps its parameters."""

    made: Recorded

    def __init__(self, model: Any, params: Settings) -> None:
        super().__init__()
        self.model, self.params = model, params
        Recorded.made = self


def test_no_answer_ends_before_its_last_token(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text('{"model": {"pad_token_id": 2}}', encoding="utf-8")
    genai = SimpleNamespace(
        Config=Settings, Model=lambda config: config, GeneratorParams=Settings, Generator=Recorded
    )
    batch = Generators(genai, Arguments(tmp_path, 0, 3, None))([[5, 6, 7], [8]], 10)
    batch.next_token_ids()
    assert '"intra_op_num_threads": 3' in Recorded.made.model["overlay"]
    assert Recorded.made.params == {"batch_size": 2, "min_length": 13, "max_length": 13, "do_sample": False}
    assert Recorded.made.calls[0] == "append [[5 6 7]\n [8 2 2]]"
