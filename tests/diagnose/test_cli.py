"""`unbroken diagnose` and `unbroken logs` as a stranger would use them, and misuse them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from unbroken.cli.main import dispatch
from unbroken.testing.llm import FakeAssistant

from .logs import job, steps, traceback

SECRET = "user alice from 10.1.2.3 with token=hf_abcdefghijklmnop in /home/alice/run\n"
KEY = steps(30) + SECRET + traceback("KeyError: 'labels'", 3)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_INCIDENTS", str(tmp_path / "state" / "incidents.sqlite"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("UNBROKEN_MODEL_URL", raising=False)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> tuple[int, str, str]:
        code = dispatch([str(a) for a in args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_the_report_says_it_all(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("diagnose", job(tmp_path, KEY))
    assert code == 21
    for word in (
        "KeyError (Script)",
        "a restart cannot help",
        "log.txt:36",
        "rank 3 on node-001",
        "KeyError: 'labels'",
        "do not restart",
        "py-key",
        "Incident i",
    ):
        assert word in out, out


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (steps(9) + "training finished: 9 steps, exit code 0\n", 0),
        (
            steps(9)
            + "slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2026-05-01T10:00:09 DUE TO TIME LIMIT ***\n",
            0,
        ),
        (steps(9) + traceback("RuntimeError: CUDA error: unspecified launch failure", 1), 20),
        (KEY, 21),
        (steps(9) + "[2026-05-01 10:00:09] something stopp", 22),
    ],
)
def test_exit_codes_are_answers(run: Run, tmp_path: Path, body: str, code: int) -> None:
    log = job(tmp_path, body)
    assert run("diagnose", log)[0] == code
    exit_, out, _ = run("diagnose", log, "--json")
    assert exit_ == code and json.loads(out)["schema"] == 1


def test_a_log_that_is_still_written_is_running(run: Run, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    log = job(
        tmp_path,
        f"[{now:%Y-%m-%d %H:%M:%S}] step: 1 loss: 2.0\n[{now:%Y-%m-%d %H:%M:%S}] step: 2 loss: 2.0\n",
    )
    assert run("diagnose", log, "--live")[0] == 23
    assert run("diagnose", log)[0] == 22


def test_json_is_one_object_on_one_line(run: Run, tmp_path: Path) -> None:
    _, out, err = run("diagnose", job(tmp_path, KEY), "--json")
    assert out.count("\n") == 1 and err == ""
    value = json.loads(out)
    assert value["reason"] == "KeyError" and value["root"]["line"] == 36 and value["incident"].startswith("i")


def test_html_and_bundle(run: Run, tmp_path: Path) -> None:
    log = job(tmp_path, KEY.replace("labels", "<script>alert(1)</script>"))
    code, out, _ = run("diagnose", log, "--html", tmp_path / "r.html", "--bundle", tmp_path / "b.tar.gz")
    page = (tmp_path / "r.html").read_text()
    assert (
        code == 21
        and "<script>" not in page
        and "&lt;script&gt;" in page
        and "http" not in page.replace("http-equiv", "")
    )
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        names = tar.getnames()
        everything = b"".join(tar.extractfile(n).read() for n in names)  # type: ignore[union-attr]
    assert {"verdict.json", "report.txt", "README.txt", "evidence/log.txt.txt"} <= set(names)
    for word in (b"alice", b"10.1.2.3", b"hf_abcdef"):
        assert word not in everything
    assert b"KeyError" in everything and b"36: [rank3]: KeyError" in everything
    assert "Bundle:" in out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["diagnose", "/nowhere/at/all"], 3, "no file or folder"),
        (["diagnose", "{log}", "--rules", "/nowhere"], 3, "no rule folder"),
        (["diagnose", "{log}", "--html", "/proc/x/r.html"], 3, "cannot write the report"),
        (["diagnose", "{log}", "--refine"], 2, "needs a model"),
        (["diagnose", "{log}", "--model-url", "nonsense"], 2, "no http address"),
        (["diagnose", "{log}", "--jsonn"], 2, ""),
        (["diagnose", "explain", "cuda-eror"], 2, "Did you mean 'cuda-error'"),
        (["diagnose", "correct", "i1", "--reason", "ECCError"], 2, "no incident"),
        (["diagnose", "rules", "adopt", "x"], 2, "no candidate"),
        (["logs", "compress", "/nowhere"], 3, "no file or folder"),
        (["logs", "compress", "{log}", "--follow", "--json"], 3, "takes no --json"),
        (["logs", "compress", "{log}", "--follow", "--task", "7b", "-o", "x"], 3, "takes no --out, --task"),
        (
            ["logs", "compress", "{log}", "--follow", "--model-url", "http://127.0.0.1:1"],
            3,
            "takes no --model-url",
        ),
        (["logs", "compress", "{log}", "-o", "/proc/x/y"], 3, "cannot write"),
    ],
)
def test_mistakes_are_a_sentence_and_a_code(
    run: Run, tmp_path: Path, args: list[str], code: int, says: str
) -> None:
    log = job(tmp_path, KEY)
    got, _, err = run(*(a.replace("{log}", str(log)) for a in args))
    assert got == code and says in err, err
    assert "Traceback (most recent" not in err and "defect of unbroken" not in err


def test_a_broken_store_is_a_note_not_a_failure(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.sqlite").write_bytes(b"no database at all, only text" * 99)
    code, out, _ = run("diagnose", job(tmp_path, KEY), "--store", tmp_path / "bad.sqlite")
    assert code == 21 and "Note: the store of incidents" in out


def test_explain_shows_rules_codes_and_reasons(run: Run) -> None:
    assert "DataLoader worker" in run("diagnose", "explain", "dataloader-killed")[1]
    assert "NVLinkError" in run("diagnose", "explain", "xid-74")[1]
    assert "s3-client-error" in run("diagnose", "explain", "S3StorageError")[1]
    assert json.loads(run("diagnose", "explain", "cuda-oom", "--json")[1])["reason"] == "OutOfMemoryError"


def test_own_rules(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "own.toml").write_text(
        '[[rule]]\nid = "our-scratch"\nregex = "scratch quota server says no"\nrole = "root"\nreason = "OSError"\npriority = 90\nsource = "https://wiki"\nexample = "scratch quota server says no, Error"\n'
    )
    log = job(tmp_path, steps(9) + "Error: scratch quota server says no\n")
    _, out, _ = run("diagnose", log, "--rules", tmp_path / "rules", "--json", "--no-memory")
    assert json.loads(out)["decided_by"] == "our-scratch"


def test_correct_teaches_and_incidents_lists(run: Run, tmp_path: Path) -> None:
    odd = steps(9) + traceback("vendor.FluxProblem: phase inversion in the regulator of lane 4")
    incident = json.loads(run("diagnose", job(tmp_path / "a", odd), "--json")[1])["incident"]
    assert run("diagnose", "correct", incident, "--reason", "NVLinkError", "--note", "rack 7")[0] == 0
    assert f"{incident}" in run("diagnose", "incidents")[1]
    again = json.loads(run("diagnose", job(tmp_path / "b", odd.replace("lane 4", "lane 9")), "--json")[1])
    assert (again["reason"], again["decided_by"]) == ("NVLinkError", "retrieval")
    same = json.loads(run("diagnose", tmp_path / "a", "--json")[1])
    assert same["reason"] == "NVLinkError"
    assert json.loads(run("diagnose", tmp_path / "b", "--json", "--no-memory")[1])["reason"] == "RuntimeError"


UNKNOWN = (
    steps(9)
    + SECRET
    + "the flux regulator reported a phase inversion\nsrun: error: node-001: task 0: Exited with exit code 1\n"
)


def test_the_model_is_asked_where_rules_do_not_know_and_its_rule_waits(run: Run, tmp_path: Path) -> None:
    log = job(tmp_path, UNKNOWN)
    line = log.read_text().splitlines().index("the flux regulator reported a phase inversion") + 1
    answer = {
        "reason": "NVLinkError",
        "file": "log.txt",
        "line": line,
        "quote": "flux regulator reported",
        "rule": {"regex": "flux regulator reported a phase"},
    }
    fake = FakeAssistant([answer])
    with fake as url:
        value = json.loads(run("diagnose", log, "--json", "--model-url", url)[1])
    assert (value["reason"], value["decided_by"], value["cordon"]) == ("NVLinkError", "model", [])
    assert "alice" not in json.dumps(fake.requests) and "hf_abc" not in json.dumps(fake.requests)
    listed = json.loads(run("diagnose", "rules", "list", "--json")[1])["candidates"]
    (rule,) = listed
    assert rule["state"] == "candidate"
    assert run("diagnose", "rules", "adopt", rule["id"])[0] == 2, "no stored incident confirms it yet"
    run("diagnose", "correct", value["incident"], "--reason", "NVLinkError")
    assert run("diagnose", "rules", "adopt", rule["id"])[0] == 0
    fresh = json.loads(
        run(
            "diagnose",
            job(
                tmp_path / "c",
                UNKNOWN.replace("srun", "Error reported; srun").replace("inversion\n", "inversion, failed\n"),
            ),
            "--json",
        )[1]
    )
    assert fresh["reason"] == "NVLinkError"
    with FakeAssistant([answer]) as url:
        assert (
            json.loads(run("diagnose", job(tmp_path / "d", KEY), "--json", "--model-url", url)[1])[
                "decided_by"
            ]
            == "py-key"
        ), "sure rules are not second-guessed"


def test_dry_run_sends_nothing_and_shows_everything(run: Run, tmp_path: Path) -> None:
    fake = FakeAssistant(["{}"])
    with fake as url:
        code, out, _ = run("diagnose", job(tmp_path, UNKNOWN), "--dry-run", "--model-url", url)
    assert code == 0 and fake.requests == []
    value = json.loads(out)
    assert value["to"] == f"{url}/chat/completions" and "flux regulator" in out and "alice" not in out


def test_compress_writes_reports_and_remembers(run: Run, tmp_path: Path) -> None:
    log = job(tmp_path, steps(3000) + traceback("KeyError: 'x'"))
    out_file = tmp_path / "small.log"
    code, out, _ = run("logs", "compress", log, "-o", out_file, "--task", "7b", "--json")
    report = json.loads(out)
    assert (
        code == 0
        and report["lines_in"] == 3005
        and report["lines_out"] < 60
        and report["bytes_out"] == out_file.stat().st_size
    )
    assert all(r["regex"] for r in report["rules"]) and "KeyError: 'x'" in out_file.read_text()
    again = json.loads(run("logs", "compress", log, "--task", "7b", "--json")[1])
    assert again["learnt"] == [] and again["rules"][0]["name"] == report["rules"][0]["name"]
    code, out, err = run("logs", "compress", log, "--numbers", "--rules")
    assert "log.txt:3005: KeyError: 'x'" in out and "metric" in err


def test_compress_with_a_model(run: Run, tmp_path: Path) -> None:
    log = job(tmp_path, steps(300))
    with FakeAssistant(
        [{"rules": [{"name": "step lines", "kind": "metric", "regex": r"step: \d+ loss: [\d.]+ tps"}]}]
    ) as url:
        report = json.loads(run("logs", "compress", log, "--json", "--model-url", url)[1])
    assert report["rules"][0]["name"] == "model-step-lines" and report["rules"][0]["origin"] == "model"


@pytest.mark.slow
def test_follow_ends_with_the_job(tmp_path: Path, eventually: Any) -> None:
    log = job(tmp_path, "")

    def say(text: str) -> None:
        with log.open("a") as f:
            f.write(text)

    def now() -> str:
        return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"

    say(f"[{now()}] step: 1 loss: 2.0\n[{now()}] step: 2 loss: 2.0\n")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    seen: list[str] = []
    p = subprocess.Popen(
        [sys.executable, "-u", "-m", "unbroken", "diagnose", str(log), "--follow", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert p.stdout is not None
        seen.append(p.stdout.readline())
        assert json.loads(seen[0])["outcome"] == "running"
        say(traceback("ValueError: bad", 2))
        assert json.loads(p.stdout.readline())["reason"] == "ValueError"
        assert p.wait(30) == 21
    finally:
        if p.poll() is None:
            p.send_signal(signal.SIGKILL)
        p.wait(10)
        time.sleep(0)


def test_help_names_both_ways(run: Run) -> None:
    code, out, _ = run("diagnose", "--help")
    assert (
        code == 0
        and "explain" in out
        and "PATH..." in out
        and "20 a restart can help" in " ".join(out.split())
    )
    assert "--bundle" in run("diagnose", "x", "--help")[1]
    assert run("diagnose")[0] == 0


def test_dry_run_writes_no_incident_and_asks_nobody(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config" / "unbroken"
    config.mkdir(parents=True)
    with FakeAssistant(["x"]) as url:
        (config / "diagnose.toml").write_text(f'[model]\nurl = "{url}"\nembedding = "e"\n')
        fake = url
        code, out, _ = run("diagnose", job(tmp_path / "a", UNKNOWN), "--dry-run")
        assert code == 0 and json.loads(out)["to"].startswith(fake)
        assert not (tmp_path / "state").exists()
        run("diagnose", job(tmp_path / "b", UNKNOWN), "--no-memory")
    (config / "diagnose.toml").unlink()
    run("diagnose", job(tmp_path / "c", KEY))
    store = tmp_path / "state" / "incidents.sqlite"
    before = (store.read_bytes(), store.stat().st_mtime_ns)
    code, out, _ = run("diagnose", job(tmp_path / "d", UNKNOWN + SECRET), "--dry-run")
    assert code == 0 and "hf_abcdefg" not in out
    assert (store.read_bytes(), store.stat().st_mtime_ns) == before


def test_another_jobs_lines_reach_no_model_unredacted(run: Run, tmp_path: Path) -> None:
    """What a colleague's job said stands beside this one's as a similar incident."""
    leak = UNKNOWN.replace("phase", f"{SECRET.strip()} phase")
    run("diagnose", job(tmp_path / "a", leak))
    _, out, _ = run("diagnose", job(tmp_path / "b", leak), "--dry-run")
    assert "hf_abcdefg" not in out and "alice" not in out and "10.1.2.3" not in out
    _, out, _ = run("diagnose", "incidents")
    assert "hf_abcdefg" not in out
