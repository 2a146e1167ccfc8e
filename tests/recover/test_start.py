"""From a command line to a run: what is refused before anything starts, and which settings count."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_folder import RunFolder
from unbroken.cli.runs.run import _default_name
from unbroken.errors import DoesNotFit, InputError, RunDirMismatch, StorageError, UsageError
from unbroken.link.secret import Secret
from unbroken.progress import Budgets, ClusterChoice, RunDir, Term, Timeouts, read_spec, write_spec
from unbroken.recover import room
from unbroken.recover.node.checks.command import check_command
from unbroken.recover.record.folder import FolderRecord
from unbroken.recover.start import _write_report, make_spec, run_supervised, settle_spec
from unbroken.recover.supervise.launch import takeover
from unbroken.units import Bytes, Duration

pytestmark = pytest.mark.made_up


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def test_new_run_writes_what_was_asked(run_dir: RunDir) -> None:
    wanted = make_spec(["train.py"], nodes=2, cluster=ClusterChoice("local"))
    assert settle_spec(run_dir, wanted) == wanted == read_spec(run_dir.spec)


def test_a_run_stays_on_its_cluster_unless_another_is_asked_for(run_dir: RunDir) -> None:
    hosts = ClusterChoice("hosts", {"file": "HOSTS"})
    settle_spec(run_dir, make_spec(["train.py"], cluster=hosts))
    assert settle_spec(run_dir, make_spec(["train.py"])).cluster == hosts
    here = ClusterChoice("local")
    assert settle_spec(run_dir, make_spec(["train.py"], cluster=here)).cluster == here
    assert make_spec(["train.py"]).run_id != make_spec(["train.py"]).run_id


def test_the_same_command_keeps_the_run_id_and_an_edited_file(run_dir: RunDir) -> None:
    first = settle_spec(run_dir, make_spec(["train.py"], timeouts=Timeouts(lease=Duration(4))))
    write_spec(run_dir, replace(first, budgets=Budgets(failure=99)))
    again = settle_spec(run_dir, make_spec(["train.py"]))
    assert again.run_id == first.run_id
    assert again.budgets.failure == 99 and again.timeouts.lease == 4
    asked = settle_spec(
        run_dir,
        make_spec(["train.py"], timeouts=Timeouts(hang=Duration(30)), host_memory=Bytes("1GiB"), spares=2),
    )
    assert (asked.timeouts.lease, asked.timeouts.hang, asked.host_memory, asked.spares) == (4, 30, 2**30, 2)
    assert asked.budgets.failure == 99
    # Only the supervisor that claims the run writes what has changed.
    assert read_spec(run_dir.spec) == replace(first, budgets=Budgets(failure=99))


def test_another_command_is_refused_and_changes_nothing(run_dir: RunDir) -> None:
    settle_spec(run_dir, make_spec(["train.py"]))
    before = run_dir.spec.read_bytes()
    with pytest.raises(RunDirMismatch):
        settle_spec(run_dir, make_spec(["train.py", "--lr", "1"], timeouts=Timeouts(hang=Duration(30))))
    assert run_dir.spec.read_bytes() == before


def test_a_folder_of_something_else_is_refused(run_dir: RunDir) -> None:
    run_dir.path.mkdir()
    (run_dir.path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"it holds thesis\.tex"):
        settle_spec(run_dir, make_spec(["train.py"]))
    assert [p.name for p in run_dir.path.iterdir()] == ["thesis.tex"]


def test_what_a_killed_first_call_left_is_no_obstacle(run_dir: RunDir) -> None:
    """kill -9 after the folders were made and before run.toml was there: the same command must go on."""
    run_dir.create()
    (run_dir.path / ".run.toml.123.abcd.aside").write_text("comm")
    assert settle_spec(run_dir, make_spec(["train.py"])) == read_spec(run_dir.spec)


@pytest.mark.parametrize(
    ("command", "error", "says"),
    [
        ([], UsageError, "no command after '--'"),
        (["-m"], UsageError, "module name"),
        (["absent.py"], InputError, "does not exist"),
        (["folder.py"], InputError, "is a folder"),
        (["python", "absent.py"], InputError, "does not exist"),
        (["python3", "-W", "ignore", "-u", "absent.py"], InputError, "does not exist"),
        (["no-such-program-anywhere"], InputError, "no program or script"),
        (["-m", "no_such_package.train"], InputError, "no module 'no_such_package'"),
        (["-m", ".train"], InputError, "no module"),
    ],
)
def test_commands_that_cannot_run(
    tmp_path: Path, command: list[str], error: type[Exception], says: str
) -> None:
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(error, match=says):
        check_command(command, tmp_path)


def test_commands_that_can_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "lies_here").mkdir()
    for command in (
        ["train.py", "--x"],
        ["python", "train.py"],
        ["-m", "lies_here.train"],
        ["-m", "json.tool"],
        ["true"],
        ["python3", "-c", "1"],
        ["python3", "-uc", "1", "written.py"],
        ["python3", "-m", "json.tool", "absent.py"],
        ["python3", "-X", "dev", "train.py", "absent.py"],
    ):
        check_command(command, tmp_path)


def test_what_does_not_fit_leaves_no_run_directory(run_dir: RunDir) -> None:
    """It would remember the number of ranks, and refuse the one that does fit."""
    with pytest.raises(DoesNotFit):
        run_supervised(run_dir, make_spec(["true"], nproc=100_000))
    assert not run_dir.path.exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["sub/train.v2.py", "a.py"], "train-v2"),
        (["-m", "pkg.train", "config.py"], "pkg-train"),
        (["python3", "-u", "train.py", "a.py"], "train"),
        (["python3", "-c", "1", "config.py"], "python3"),
        (["accelerate", "launch", "train.py"], "train"),
        (["./go.sh"], "go"),
    ],
)
def test_where_a_run_lies_unless_told(words: list[str], name: str) -> None:
    assert _default_name(words) == name


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_unreadable_script(tmp_path: Path) -> None:
    (tmp_path / "secret.py").touch(mode=0)
    with pytest.raises(InputError, match="cannot be read"):
        check_command(["secret.py"], tmp_path)


def test_the_story_is_written_only_for_a_run_that_ended(tmp_path: Path) -> None:
    made = RunFolder(RunDir(tmp_path / "run"))
    made.attempt()
    made.steps(3)
    assert _write_report(made.run_dir) is None and not made.run_dir.report.exists()
    made.end()
    assert _write_report(made.run_dir) == made.run_dir.report
    assert made.run_dir.report.exists()
    made.run_dir.term(1).write_text("{")
    assert _write_report(made.run_dir) is None, "what cannot be read is no reason to fail a run"
    assert _write_report(RunDir(tmp_path / "absent")) is None


def full_for(times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes the disk of run directories full for that many looks; what is returned counts them."""
    looks: list[int] = []

    def probe(**given: object) -> object:
        looks.append(1)
        if len(looks) <= times:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return tempfile.TemporaryFile()

    monkeypatch.setattr(room.tempfile, "NamedTemporaryFile", probe)
    monkeypatch.setattr(room, "_RETRY_S", 0.0)
    return looks


