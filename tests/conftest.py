"""Fixtures that every test folder shares, and what keeps the tests away from the user's own files.

The home folder and the folders for state, caches and configuration are temporary ones for the whole session: a test,
or a process that it starts, that records an incident, a runtime estimate or a model's hash never changes what the
user has. `touched` then looks whether anything went around that.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.superseded import check_run, find_runs

REPO = Path(__file__).resolve().parents[1]

_OWN = "UNBROKEN_TEST_HOME"
_MADE_HERE = _OWN not in os.environ  # else a runner of pytest-xdist: the first process made the folder
if _MADE_HERE:
    os.environ[_OWN] = tempfile.mkdtemp(prefix="unbroken-tests-")
TEST_HOME = Path(os.environ[_OWN])
os.environ["HOME"] = str(TEST_HOME / "home")
for _name in ("STATE", "CACHE", "CONFIG"):
    os.environ[f"XDG_{_name}_HOME"] = str(TEST_HOME / _name.lower())
for _name in ("INCIDENTS", "MODEL_URL", "MODEL_NAME", "MODEL_KEY"):
    os.environ.pop(f"UNBROKEN_{_name}", None)
Path(os.environ["HOME"]).mkdir(exist_ok=True)


def _profiles() -> None:
    """The fuzzers' profiles; a machine with GPUs and no hypothesis runs tests/gpu all the same."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:
        return
    quick = settings(
        deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    )
    settings.register_profile("quick", quick)
    settings.register_profile("soak", quick, print_blob=True)
    settings.load_profile("soak" if int(os.environ.get("UNBROKEN_FUZZ_TIMES", "1")) > 1 else "quick")


_profiles()


LONGEST = (
    "integration/test_survives.py", "integration/test_long.py", "evaluate/test_same_scores.py", "integration/test_slurm.py",
    "integration/test_suspects.py", "integration/test_hosts.py", "train/test_plan_resume.py", "train/test_examples.py",
    "integration/test_hangs.py", "integration/test_kubernetes.py", "integration/test_amend.py", "train/test_plans.py",
    "rehearse/test_rehearse_command.py", "checkpoint/test_campaign.py", "evaluate/test_scoring.py", "hooks/test_transformers.py",
    "integration/test_loss.py", "hooks/test_lightning.py", "hooks/test_accelerate.py", "hooks/test_torchft.py",
    "rehearse/test_rehearsal.py", "checkpoint/test_fsdp_elsewhere.py", "checkpoint/test_checkpointer.py", "evaluate/test_fast_model.py",
    "evaluate/test_lm_eval.py", "test_readme.py",
)  # fmt: skip
"""Files that take about a minute or more in `make test-all`: they begin first, so that no core waits for one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; all others as they were collected."""
    first = {REPO / "tests" / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))


def touched(home: Path) -> list[Path]:
    """Files of ours under a home folder: none, where every command kept to the folders that it was given."""
    places = [
        home / ".local" / "state" / "unbroken",
        home / ".cache" / "unbroken",
        home / ".config" / "unbroken",
    ]
    return [f for p in places if p.exists() for f in (p, *sorted(p.rglob("*")))]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the suite where a test wrote to the home folder's store, runtime estimates or hash files."""
    if hasattr(session.config, "workerinput") or not _MADE_HERE:
        return
    found = touched(Path(os.environ["HOME"]))
    if found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nFAILED: the tests wrote to a user's own files: {', '.join(map(str, found[:5]))}")
    shutil.rmtree(TEST_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data (`$UNBROKEN_DATA`, or shared/data beside the checkout); skips where absent."""
    for place in (os.environ.get("UNBROKEN_DATA"), REPO.parent / "shared" / "data", REPO / "shared" / "data"):
        if place and Path(place).is_dir():
            return Path(place)
    pytest.skip("the real data is not on this machine (set UNBROKEN_DATA to its folder)")


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for a condition with a deadline: eventually(lambda: ..., within=10)."""

    def wait(condition: Callable[[], object], within: float = 10.0, every: float = 0.02) -> None:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(every)
        raise AssertionError(f"did not come true within {within} s")

    return wait


@pytest.fixture(autouse=True)
def lineage(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever run a test made: nothing of a superseded supervisor or attempt was used."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    made_up = request.node.get_closest_marker("made_up")
    if folder is not None and made_up is None:
        assert [problem for run in find_runs(folder) for problem in check_run(run)] == []


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell starts background jobs with SIGINT ignored, and what the tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
