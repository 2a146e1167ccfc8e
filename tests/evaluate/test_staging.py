"""Data are fetched once, proved to be found offline, and missing ones are said before a GPU is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unbroken.cli.main import dispatch
from unbroken.evaluate.contracts import Suite, Task
from unbroken.evaluate.harness.lm_eval.staging import MANIFEST, offline_environment, stage_suite


def plain_task(folder: Path, name: str, rows: int) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "infer.py").write_text("def prompt(row):\n    return row['q']\n")
    (folder / name / "score.py").write_text("def score(row, output):\n    return 1.0\n")
    if rows:
        (folder / name / "data.jsonl").write_text('{"q": "amber"}\n' * rows)


def test_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    plain_task(tmp_path, "here", 7)
    plain_task(tmp_path, "gone", 0)
    suite = Suite(
        "s", tuple(Task(n, harness="plain") for n in ("here", "gone", "nowhere")), folder=str(tmp_path)
    )
    here, gone, nowhere = stage_suite(suite, tmp_path / "data")
    assert (here.documents, here.problem) == (7, "")
    assert "not on this machine" in gone.problem
    assert "there is no task 'nowhere'" in nowhere.problem
    assert not (tmp_path / "data" / MANIFEST).exists(), "only what was found whole is recorded"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_task(tmp_path, "here", 7)
    (tmp_path / "suite.toml").write_text('[suite]\nname = "s"\n[[task]]\nname = "here"\nharness = "plain"\n')
    args = ["eval", "stage", str(tmp_path / "suite.toml"), "--into", str(tmp_path / "data")]
    assert dispatch(args) == 0
    said = capsys.readouterr().out
    assert "here: 7 documents" in said
    assert f"export HF_HOME={tmp_path / 'data' / 'hf'}" in said
    assert "HF_HUB_OFFLINE=1" in said
    assert json.loads((tmp_path / "data" / MANIFEST).read_text())["tasks"][0]["documents"] == 7
    (tmp_path / "here" / "data.jsonl").unlink()
    assert dispatch([*args, "--check", "--json"]) == 52
    out = capsys.readouterr()
    assert "without --check where there is a network" in out.err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lm_eval_tasks_are_staged_below_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (make install-eval)")
    from tests.support.tiny_tasks import write_tiny_tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # whoever fetches is online, whatever is set here
    write_tiny_tasks(tmp_path / "tasks")
    options = {"include": str(tmp_path / "tasks")}
    suite = Suite("s", (Task("tiny_sums", options=options), Task("tiny_group", options=options)))
    found = stage_suite(suite, tmp_path / "data")
    assert [(t.task, t.documents, t.problem) for t in found] == [
        ("tiny_sums", 23, ""), ("tiny_group.tiny_red", 14, ""), ("tiny_group.tiny_blue", 28, ""),
    ]  # fmt: skip
    cached = Path(offline_environment(tmp_path / "data")["HF_DATASETS_CACHE"])
    assert list(cached.rglob("*.arrow"))
    (tmp_path / "tasks" / "sums_test.jsonl").unlink()
    missing = stage_suite(suite, tmp_path / "data", only_check=True)
    assert "data of task 'tiny_sums'" in missing[0].problem
    assert not missing[1].problem