def test_a_run_that_goes_on_waits_for_a_full_disk_and_a_new_one_is_refused(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor was killed while the disk was full: keepers hold what is in memory only, and wait for the next one."""
    looks, said = full_for(3, monkeypatch), list[str]()
    with pytest.raises(StorageError, match="No space left"):
        room.check_places(run_dir)
    room.wait_for_room(run_dir, said.append)
    assert len(looks) == 3 + 4 and len(said) == 1 and "as soon as there is room" in said[0]
    room.check_places(run_dir, at_least=Bytes(0))


def test_what_is_wrong_and_no_full_disk_is_not_waited_for(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**given: object) -> object:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(room.tempfile, "NamedTemporaryFile", refuse)
    said = list[str]()
    room.wait_for_room(run_dir, said.append)
    assert said == []


def test_a_disk_that_fills_up_at_the_claim_is_waited_for(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.create()
    record, refused = FolderRecord(run_dir, shared=True), [1, 1]
    assert record.claim(1, run_id="r", address="", sealed={})
    claim = record.claim

    def refuse_twice(number: int, **given: Any) -> Term | None:
        if refused:
            refused.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return claim(number, **given)

    async def nobody(term: Term, *more: object) -> bool:
        return False

    monkeypatch.setattr(record, "claim", refuse_twice)
    monkeypatch.setattr(takeover, "_RETRY_S", 0.0)
    monkeypatch.setattr(takeover, "_answers", nobody)
    mine, before = asyncio.run(takeover.take_over(record, run_dir, "r", "", Secret("t")))
    assert (mine.number, before and before.number, refused) == (2, 1, [])
    refused.append(1)
    with pytest.raises(StorageError, match="No space left"):  # a stop is not kept waiting for room
        asyncio.run(takeover.take_over(record, run_dir, "r", "", Secret("t"), stopped=lambda: True))
