"""Shared by the tests of evaluations: suites of fake tasks, and runs of the real coordinator over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unbroken.evaluate.contracts import ModelSpec, Report, Suite, Task
from unbroken.evaluate.engines import Slot
from unbroken.evaluate.engines.live import Watcher
from unbroken.evaluate.engines.local import LocalEngine
from unbroken.evaluate.model.cache import Places
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.run.coordinator import Coordinator
from unbroken.evaluate.run.job import Job, Launchers
from unbroken.evaluate.run.settings import Settings
from unbroken.testing.evaluation import BACKEND, HARNESS, ThreadScoring, fake_model


def fake_task(name: str, **options: Any) -> Task:
    return Task(name, HARNESS, options=options)


def fake_suite(*tasks: Task) -> Suite:
    return Suite("fakes", tasks)


def coordinator(
    tmp: Path,
    suite: Suite,
    *,
    workers: int = 2,
    out: str = "out",
    spec: ModelSpec | None = None,
    watcher: Watcher | None = None,
    launchers: Launchers | None = None,
    **settings: Any,
) -> Coordinator:
    model = tmp / "model"
    if not model.exists():
        fake_model(model)
    spec = spec or ModelSpec(str(model), BACKEND, block=8)
    folder = EvalDir(tmp / out)
    slots = tuple(Slot(f"w{i}") for i in range(workers))
    places = Places(tmp / "shm", (tmp / "disk",))
    launchers = launchers or Launchers(LocalEngine(folder.root / "logs", threads=1), ThreadScoring)
    chosen = {"slots": slots, "beat_s": 0.2, "places": places, "load_s": 0.5, **settings}
    return Coordinator(Job(suite, spec, folder), launchers, Settings(**chosen), watcher=watcher)


def evaluate(tmp: Path, suite: Suite, **more: Any) -> Report:
    return coordinator(tmp, suite, **more).run()


def numbers(report: Report) -> dict[str, list[tuple[str, float, float | None]]]:
    """Scores as they are compared: exactly."""
    return {
        s.task: [(m.name, m.value, m.stderr) for m in s.metrics] for s in (*report.scores, *report.groups)
    }
