"""Retention removes what the rule says, never the last one that verifies, and never raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import flip_bit, save_small
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.catalogue.contents import Found
from unbroken.checkpoint.catalogue.retention import (
    GRACE_S,
    Retention,
    apply,
    decide,
    pin_checkpoint,
    read_pins,
    unpin_checkpoint,
)
from unbroken.checkpoint.format.manifest import COMMITTED, data_name
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import NoCheckpoint, StorageError, UsageError
from unbroken.progress.records.candidate import folder_name

NOW = 1_800_000_000.0


def found(step: int, attempt: int = 1, status: str = "committed", age: float = 10_000.0) -> Found:
    return Found(folder_name(step, attempt), step, attempt, status, NOW - age, 1, 6, "disk")


def test_the_rule() -> None:
    all_of_them = [found(s) for s in (100, 200, 300, 400, 500, 600)]
    names = {f.name for f in all_of_them}
    decision = decide(all_of_them, Retention(2, keep_every=300), good=names, now=NOW)
    assert sorted(decision.keep) == [folder_name(s, 1) for s in (300, 500, 600)]
    assert sorted(decision.remove) == [folder_name(s, 1) for s in (100, 200, 400)]


def test_a_rollback_makes_the_spike_the_oldest() -> None:
    steps = [found(800, 1), found(1000, 1), found(900, 2)]
    decision = decide(steps, Retention(1), good={f.name for f in steps}, now=NOW)
    assert list(decision.keep) == [folder_name(900, 2)]


def test_unfinished_ones() -> None:
    young, old = found(300, status="incomplete", age=5), found(100, status="incomplete", age=GRACE_S + 1)
    ahead = found(400, status="incomplete", age=GRACE_S + 1)
    decision = decide([young, old, ahead, found(200)], Retention(1), good=[found(200).name], now=NOW)
    assert list(decision.remove) == [old.name]


statuses = st.sampled_from(
    ["committed", "committed", "committed", "incomplete", "damaged", "too_new", "unreadable"]
)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_whatever_lies_there_something_good_stays(data: Any) -> None:
    some = [
        found(s, a, data.draw(statuses), data.draw(st.sampled_from([1.0, 5000.0])))
        for s, a in data.draw(st.sets(st.tuples(st.integers(1, 9), st.integers(1, 3)), max_size=10))
    ]
    sound = [f for f in some if f.committed]
    bad = {f.name for f in sound if data.draw(st.booleans())}
    good = {f.name for f in sound if f.name not in bad and data.draw(st.booleans())}
    held = {f.name: "held" for f in some if data.draw(st.integers(0, 4)) == 0}
    rule = Retention(data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3)))
    decision = decide(some, rule, held=held, good=good, bad=bad, now=NOW)
    assert set(decision.keep) | set(decision.remove) == {f.name for f in some}
    assert not set(decision.keep) & set(decision.remove)
    assert not set(decision.remove) & set(held)
    order = sorted(some, key=lambda f: (f.attempt, f.step))
    for f in some:
        if f.name in decision.remove and f.status != "incomplete":
            newer = {g.name for g in order[order.index(f) + 1 :]}
            assert newer & good & set(decision.keep), "something newer that verifies stays"
    usable = [f for f in sound if f.name not in bad]
    kept = [f for f in usable if f.name in decision.keep]
    assert len(kept) >= min(rule.keep_last, len(usable))


def test_it_removes_and_says_how_much(tmp_path: Path) -> None:
    names = [save_small(tmp_path, s) for s in (1, 2, 3, 4)]
    storage = PosixStorage(tmp_path)
    plan = apply(storage, Retention(2), verified=names, dry_run=True)
    assert sorted(plan.removed) == names[:2]
    assert storage.folders() == names
    outcome = apply(storage, Retention(2), verified=names)
    assert (sorted(outcome.removed), outcome.freed_bytes, outcome.errors) == (names[:2], plan.freed_bytes, {})
    assert outcome.freed_bytes > 10_000
    assert storage.folders() == names[2:]
    assert apply(storage, Retention(2), verified=names).removed == {}


def test_the_last_one_that_verifies_stays(tmp_path: Path) -> None:
    """keep=1, and the newest ones are damaged where no listing sees it."""
    names = [save_small(tmp_path, s) for s in (1, 2, 3, 4)]
    for name in names[2:]:
        flip_bit(tmp_path / name / data_name(1), -1)
    storage = PosixStorage(tmp_path)
    outcome = apply(storage, Retention(1))
    assert list(outcome.removed) == names[:1]
    assert set(outcome.errors) == set(names[2:])
    assert catalogue.newest(storage).name == names[1]


def test_nothing_verifies_nothing_goes(tmp_path: Path) -> None:
    names = [save_small(tmp_path, s) for s in (1, 2)]
    for name in names:
        flip_bit(tmp_path / name / data_name(0), -1)
    outcome = apply(PosixStorage(tmp_path), Retention(1))
    assert outcome.removed == {}
    assert PosixStorage(tmp_path).folders() == names


def test_a_lease_keeps(tmp_path: Path) -> None:
    names = [save_small(tmp_path, s) for s in (1, 2, 3)]
    storage = PosixStorage(tmp_path)
    pin_checkpoint(storage, names[0], "eval-7", 3600, "evaluation of mmlu", now=NOW)
    outcome = apply(storage, Retention(1), verified=names, now=NOW)
    assert list(outcome.removed) == [names[1]]
    assert outcome.kept[names[0]] == "held by eval-7 (evaluation of mmlu)"
    assert catalogue.verify(tmp_path / names[0]).ok, "a lease file is no damage"
    assert read_pins(storage, names[0], now=NOW + 4000) == []
    unpin_checkpoint(storage, names[0], "eval-7")
    assert list(apply(storage, Retention(1), verified=names, now=NOW).removed) == [names[0]]
    with pytest.raises(NoCheckpoint):
        pin_checkpoint(storage, names[0], "eval-7", 3600)
    for wrong in ("", "a/b", "x" * 200):
        with pytest.raises(UsageError):
            pin_checkpoint(storage, names[2], wrong, 1)


def test_a_lease_that_cannot_be_read_still_keeps(tmp_path: Path) -> None:
    names = [save_small(tmp_path, s) for s in (1, 2)]
    (tmp_path / names[0] / "lease-x.json").write_bytes(b"{")
    assert apply(PosixStorage(tmp_path), Retention(1), verified=names).removed == {}


class Race(PosixStorage):
    """A storage on which a lease is taken just before the marker goes."""

    taken = False

    def delete(self, name: str) -> None:
        if name.endswith(COMMITTED) and not self.taken:
            self.taken = True
            pin_checkpoint(self, name.split("/")[0], "eval", 3600, now=NOW)
        super().delete(name)


def test_a_lease_taken_at_the_last_moment_wins(tmp_path: Path) -> None:
    names = [save_small(tmp_path, s) for s in (1, 2)]
    outcome = apply(Race(tmp_path), Retention(1), verified=names, now=NOW)
    assert outcome.removed == {}
    assert catalogue.verify(tmp_path / names[0]).ok


class Failing(PosixStorage):
    """A storage that refuses one operation."""

    def __init__(self, root: Path, broken: str) -> None:
        super().__init__(root)
        self.broken = broken

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("broken"):

            def refuse(*_: Any, **__: Any) -> None:
                raise StorageError("Input/output error", where="the test")

            return refuse
        return super().__getattribute__(name)


@pytest.mark.parametrize("broken", ["folders", "files", "list", "read", "delete", "delete_folder"])
def test_it_never_raises(tmp_path: Path, broken: str) -> None:
    names = [save_small(tmp_path, s) for s in (1, 2, 3)]
    outcome = apply(Failing(tmp_path, broken), Retention(1), verified=names)
    assert outcome.errors
    assert catalogue.newest(PosixStorage(tmp_path)).step == 3


def test_rules_that_cannot_be() -> None:
    for wrong in ({"keep_last": 0}, {"keep_every": -1}):
        with pytest.raises(UsageError):
            Retention(**wrong)
