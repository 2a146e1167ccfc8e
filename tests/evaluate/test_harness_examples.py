"""The examples do what they say, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unbroken.cli.main import dispatch
from unbroken.evaluate.scoring.sandbox import sandbox_kind
from unbroken.testing.fake_endpoint import FakeEndpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FAKE = ["--model", "fake", "--backend", "unbroken.testing.fake_models:FakeBackend", "--workers", "1"]


def run(
    capsys: pytest.CaptureFixture[str], suite: str, out: Path, *more: str
) -> tuple[int, dict[str, dict[str, object]]]:
    code = dispatch(
        ["eval", "run", str(EXAMPLES / suite / "suite.toml"), "--out", str(out), *FAKE, "--json", *more]
    )
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    scores = json.loads(said[-1])["scores"] if said else []
    return code, {s["task"]: s for s in scores}


def test_tasks_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = iter(["Charming. [[9]]", "I cannot say.", "[[4]]", "Very polite: [[8]]"])
    with FakeEndpoint(model="judge", reply=lambda messages: next(replies)) as judge:
        monkeypatch.setenv("JUDGE_URL", judge.url)
        code, scores = run(capsys, "evaluate_own_tasks", tmp_path / "out")
    assert code == 0
    assert set(scores) == {"sums", "likely", "programs", "judged"}
    assert scores["sums"]["samples"] == 63
    assert [m["name"] for m in scores["likely"]["metrics"]] == ["acc", "acc_norm"]  # type: ignore[attr-defined]
    assert scores["judged"]["metrics"][0]["value"] == 7.0  # type: ignore[index]
    assert scores["judged"]["scored"] == 3
    if not sandbox_kind().startswith("none"):
        assert [m["name"] for m in scores["programs"]["metrics"]] == ["pass@1", "pass@3"]  # type: ignore[attr-defined]
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tasks_for_lm_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (make install-eval)")
    code, scores = run(capsys, "evaluate_lm_eval", tmp_path / "out")
    assert code == 0
    assert scores["capitals"]["samples"] == 15
    assert [m["name"] for m in scores["capitals_open"]["metrics"]] == ["exact_match,first_word"]  # type: ignore[attr-defined]
