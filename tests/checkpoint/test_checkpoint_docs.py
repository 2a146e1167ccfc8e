"""The page names every command and option there is, and none that is not; its example runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import typer.main

from unbroken.checkpoint import Checkpointer, Saved
from unbroken.checkpoint.catalogue.contents import Found
from unbroken.checkpoint.levels import LEVELS
from unbroken.cli.checkpoint import app
from unbroken.errors import UsageError

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "checkpoint-storage.md").read_text()
COMMANDS = {
    name: {o for p in command.params for o in p.opts if o.startswith("--")}
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    if not command.hidden
}


def test_every_command_and_option_is_on_the_page() -> None:
    for name, options in COMMANDS.items():
        assert f"unbroken checkpoint {name} " in PAGE, name
        for option in options:
            assert option in PAGE, f"{name} {option}"


def test_the_page_names_no_command_or_option_that_is_not() -> None:
    for line in re.findall(r"^unbroken checkpoint (.*)$", PAGE, re.MULTILINE):
        name, *words = line.split("#")[0].split()
        assert name in COMMANDS, line
        assert {w for w in words if w.startswith("--")} <= COMMANDS[name], line


def test_the_states_are_those_of_a_listing() -> None:
    told = re.search(r"`status`: ([^.]*)\.", str(Found.__doc__))
    assert told is not None
    for state in ("committed", "incomplete", "damaged", "too_new", "unreadable"):
        assert state in told[1]
        assert f"| {state.replace('_', ' ')} |" in PAGE


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(REPO / "examples" / "checkpoint_elsewhere.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "loaded on one rank: True lr 0.01" in out
    assert "sample 38400" in out
    assert "exported: model.safetensors" in out


def test_a_durability_level_is_called_so_wherever_a_user_reads_of_it(tmp_path: Path) -> None:
    page = (REPO / "docs" / "checkpoint.md").read_text()
    for level in LEVELS:
        assert f"| `{level}` |" in page
    helps = [str(p.help) for p in typer.main.get_command(app).commands.values()]  # type: ignore[attr-defined]
    messages = []
    for wait in (Checkpointer(tmp_path).wait, Saved.with_levels(3, 1, ["host"]).wait):
        with pytest.raises(UsageError) as e:
            wait("cloud")
        messages.append(str(e.value))
    assert "durability level 'cloud'" in messages[0] and "staged, host, peer, disk, remote" in messages[0]
    docs = [p.read_text() for p in [REPO / "README.md", *(REPO / "docs").rglob("*.md")]]
    doc = [str(f.__doc__) for f in (Checkpointer.save, Checkpointer.wait, Saved, Saved.wait)]
    for text in [*helps, *messages, *docs, *doc]:
        assert not re.search(r"\b(rungs?|climbs?)\b", text, re.IGNORECASE), text[:200]
