"""Real runs whose record lies in an object store, here a server in this process: killed, and taken over."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator

import pytest

from unbroken.progress import RunDir, read_journal
from unbroken.testing.object_store import FakeS3

from .conftest import RunUnderTest

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NewRun = Callable[..., RunUnderTest]
OPTIONS = ("--nodes", "2", "--nproc", "1", "--record", "s3://bucket/run")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    pytest.importorskip("obstore")
    with FakeS3() as s3:
        for key, value in {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
                           "AWS_REGION": "x"}.items():  # fmt: skip
            monkeypatch.setenv(key, value)
        yield s3


def test_a_killed_supervisor_is_succeeded_from_another_run_directory(store: FakeS3, new_run: NewRun) -> None:
    run = new_run(*OPTIONS, steps=200).start()
    run.until_step(3)
    assert run.process is not None
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(10)
    first = run.run_dir
    run.output += run.process.communicate()[0]
    run.run_dir = RunDir(run.folder / "elsewhere")
    run.run_dir.create()
    shutil.copy(first.token, run.run_dir.token)
    run.start()
    assert run.wait() == 0, run.output
    assert "took over attempt 1" in run.output and run.attempts() == 1
    assert "s3://bucket/run" in run.output
    known = read_journal(run.run_dir).records
    assert [r for r in known if r["epoch"] == 1] == read_journal(first).records
    assert known[-1]["kind"] == "status" and known[-1]["status"] == "completed"
    assert run.faults.left_over() == []
    token = first.token.read_bytes().strip()
    assert store.objects and not any(token in data for data in store.objects.values())
    # The same command again says so and does nothing.
    run.start()
    assert run.wait() == 0 and "already completed" in run.output


def test_who_has_not_the_keys_of_a_live_run_leaves_it_alone(store: FakeS3, new_run: NewRun) -> None:
    run = new_run(*OPTIONS, steps=120).start()
    run.until_step(3)
    other = RunUnderTest(run.folder, run.command, run.options)
    other.run_dir = RunDir(run.folder / "elsewhere")
    assert other.start().wait() == 13 and "key files" in other.output
    assert run.wait() == 0 and run.attempts() == 1, run.output


def test_another_run_may_not_have_its_record_there(store: FakeS3, new_run: NewRun) -> None:
    run = new_run(*OPTIONS, steps=5, seconds=0.01).start()
    assert run.wait() == 0, run.output
    run.options = ["--nodes", "2", "--nproc", "1"]
    run.run_dir = RunDir(run.folder / "other")
    assert run.start().wait() == 0, run.output
    run.options = [*OPTIONS]
    assert run.start().wait() == 12
    assert "--record was" in run.output
