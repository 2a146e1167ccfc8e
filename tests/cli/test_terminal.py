"""No text of others acts on a terminal or turns a line round: not from logs, names, paths, errors; in no command."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unbroken.cli.main import available, dispatch
from unbroken.diagnose import examine
from unbroken.diagnose.report import page as diagnosis_page
from unbroken.page.terminal import Filtered, escape, own, plain, script_json
from unbroken.recover.supervise.screen.view import Lines
from unbroken.trace.readers import ReadOptions, load
from unbroken.trace.report import build_report
from unbroken.trace.report import page as trace_page

EVIL = "ev\x1b]0;owned\x07\x1b[2J\x1b[8mil\u202egnp\u2066\u200b\x9b31m\x08\x08\rok[/red]"
BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = dispatch(list(args))
    out, err = capsys.readouterr()
    assert not BAD.search(out), repr(BAD.search(out))
    assert not BAD.search(err), repr(BAD.search(err))
    return code, out + err


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / f"{EVIL.replace('/', '')}\nforged: all is well"
    folder.mkdir()
    lines = [f"step: {i} loss: 2.{i}" for i in range(40)]
    evil = EVIL.replace("\r", "")  # a carriage return begins the line again, and the rest is what counts
    lines += [f"[rank0]: {EVIL}", "[rank0]: Traceback (most recent call last):", '[rank0]:   File "x.py", line 3, in f',
              f"[rank0]: RuntimeError: {evil} went wrong"]  # fmt: skip
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    file = tmp_path / f"jobs{EVIL.replace('/', '')}.csv"
    rows = ["job_id,user,team,name,partition,cluster,type,state,submit_time,start_time,end_time,gpu_num"]
    rows += [
        f'{i},"u{EVIL}","t{EVIL}","n{EVIL}","p{EVIL}","c{EVIL}",Other,"FAILED{EVIL if i % 2 else ""}",2026-01-0{i % 8 + 1} 00:00:00,'
        f"2026-01-0{i % 8 + 1} 00:10:00,2026-01-0{i % 8 + 1} 09:00:00,8"
        for i in range(1, 40)
    ]
    file.write_text("\n".join(r.replace("\r", "") for r in rows) + "\n")
    return file


def test_diagnose_and_logs(capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "s.sqlite")
    code, out = shown(capsys, "diagnose", str(log), "--store", store)
    assert code in (20, 21, 22) and "RuntimeError: evil" in out
    assert not any(line.startswith("forged") for line in out.splitlines())
    shown(capsys, "diagnose", str(log), "--store", store, "--json")
    shown(capsys, "diagnose", str(log), "--store", store, "--dry-run")
    shown(capsys, "diagnose", "incidents", "--store", store)
    shown(capsys, "logs", "compress", str(log), "-o", str(tmp_path / "small"), "--rules")
    assert EVIL.encode() in (tmp_path / "small").read_bytes(), "a file keeps what the log said"


def test_a_piped_compressed_log_is_as_it_was_and_a_shown_one_is_not(log: Path) -> None:
    command = [sys.executable, "-m", "unbroken", "logs", "compress", str(log)]
    piped = subprocess.run(command, capture_output=True, check=True, timeout=120).stdout
    assert EVIL.encode() in piped
    assert b"\x1b]" not in on_terminal(command) and b"\xe2\x80\xae" not in on_terminal(command)


def test_trace(capsys: pytest.CaptureFixture[str], jobs: Path, tmp_path: Path) -> None:
    assert "gnp" in shown(capsys, "trace", "stats", str(jobs))[1]
    shown(capsys, "trace", "stats", str(jobs), "--json")
    shown(capsys, "trace", "accounts", str(jobs))
    shown(capsys, "trace", "report", str(jobs), "-o", str(tmp_path / "r.html"))
    shown(capsys, "trace", "convert", str(jobs), "-o", str(tmp_path / "c"))
    shown(capsys, "trace", "anonymise", str(jobs), "-o", str(tmp_path / "a"))


@pytest.mark.parametrize("command", sorted(available()))
def test_errors_of_every_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)  # some of these make a folder of that name
    evil = f"{EVIL}\nforged"
    for args in ([evil], [f"--{evil}"], ["--run-dir", evil], [str(tmp_path / evil)], ["report", evil], ["ls", evil], ["plan", evil],
                 ["status", evil], ["convert", evil, "-o", evil]):  # fmt: skip
        if command in ("demo", "train", "doctor") and not args[0].startswith("--"):
            continue
        if command in ("demo",):
            continue
        shown(capsys, command, *args)
    shown(capsys, evil)


def on_terminal(command: list[str], **env: str) -> bytes:
    """What a command writes to a terminal of its own."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command,
        stdout=slave,
        stderr=slave,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", **env},
    )
    os.close(slave)
    out = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        if not data:
            break
        out += data
    process.wait(60)
    os.close(master)
    return out


