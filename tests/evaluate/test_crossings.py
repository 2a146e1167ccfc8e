"""Features that meet: a watch on imported checkpoints, on a run that is stopped and started; evaluations side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.catalogue.holds import holds
from unbroken.checkpoint.catalogue.retention import read_pins
from unbroken.checkpoint.storage import open_storage
from unbroken.checkpoint.storage.base import Storage
from unbroken.errors import RunInterrupted
from unbroken.evaluate.contracts import Metric, ModelSpec, Report, Score, Suite, Task
from unbroken.evaluate.model import locate
from unbroken.evaluate.model.cache import copies
from unbroken.evaluate.model.sources import FolderSource
from unbroken.evaluate.plan.priors import START, load_book
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.run.watching.watch import Watch, read_curve, watch
from unbroken.testing.evaluation import fake_model

from .evaluating import coordinator, evaluate, fake_suite, fake_task, numbers

SUITE = Suite("s", (Task("t"),))


def report(name: str, value: float) -> Report:
    score = Score("t", (Metric("acc", value, 0.01),), 100, 100, checkpoint=name)
    return Report("s", name, name, 0.0, 1.0, (score,), {}, (), (), (), 1.0, 1.0, 1.0)


# ------------------------------------------------------------------------------------- watch x import


def saved(kind: str, folder: Path, state: dict[str, Any]) -> Path:
    """Weights as other tools leave them."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    if kind == "a Hugging Face folder":
        save_file(state, folder / "model.safetensors")
        return folder
    what = {"model": state, "step": 7} if kind == "a training state" else state
    torch.save(what, folder / "weights.pt")
    return folder / "weights.pt"


@pytest.mark.parametrize("kind", ["a Hugging Face folder", "a training state", "a bare state dict"])
def test_an_imported_checkpoint_is_watched_like_one_of_the_run(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from unbroken.checkpoint.convert.imports import import_checkpoint

    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    state = {n: torch.arange(6.0).reshape(2, 3) + i for i, n in enumerate(names)}
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text("{}")
    storage = open_storage(tmp_path / "run" / "checkpoints")
    import_checkpoint(saved(kind, tmp_path / "theirs", state), storage, step=7)
    seen: list[dict[str, Any]] = []

    def look_at(suite: Suite, spec: ModelSpec, folder: EvalDir) -> Report:
        seen.append(load_file(Path(spec.source) / "model.safetensors"))
        assert (Path(spec.source) / "config.json").exists()
        return report(spec.name, 0.5)

    asked = Watch(SUITE, ModelSpec("checkpoint"), tmp_path / "out", like=like, once=True, poll_s=0.05)
    for _ in range(2):
        points = watch(asked, storage, look_at, lambda _: None)
    assert [(p.step, p.failed) for p in points] == [(7, "")] and len(seen) == 1, "once"
    assert set(seen[0]) == set(names) and all(torch.equal(seen[0][n], state[n]) for n in names)


# --------------------------------------------------------------------------------- watch x stop x start


def commit(storage: Storage, step: int, attempt: int) -> str:
    """A checkpoint as `listing` sees it."""
    import torch

    from unbroken.checkpoint.capture import direct
    from unbroken.checkpoint.format.manifest import Sharding
    from unbroken.checkpoint.format.position import Position

    box = ((0,), (2,))
    records = {"model.w": ("float32", Sharding((2,), (), (), (), (box,)))}
    values = {"model": {"w": {"$": "tensor", "name": "model.w"}}}
    stamp = direct.Stamp("run", attempt, step, 0, 1, Position(0, ((0, step),)))
    part = direct.write_pieces(storage, records, lambda _: torch.full((2,), float(step)), values, stamp)
    return direct.commit(storage, [part]).name


def test_a_watch_that_is_stopped_goes_on_with_a_run_that_was_stopped_and_started(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    storage = open_storage(tmp_path / "run" / "checkpoints")
    first = [commit(storage, step, 1) for step in (10, 20, 30)]
    asked: list[str] = []

    def scored(suite: Suite, spec: ModelSpec, folder: EvalDir) -> Report:
        asked.append(spec.name)
        if asked == first[:2]:
            raise RunInterrupted("stopped: SIGINT")  # in the middle of the second one
        return report(spec.name, 0.5)

    def run() -> list[str]:
        more = Watch(SUITE, ModelSpec("checkpoint"), tmp_path / "out", once=True, poll_s=0.05)
        return [p.name for p in watch(more, storage, scored, lambda _: None)]

    with pytest.raises(RunInterrupted):
        run()
    assert [p.name for p in read_curve(tmp_path / "out")] == first[:1]
    assert holds(storage) == [] and all(read_pins(storage, n) == [] for n in first), (
        "nothing is kept from removal"
    )
    # The run was stopped at 20 and goes on from there: it saves 30 again, as another attempt, and 40.
    second = [commit(storage, step, 2) for step in (30, 40)]
    assert run() == [*first, *second], "each of either attempt, in the order of steps"
    assert asked == [*first[:2], first[1], first[2], *second], "only what was interrupted is asked again"
    assert run() == [*first, *second] and len(asked) == 6, "and nothing twice"


# ----------------------------------------------------------------------------- two evaluations at once


class Counted(FolderSource):
    """Says how often its weights were read, and lets the first read begin when it is told."""

    reads: list[str]
    may_read: threading.Event

    def read(self, name: str, offset: int, size: int) -> bytes:
        self.reads.append(name)
        assert self.may_read.wait(60)
        return super().read(name, offset, size)


@pytest.mark.parametrize("one_is_stopped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_evaluations_at_once_share_one_copy_and_one_file_of_estimates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None], one_is_stopped: bool
) -> None:
    model = fake_model(tmp_path / "model")
    suite = fake_suite(fake_task("a", samples=40, seconds=0.005), fake_task("b", samples=9))
    right = numbers(evaluate(tmp_path, suite, workers=1, out="alone", cache="never"))
    source = Counted(model)
    source.reads, source.may_read = [], threading.Event()
    monkeypatch.setattr(locate, "open_source", lambda _: source)
    estimates = tmp_path / "estimates.json"
    both = [
        coordinator(tmp_path, suite, workers=1, out=out, cache="always", priors=estimates)
        for out in ("x", "y")
    ]
    found: dict[int, Report | BaseException] = {}

    def run(i: int) -> None:
        try:
            found[i] = both[i].run()
        except RunInterrupted as e:
            found[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    eventually(lambda: source.reads, within=30)
    if one_is_stopped:
        source.may_read.set()
        eventually(lambda: both[0].observed.blocks and both[1].observed.blocks, within=60)
        both[0].stop("SIGINT")
    source.may_read.set()
    for t in threads:
        t.join(90)
    reports = [f for f in found.values() if isinstance(f, Report)]
    assert len(reports) == (1 if one_is_stopped else 2), found
    assert all(numbers(r) == right for r in reports)
    weights = [n for n in source.reads if n.endswith(".safetensors")]
    assert len(weights) == len(set(weights)), f"each file is fetched once for both: {weights}"
    assert not list((tmp_path / "shm").rglob("*.safetensors")), "the copy went with the last one"
    assert all(copies(root) == [] for root, _ in both[0].settings.places.roots())
    rows = {r.task: r for r in load_book(estimates).rows.values()}
    assert rows["a"].samples == 40 * len(reports) and rows[START].samples == len(reports)
    if one_is_stopped:
        assert numbers(evaluate(tmp_path, suite, workers=1, out="x")) == right, "it goes on where it was"
