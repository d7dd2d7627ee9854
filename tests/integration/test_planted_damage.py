"""Damage of every kind, and what of a server's ways to prove itself notices it, and what does not.

docs/determinism.md has this table with the time that each check took.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.model.spec import BuildOptions
from tests.conftest import BuildTiny
from tests.integration import damages
from tests.integration.damaged_server import Bench, Check, Damage

pytestmark = pytest.mark.slow

# An entry of each kind, and decodes of one row and of several.
OPTIONS = BuildOptions(
    prefill_batch_sizes=(1,),
    decode_batch_sizes=(1, 4),
    chunk_sizes=(),
    extend_sizes=(64,),
    context_length=256,
)
HASH, LOAD, START, HOURLY, ANSWER, DIR, SAME, DUMP = Check
OF_FILES = {HASH, LOAD, START, ANSWER, DIR, SAME, DUMP, HOURLY}
OF_BUILDS = OF_FILES - {HOURLY}  # it starts so
OF_RUNNING = OF_FILES - {LOAD, START}

# Each damage, and the checks that notice it.
TABLE: dict[str, tuple[Damage, set[Check]]] = {
    "none": (Damage(running=lambda server: None), set()),
    "none in the files": (Damage(to_files=lambda directory: None), set()),
    "a high bit of a weight": (Damage(to_files=damages.flip_weight(14)), {HASH, START, HOURLY, DIR, DUMP}),
    "the lowest bit of a weight": (Damage(to_files=damages.flip_weight(0)), {HASH, HOURLY, DIR, DUMP}),
    "a bit of the VMFB": (Damage(to_files=damages.flip_code), {HASH, LOAD}),
    "a constant of the VMFB": (
        Damage(to_files=damages.turn_back(is_far=False)),
        {HASH, START, HOURLY, DIR, DUMP},
    ),
    "a constant for far positions": (Damage(to_files=damages.turn_back(is_far=True)), {HASH, DIR, DUMP}),
    "a wrong page in a block table, once": (Damage(running=damages.mix_up_pages), {DIR, SAME, DUMP}),
    "a miscompiled entry": (Damage(to_files=damages.miscompile_entry, is_built=True), {START, DIR, SAME}),
    "NaN in a norm": (Damage(to_files=damages.spoil_norm), {HASH, START, HOURLY, ANSWER, DUMP}),
    "NaN in a rare token": (Damage(to_files=damages.spoil_rare_token), {HASH, ANSWER, DUMP}),
    "NaN in a cached page": (Damage(running=damages.change_shared_page(damages.spoil_page)), {ANSWER, DUMP}),
    "another tokenizer": (Damage(to_files=damages.swap_tokens), {HASH, DIR}),
    "a swapped rotation": (Damage(to_files=damages.swap_rotation, is_built=True), {START}),
    "a stale page in the prefix cache": (
        Damage(running=damages.change_shared_page(damages.make_stale)),
        {DIR, DUMP},
    ),
    "another seed than the receipt's": (Damage(running=damages.draw_by_another_seed), {DIR, SAME}),
}


@pytest.fixture(scope="module")
def sound(build_tiny: BuildTiny) -> Artifact:
    return build_tiny(OPTIONS)


@pytest.mark.parametrize("name", TABLE)
def test_damage_is_noticed_by_these_and_by_no_other(sound: Artifact, tmp_path: Path, name: str) -> None:
    damage, expected = TABLE[name]
    observed = Bench(sound.vmfb.parent, tmp_path).observe(damage)
    assert observed.by == expected
    assert observed.caught.keys() <= possible(damage)


def possible(damage: Damage) -> set[Check]:
    if damage.running is not None:
        return OF_RUNNING
    return OF_BUILDS if damage.is_built else OF_FILES


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("a high bit of a weight", set()),
        ("a bit of the VMFB", {HOURLY, ANSWER, DIR, SAME, DUMP}),  # it never runs
        ("NaN in a norm", {DIR, SAME}),  # no request has a receipt
    ],
)
def test_every_check_is_gone_through_that_there_can_be(
    sound: Artifact, tmp_path: Path, name: str, missing: set[Check]
) -> None:
    damage, _ = TABLE[name]
    assert Bench(sound.vmfb.parent, tmp_path).observe(damage).caught.keys() == OF_FILES - missing
