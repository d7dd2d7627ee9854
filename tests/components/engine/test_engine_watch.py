from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.engine.engine_watch import LOOK_S, MAX_INVOCATIONS, EngineWatch
from shortfin_apps.llm.contract.abi import EntryClass
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import fake_config


class Watched:
    """A rig whose turns are noted as the engine's thread does."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.now_s = 100.0
        self.watch = EngineWatch(rig.engine, lambda: self.now_s)
        self.stats = rig.engine.stats()

    def step(self) -> None:
        self.rig.step()
        stats = self.rig.engine.stats()
        if self.watch.is_on:
            self.watch.note(self.stats, stats)
        self.stats = stats

    def run(self) -> None:
        while self.rig.engine.has_work:
            self.now_s += 0.01
            self.step()


@given(st.lists(st.tuples(st.integers(1, len(PROMPT)), st.integers(1, 6)), min_size=1, max_size=6))
def test_what_is_recorded_adds_up_to_the_counters(requests: list[tuple[int, int]]) -> None:
    watched = Watched(make_rig(fake_config(pages=64)))
    watched.watch.look(0)
    for index, (length, max_tokens) in enumerate(requests):
        watched.rig.engine.add(call(f"a.{index}", PROMPT[:length], max_tokens=max_tokens))
    watched.run()
    mixes = watched.watch.look(0).invocations
    for name, counts in watched.stats.entries.items():
        of_entry = [mix for mix in mixes if mix.entry == name]
        assert sum(mix.prefill_tokens for mix in of_entry) == counts.prefill_tokens.total
        assert sum(mix.decode_tokens for mix in of_entry) == counts.decode_tokens.total
        assert sum(mix.padded_tokens for mix in of_entry) == counts.padded_tokens
        assert len(of_entry) == counts.invocations
    assert [mix.at_s for mix in mixes] == sorted(mix.at_s for mix in mixes)
    assert {mix.serial for mix in mixes} == set(range(1, max(mix.serial for mix in mixes) + 1))


def test_a_look_gets_the_steps_behind_the_last_one_it_has() -> None:
    watched = Watched(make_rig(fake_config(pages=64)))
    watched.watch.look(0)
    watched.rig.engine.add(call("a.0", PROMPT, max_tokens=9))
    watched.run()
    all_of_them = watched.watch.look(0).invocations
    assert watched.watch.look(all_of_them[2].serial).invocations == all_of_them[3:]
    assert watched.watch.look(all_of_them[-1].serial).invocations == ()


def test_nothing_is_recorded_before_a_look_or_long_after_it() -> None:
    watched = Watched(make_rig(fake_config(pages=64)))
    watched.rig.engine.add(call("a.0", PROMPT, max_tokens=4))
    watched.run()
    assert not watched.watch.is_on
    assert watched.watch.look(0).invocations == ()
    assert watched.watch.is_on
    watched.now_s += LOOK_S + 0.1
    watched.rig.engine.add(call("a.1", PROMPT, max_tokens=4))
    watched.run()
    assert not watched.watch.is_on
    assert watched.watch.look(0).invocations == ()


def test_only_so_many_are_kept() -> None:
    watched = Watched(make_rig(fake_config(pages=64, max_seq_len=4096)))
    for index in range(MAX_INVOCATIONS // 16):
        watched.watch.look(0)
        watched.rig.engine.add(call(f"a.{index}", PROMPT, max_tokens=20))
        watched.run()
    mixes = watched.watch.look(0).invocations
    assert len(mixes) == MAX_INVOCATIONS
    assert mixes[0].serial > 1


def test_entries_that_draw_tokens_are_left_out() -> None:
    rig = make_rig(fake_config(pages=64), sample_sizes=(4,), mode="extend-attention")
    watched = Watched(rig)
    watched.watch.look(0)
    rig.engine.add(call("a.0", PROMPT, max_tokens=4, temperature=1.0, seed=1))
    watched.run()
    classes = {mix.entry_class for mix in watched.watch.look(0).invocations}
    assert any(name.startswith("sample") for name in watched.stats.entries)
    assert classes == {EntryClass.STATIC, EntryClass.DYNAMIC}  # `decode` and `extend`
