"""The page of a hang shows who waited for whom, in groups, also of a thousand ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.run_folder import RunFolder
from unbroken.detect import ProcessInfo, RankStep, explain_hang
from unbroken.progress import RunDir
from unbroken.progress.rundir import WAITING
from unbroken.recover.supervise.attempt.hang import write_picture
from unbroken.status import write_report

pytestmark = pytest.mark.made_up


def make_page(folder: Path, ranks: int) -> str:
    made = RunFolder(RunDir(folder / "run"))
    made.attempt()
    made.steps(30)
    made.incident("hung", back_to=20)
    made.end()
    frames = ("all_reduce (torch/distributed/distributed_c10d.py:100)", "main (<t>.py:9)")
    waits = ProcessInfo(1, "S", "", frames, "", site="main (<t>.py:9)")
    looks = dict.fromkeys(range(ranks), waits)
    looks[7] = replace(waits, frames=("load_batch (data.py:3)",), site="load_batch (data.py:3)")
    picture = explain_hang(looks, {r: RankStep(29) for r in looks})
    write_picture(picture, made.run_dir.evidence(1) / WAITING)
    return write_report(made.run_dir).read_text()


@pytest.mark.parametrize("ranks", [16, 1000])
def test_a_hang_is_shown_in_groups(tmp_path: Path, ranks: int) -> None:
    text = make_page(tmp_path, ranks)
    assert "<b>waits for its data loader at load_batch (data.py:3), after step 29</b>" in text
    assert "missed: <code>all_reduce at main (&lt;t&gt;.py:9)</code>" in text
    assert f"0-6, 8-{ranks - 1}" in text and len(text) < 200_000


@pytest.mark.parametrize("torn", ["", "{}", '{"groups": [1], "culprits": [], "why": ""}'])
def test_a_picture_that_cannot_be_read_is_left_out(tmp_path: Path, torn: str) -> None:
    make_page(tmp_path, 8)
    run = RunDir(tmp_path / "run")
    (run.evidence(1) / WAITING).write_text(torn)
    assert "who waits for whom" not in write_report(run).read_text()
