"""One call of lm_eval's `simple_evaluate`, held to one process and, for code, to the data kept beside the prompts."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...contracts import Json
from .task_index import quiet_lm_eval


def simple_evaluate(recipe: Mapping[str, Json], lm: Any, manager: Any, *, unsafe: bool) -> Any:
    """lm_eval's `simple_evaluate` with a recipe's arguments; what it prints on the way is dropped."""
    lm_eval = quiet_lm_eval()
    options = dict(recipe["options"])
    # A metric that runs code asks for this when it is imported, also where nothing is run.
    os.environ.setdefault("HF_ALLOW_CODE_EVAL", "1")
    with contextlib.redirect_stdout(io.StringIO()), _without_environment():
        return lm_eval.simple_evaluate(
            lm,
            tasks=[recipe["spec"]],
            task_manager=manager,
            num_fewshot=recipe["shots"],
            limit=recipe["limit"],
            apply_chat_template=recipe["chat"],
            confirm_run_unsafe_code=unsafe,
            log_samples=True,
            **options,
        )


@contextlib.contextmanager
def _without_environment() -> Iterator[None]:
    """Inside, lm_eval does not ask pip, git and the driver about the machine: half a second a task, no part of a score.

    Where there is no repository, git would complain on the user's terminal for every task.
    """
    import lm_eval.evaluator as evaluator

    before = evaluator.add_env_info, evaluator.get_git_commit_hash
    evaluator.add_env_info = lambda results: None
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        evaluator.add_env_info, evaluator.get_git_commit_hash = before


def keep_data(task: Any, folder: Path) -> str:
    """Keeps the task's data set beside its prompts: in the sandbox no other cache can be written to."""
    place = folder / "data"
    shutil.rmtree(place, ignore_errors=True)  # of an earlier preparation, perhaps of other data
    task.dataset.save_to_disk(str(place))
    return str(place)


@contextlib.contextmanager
def kept_data(place: str | None) -> Iterator[None]:
    """Inside, data sets are the one that `keep_data` kept; nothing changes without one."""
    if not place:
        yield
        return
    import datasets

    def load_dataset(*args: Any, **more: Any) -> Any:
        return datasets.load_from_disk(place)

    before = datasets.load_dataset
    datasets.load_dataset = load_dataset
    try:
        yield
    finally:
        datasets.load_dataset = before


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Inside, lm_eval's bootstrap stays in this process: every scoring worker has one CPU, not all of them.

    The resamples, and so the standard errors, are the same.
    """
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
