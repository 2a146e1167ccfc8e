"""Data sets for machines without a network: fetched into one folder here, used from it there.

    unbroken eval stage suite.toml --into /shared/eval-data        where there is a network
    export HF_HOME=/shared/eval-data/hf HF_HUB_OFFLINE=1           where there is none; then evaluate as ever

Every task of the suite is loaded once with its caches below the folder, then once more in a process that is told to
stay offline: what that second process finds is what a compute node will find. `staged.json` records it. One fetch for
all nodes, on one machine, before any GPU is taken; workers never look for data at all (they get finished prompts).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .... import atomic
from ....errors import EvaluationError, UnbrokenError
from ....journal import codec
from ...contracts import Suite, Task
from ...suite.registry import get_harness

MANIFEST = "staged.json"


@dataclass(frozen=True)
class StagedTask:
    """What is known of one task's data."""

    task: str
    documents: int
    source: str
    """The data set's name, or the file that it is read from."""
    problem: str = ""
    """Not empty: it could not be had."""


def offline_environment(folder: Path) -> dict[str, str]:
    """The variables under which harnesses find staged data, and nothing else."""
    return {
        "HF_HOME": str(folder / "hf"),
        "HF_DATASETS_CACHE": str(folder / "hf" / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "NLTK_DATA": str(folder / "nltk"),
    }


def stage_suite(suite: Suite, into: Path, *, only_check: bool = False) -> list[StagedTask]:
    """Fetches the data of every task into a folder, proves that they are found offline, and returns what was found.

    With `only_check` nothing is fetched. Raises EvaluationError when the child process itself fails; a task whose
    data cannot be had is one StagedTask with a problem.
    """
    into = into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    if not only_check:
        online = {k: v for k, v in offline_environment(into).items() if "OFFLINE" not in k}
        fetched = _child(suite, online, without=("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
        if any(t.problem for t in fetched):
            return fetched
    found = _child(suite, offline_environment(into))
    atomic.write_json(into / MANIFEST, {"suite": suite.name, "tasks": [codec.encode(t) for t in found]})
    return found


def _child(suite: Suite, more: Mapping[str, str], without: Sequence[str] = ()) -> list[StagedTask]:
    """Looks at every task in a process of its own: libraries read these variables when they are imported."""
    env = {k: v for k, v in os.environ.items() if k not in without} | dict(more)
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-m", "unbroken.evaluate.harness.lm_eval.staging"],
        input=json.dumps(codec.encode(suite)),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise EvaluationError(
            f"looking at the data failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}",
            where=suite.name,
        )
    return [codec.decode(StagedTask, v) for v in json.loads(lines[-1])]


def look(suite: Suite) -> list[StagedTask]:
    """Loads the data of every task with the caches of this process; groups are taken apart."""
    out: list[StagedTask] = []
    for task in suite.tasks:
        harness = get_harness(task.harness)
        try:
            leaves = harness.expand(task, suite)
        except UnbrokenError as e:
            out.append(StagedTask(task.name, 0, "", str(e)))
            continue
        out += [_look_at(leaf, suite) for leaf in leaves]
    return out


def _look_at(task: Task, suite: Suite) -> StagedTask:
    harness = get_harness(task.harness)
    count = getattr(harness, "data_of", None)
    if count is None:
        return StagedTask(task.name, 0, f"(harness '{task.harness}' stages nothing)")
    try:
        documents, source = count(task, suite)
    except UnbrokenError as e:
        return StagedTask(task.name, 0, "", str(e))
    return StagedTask(task.name, documents, source)


def main() -> int:
    """The child: a suite on stdin, StagedTasks as the last line of stdout."""
    said = os.dup(1)
    os.dup2(2, 1)
    suite = codec.decode(Suite, json.load(sys.stdin))
    os.write(said, (json.dumps([codec.encode(t) for t in look(suite)]) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
