"""A model that drafts with its own layer, or with an EAGLE-3 head: the answers are those without, to the bit.

The layer's weights are random, so what it drafts is replaced by the known answers, wrong at a place that
changes. What it would have drafted is compared with the reference.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.builder.sources.base import ModelSource
from shortfin_apps.llm.builder.sources.eagle_head import EagleHeadSource
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.draft_layer import DraftLayer
from shortfin_apps.llm.components.engine.drafter import MAX_FAILURES, Queued
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.launch import Launch
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.open import Runtime
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.contract.abi import HIDDEN_PER_SLOT, chosen_place, drafted_place
from shortfin_apps.llm.contract.errors import ArtifactError, InvocationError
from shortfin_apps.llm.contract.self_test_file import SelfTestFile
from shortfin_apps.llm.model.reference.draft import draft, hidden_before, known_hidden
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import ModelFacts
from tests.builder.eagle_files import head_config, write_head
from tests.builder.golden_families import stored_weights
from tests.integration.byte_models import write_byte_model
from tests.integration.generation import open_engine
from tests.integration.known_answers import check, proposing, told
from tests.integration.test_hybrid_speculation import answer
from tests.integration.test_speculation import MODES, answers, calls
from tests.runtimes import RUNTIMES

pytestmark = pytest.mark.slow

STRIDE = 16
SIZES = (1, 4, 8)
OPTIONS = BuildOptions(
    weights="f32",
    kv="f32",
    context_length=256,
    prefill_batch_sizes=(1, 2),
    decode_batch_sizes=SIZES,
    decode_loop_sizes=SIZES,
    extend_sizes=(32,),
    block_seq_stride=STRIDE,
    top_k=8,
)
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Sources:
    """A model that has a draft layer, or the EAGLE-3 head that it drafts with."""

    model: Path
    head: Path | None

    def build(self, out: Path, options: BuildOptions) -> Artifact:
        head = None if self.head is None else str(self.head)
        return build(str(self.model), out, options, QuietProgress(), draft_head=head)

    def open(self) -> ModelSource:
        model = HfDirectorySource(self.model)
        return model if self.head is None else EagleHeadSource(model, self.head)


@pytest.fixture(scope="module", params=["layer", "head"])
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    has_head = request.param == "head"
    model = write_byte_model("qwen35", tmp_path_factory.mktemp("source"), drafts=not has_head)
    if not has_head:
        return Sources(model, None)
    config = head_config(json.loads((model / "config.json").read_text()), draft_vocab_size=100)
    return Sources(model, write_head(tmp_path_factory.mktemp("head"), config))


@pytest.fixture(scope="module")
def artifact(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return sources.build(tmp_path_factory.mktemp("artefact") / "model", OPTIONS)


class Teller(DraftLayer):
    """Drafts what follows in one of `texts`, but for one wrong token; keeps what the layer yields."""

    texts: Sequence[Sequence[int]] = ()
    rows: list[tuple[list[int], Candidates]] = []  # noqa: RUF012  (of one test)
    num_ahead = 0  # drafts made before the tokens of the step before were known

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self._of_launch: dict[int, tuple[Launch, list[int]]] = {}

    def num_worth(self, request: Request, least: float, most: int) -> int:
        if self._ahead is not None:
            return super().num_worth(request, least, most)
        return 0 if self.has_given_up else max(0, min(most, 1 + len(request.token_ids) % 7))

    def _queue(
        self,
        wanted: Mapping[Request, int],
        launches: list[Queued],
        checked: Mapping[Request, int] | None = None,
    ) -> None:
        """Replace the tokens that are drawn, in the device's table, before the next round is queued."""
        runner = self._runner
        launch_drafts = runner.launch_drafts

        def watched(tasks: Sequence[LlmTaskInput], *options: Any) -> Iterator[Launch]:
            known: dict[Request, list[int]] = {}
            for number, launch in enumerate(launch_drafts(tasks, *options)):
                if not number:
                    known = self._known(tasks, checked)
                    self._keep(launch, known)
                self._replace(launch, known, number)
                yield launch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "launch_drafts", watched)
            super()._queue(wanted, launches, checked)

    def _known(
        self, tasks: Sequence[LlmTaskInput], checked: Mapping[Request, int] | None
    ) -> dict[Request, list[int]]:
        """The tokens up to the one from which is drafted, as the host will know them."""
        known = {task.request: list(task.request.token_ids) for task in tasks}
        if checked is None:
            return known
        self.num_ahead += 1
        table, num_slots = self._table(), self._runner.slots._num_slots
        for request, tokens in known.items():
            for left in range(checked[request], -1, -1):
                position = request.slot, len(tokens)
                tokens.append(int(table[chosen_place(num_slots, *position)]))
                if left == 0 or tokens[-1] != table[drafted_place(num_slots, *position)]:
                    break
        return known

    def _table(self) -> Any:
        return self._runner._device.download(self._runner.slots.buffers["last_tokens"]).copy()

    def _keep(self, launch: Launch, known: Mapping[Request, list[int]]) -> None:
        result = self._runner.result(launch)
        for index, tokens in enumerate(known.values()):
            self.rows.append((tokens, result.row(index, with_logits=False)))

    def _replace(self, launch: Launch, known: Mapping[Request, list[int]], number: int) -> None:
        self._runner.wait(launch)
        table, told = self._table(), []
        for request, tokens in known.items():
            told.append(self._told(tokens, number))
            table[self._runner.slots.drafted_place(request.slot, len(tokens) + number)] = max(0, told[-1])
        self._runner.slots.buffers["last_tokens"] = self._runner._device.upload(table)
        self._of_launch[id(launch)] = launch, told

    def _drawn(self, launches: Sequence[Queued]) -> Mapping[Request, Sequence[int]]:
        drafted: dict[Request, list[int]] = defaultdict(list)
        for launch in launches:
            _, told = self._of_launch.pop(id(launch))
            assert isinstance(launch, Launch)
            for task, token_id in zip(launch.batch.tasks, told, strict=True):
                drafted[task.request].append(token_id)
        return drafted

    def _told(self, token_ids: Sequence[int], num_ahead: int) -> int:
        token_id = told(self.texts, token_ids, num_ahead)
        return -1 if token_id is None else token_id