def test_on_a_terminal_our_colours_stay_and_theirs_hide_nothing(log: Path, tmp_path: Path) -> None:
    out = on_terminal([sys.executable, "-m", "unbroken", "diagnose", str(log), "--no-memory"]).decode()
    assert "\x1b[1m" in out or "\x1b[31m" in out
    left = re.sub(r"\x1b\[[0-9;]*m", "", out.replace("\r\n", "\n"))
    assert not BAD.search(left)
    assert "\x1b[8m" not in out


def test_pages_show_no_direction_characters(log: Path, jobs: Path) -> None:
    d = examine([log])
    with load([jobs], ReadOptions()) as store:
        made = build_report(store, [(jobs.name, "table")], references=[])
        html = trace_page(made)
    for text in (diagnosis_page(d, ()), html):
        assert not BAD.search(text)
        assert not re.search(r"\\u(?:20(?:0[b-f]|2[a-e]|6[0-9])|00(?:1b|9b|0[0-8]))", text)


def test_the_view_of_a_run_cleans_what_it_shows() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    view = Lines(Filtered(screen))
    view.say(f"incident: {EVIL}\nforged")
    lines = screen.getvalue().splitlines()
    assert not BAD.search(screen.getvalue().replace("\n", ""))
    assert all(re.match(r"\d\d:\d\d:\d\d  ", line) for line in lines), (
        "no line of theirs looks like one of ours"
    )


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a\x1b[31mred\x1b[0m b\n", "a\x1b[31mred\x1b[0m b\n"), ("a\x1b[31mred\n", "a\x1b[31mred\x1b[0m\n"), ("a\x1b[8mhid\x1b[30mden\n", "ahidden\n"),
        ("x\x1b[2K\x1b[1Ay\x1b[?25l", "xy"), ("one\rtwo\r\n", "onetwo\r\n"), ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "link"),
        ("\x1b[38;5;232mx\x1b[48;2;0;0;0my\n", "xy\n"), ("\x1bPq#0\x1b\\x", "x"), ("\x1b", ""), ("cut \x1b]0;title", "cut "), ("tab\there", "tab\there"),
        ("\u202eabc\u2069", "abc"), ("naïve 日本 ✓", "naïve 日本 ✓"),
    ],
)  # fmt: skip
def test_the_filter(text: str, want: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    assert Filtered(terminal).write(text) == len(text)
    assert terminal.getvalue() == want
    Filtered(file).write(text)
    assert file.getvalue() == re.sub(r"\x1b\[\d*m", "", want)
    assert own(Filtered(terminal)) is terminal


def test_small_helpers() -> None:
    assert plain("a\nb\r\x1b[31mc") == "a bc" and plain("plain") == "plain"
    assert escape("<b>\u202e&") == "&lt;b&gt;&amp;"
    value: Any = {"a\u202e": ["<x>", 1, None, {"b": "\x1b[0m"}]}
    assert json.loads(script_json(value)) == {"a": ["<x>", 1, None, {"b": ""}]}
    assert "<" not in script_json(value)
    with pytest.raises(TypeError):
        Filtered(io.StringIO()).write(b"x")  # type: ignore[arg-type]
