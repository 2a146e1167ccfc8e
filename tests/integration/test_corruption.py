"""Wrong numbers without an error, in whole runs: replicas that differ, and a card that does not agree with itself."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.progress.records.steps import read_steps

NewRun = Any
HEAD = """
import os, sys, torch
from unbroken.train import trainer
from unbroken.train.__main__ import main
from unbroken.progress import attach

step = trainer.Trainer.train_step
"""
FLIP = (
    HEAD
    + """
def flipping(self, *arguments):
    out = step(self, *arguments)
    if self.step == 33 and self.world.rank == 1 and attach().attempt == 1:
        with torch.no_grad():  # one bit of one weight of one rank, as a memory cell would
            self.buckets.buckets[0].weights.view(torch.int32)[11] ^= 1 << 12
    return out

trainer.Trainer.train_step = flipping
sys.exit(main())
"""
)
NAN = (
    HEAD
    + """
make = trainer.Trainer._make_gradients

def once(self, *arguments):
    first = self.step == 33 and not getattr(self, "hit", False)
    if first and self.world.rank == 1 and attach().attempt == 1:
        take = self.buckets.before_reduce
        def wrong(i, gradients):
            if i == 0:
                gradients[2] = float("nan")
            take(i, gradients)
        self.buckets.before_reduce = wrong
        norm = make(self, *arguments)
        self.buckets.before_reduce, self.hit = take, True
        return norm
    return make(self, *arguments)

trainer.Trainer._make_gradients = once
sys.exit(main())
"""
)
OPTIONS = [
    "--steps", "70", "--global-batch", "6", "--seq", "32", "--snapshot-every", "5", "--persist-every", "10", "--keep", "5",
]  # fmt: skip


def losses(run: Any, attempt: int) -> dict[int, float]:
    return {s.step: s.loss for s in read_steps(run.run_dir.steps(attempt))}


@pytest.mark.slow
def test_replicas_that_differ_are_taken_back_to_where_they_were_equal(new_run: NewRun) -> None:
    run = new_run("--nodes", "3", "--nproc", "1", "--spares", "1", script=FLIP, args=OPTIONS).start()
    assert run.wait(240) == 0, run.output
    (incident,) = run.incidents()
    assert incident["kind"] == "corrupted" and incident["action"] == "restart_elsewhere", incident
    verdict = incident["verdict"]
    assert verdict["faulty"]["rank"] == 1 and verdict["cordon"] == [verdict["faulty"]["node"]]
    assert 0.9 < verdict["confidence"] < 1
    (rollback,) = run.journal("rollback")
    assert rollback["before"] == 30 and rollback["skip"] == []
    (last,) = [r for r in run.journal("replicas") if r["step"] == 60]
    assert last["equal"] and last["compared"] > 10
    first, second = (losses(run, attempt) for attempt in (1, 2))
    assert all(first[s] == second[s] for s in (31, 32, 33)) and min(second) == 31 and max(second) == 70


@pytest.mark.slow
def test_a_card_that_does_not_agree_with_itself_is_left_out(new_run: NewRun) -> None:
    run = new_run("--nodes", "2", "--nproc", "1", "--spares", "1", script=NAN, args=OPTIONS).start()
    assert run.wait(240) == 0, run.output
    (incident,) = run.incidents()
    assert incident["action"] == "restart_elsewhere" and incident["verdict"]["decided_by"] == "corruption"
    assert incident["verdict"]["faulty"]["rank"] == 1 and run.journal("rollback") == []
    assert run.journal("cordon")