@contextmanager
def drafting(artifact: Artifact, texts: Sequence[Sequence[int]], **options: Any) -> Iterator[Engine]:
    """An engine to which `texts` (prompts with answers) are drafted; some are accepted, some rejected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shortfin_apps.llm.serving.speculative_loading.DraftLayer", Teller)
        patch.setattr(Teller, "texts", texts)
        patch.setattr(Teller, "rows", [])
        with proposing(artifact, EngineSettings(speculative="mtp", **options)) as engine:
            yield engine


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without(artifact: Artifact, runtime: Runtime, mode: BatchSettings) -> None:
    check(artifact, drafting, runtime=runtime, batching=mode)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without_where_requests_are_preempted(
    artifact: Artifact, mode: BatchSettings, depth: int
) -> None:
    check(artifact, drafting, runtime="iree", batching=mode, pages=20, pipeline_depth=depth)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.5, "seed": 3}], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_after_cached_pages_at_every_offset(
    artifact: Artifact, mode: BatchSettings, params: dict[str, Any]
) -> None:
    """Prompts that end at each slot of a page, then the same with the answer and more: from cached pages."""
    text, count = np.random.default_rng(5).integers(0, 256, 4 * STRIDE).tolist(), STRIDE + 3
    turns = []
    with open_engine(artifact, EngineSettings(runtime="iree", prefix_cache="none", batching=mode)) as engine:
        for length in range(STRIDE, 2 * STRIDE + 3):
            prompt = text[:length]
            more: list[int]
            for more in ([], text[length:]):
                prompt = [*prompt, *more]
                turns.append((prompt, answer(engine, prompt, count, **params)))
                prompt = [*prompt, *turns[-1][1][0]]
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in turns]
    with drafting(artifact, texts, runtime="iree", batching=mode) as engine:
        for prompt, expected in turns:
            assert answer(engine, prompt, count, **params) == expected, len(prompt)
        assert engine.stats().cached_tokens > STRIDE * len(turns) // 2


@pytest.mark.parametrize("pages", [None, 24], ids=["roomy", "preempted"])
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_the_layer_drafts_what_the_reference_does(
    sources: Sources, artifact: Artifact, mode: BatchSettings, pages: int | None
) -> None:
    """In the first round of each step, after accepted and rejected drafts: no hidden state is another's."""
    options: dict[str, Any] = {"runtime": "iree", "batching": mode, "prefix_cache": "none", "pages": pages}
    asked = calls(24)
    with open_engine(artifact, EngineSettings(**options)) as engine:
        expected = answers(engine, asked)
    texts = [[*each.prompt_token_ids, *tokens] for each, (tokens, _) in zip(asked, expected, strict=True)]
    with drafting(artifact, texts, **options) as engine:
        answers(engine, asked)
        rows = list(Teller.rows)
    assert len(rows) > 30
    model = sources.open()
    weights = stored_weights(model)
    for text in texts:
        own = [(len(tokens), row) for tokens, row in rows if tokens == text[: len(tokens)]]
        if not own:
            continue
        tokens = np.array(text)
        logits, _, _ = draft(
            model.spec, weights, tokens, hidden_before(known_hidden(model.spec, weights, tokens))
        )
        for length, row in own:
            best = np.sort(logits[length - 1])[::-1][: len(row.values)]
            np.testing.assert_allclose(row.values, best, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_self_test_passes(artifact: Artifact) -> None:
    assert artifact.self_test is not None
    facts = ModelFacts(self_test=SelfTestFile.load(artifact.self_test), same_bits=True)
    with open_engine(artifact, EngineSettings(runtime="iree"), facts) as engine:
        stats = engine.stats()
    assert (stats.self_tests, stats.self_test_failures) == (1, 0)


def test_hidden_states_that_are_not_finite_end_no_request(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLayer, "round_cost", 0.0)
    options: dict[str, Any] = {"runtime": "iree", "batching": MODES[1]}
    asked = calls(20)
    with open_engine(artifact, EngineSettings(**options)) as engine:
        expected = answers(engine, asked)
    with open_engine(artifact, EngineSettings(speculative="mtp", **options)) as engine:
        runner = engine._runner
        states = runner.slots.buffers["hidden_states"]
        nan = np.full(states.shape, np.nan, np.float32)
        step = engine.step

        def spoiled() -> Any:
            runner.slots.buffers["hidden_states"] = runner._device.upload(nan)
            return step()

        engine.step = spoiled  # type: ignore[method-assign]
        assert answers(engine, asked) == expected
        counts = engine.stats().speculation
    assert counts is not None
    assert counts.proposed > counts.accepted == 0
    assert counts.draft_model_s > 0, "nothing was asked of the layer"


def test_a_layer_that_fails_costs_drafts_only(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"runtime": "iree", "batching": MODES[1]}
    asked, failures = calls(20), []

    def fail(*_: Any) -> None:
        failures.append(1)
        raise InvocationError("broken")

    with open_engine(artifact, EngineSettings(**options)) as engine:
        expected = answers(engine, asked)
    monkeypatch.setattr(DraftLayer, "_queue", fail)
    monkeypatch.setattr(DraftLayer, "round_cost", 0.0)
    with open_engine(artifact, EngineSettings(speculative="mtp", **options)) as engine:
        assert answers(engine, asked) == expected
    assert len(failures) == MAX_FAILURES


def test_a_model_without_a_draft_layer_is_refused(sources: Sources, tmp_path: Path) -> None:
    plain = replace(sources, head=None).build(tmp_path / "artefact", replace(OPTIONS, draft_layer=False))
    with (
        pytest.raises(ArtifactError, match="no draft layer, which `--speculative mtp` needs"),
        open_engine(plain, EngineSettings(runtime="iree", speculative="mtp")),
    ):
        pass


def test_more_proposals_than_hidden_states_are_kept_for_are_refused(artifact: Artifact) -> None:
    """Whoever proposes: the draft layer would read other tokens' after they are rejected."""
    settings = EngineSettings(runtime="iree", speculative="ngram", speculative_tokens=HIDDEN_PER_SLOT)
    with (
        pytest.raises(
            ArtifactError, match=r"`--speculative-tokens` is at most 15 .* for a model with a draft layer"
        ),
        open_engine(artifact, settings),
    ):
        pass
