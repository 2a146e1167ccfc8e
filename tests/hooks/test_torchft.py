"""torchft with two replica groups and two lines of ours: both killed, twice; each goes on from its own checkpoint, exactly."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.keepers import end_keepers
from unbroken.errors import UsageError

from . import exact

pytest.importorskip("torchft", reason="needs requirements/hooks.txt")
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]
SCRIPT = exact.EXAMPLES / "torchft_groups.py"


def train(folder: Path, keepers: Path, kill_at: int = 0, forget: bool = False) -> exact.Losses:
    """The losses of this launch of both groups; both are killed with signal 9 once one has made step `kill_at`, and with `forget` the
    keeper of the second too: that group is left with what is on its disk."""
    from torchft.coordination import LighthouseServer

    folder.mkdir(exist_ok=True)
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=2000)
    groups: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"log-{group}-{time.monotonic_ns()}" for group in (0, 1)]
    try:
        for group, log in enumerate(logs):
            env = exact.environment() | {
                "TORCHFT_LIGHTHOUSE": lighthouse.address(),
                "REPLICA_GROUP": str(group),
                "UNBROKEN_SCRATCH": str(keepers / folder.name / str(group)),
            }
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "1",
            ]
            with open(log, "wb") as out:
                groups.append(
                    subprocess.Popen(
                        [*launcher, str(SCRIPT), "--out", str(folder / f"group-{group}")], env=env, cwd=folder,
                        stdout=out, stderr=out, start_new_session=True,
                    )
                )  # fmt: skip
        deadline = time.monotonic() + exact.DEADLINE_S
        while any(g.poll() is None for g in groups) and time.monotonic() < deadline:
            if kill_at and any(step >= kill_at for _, step in exact.losses(logs[0].read_text())):
                break
            time.sleep(0.02)
        if not kill_at:
            assert [g.poll() for g in groups] == [0, 0], logs[0].read_text()[-3000:]
    finally:
        for g in groups:
            if g.poll() is None:
                _kill(g.pid)
            g.wait()
        if forget:
            end_keepers(keepers / folder.name / "1")
        lighthouse.shutdown()
    return {at: found for log in logs for at, found in exact.losses(log.read_text()).items()}


def _kill(launcher: int) -> None:
    """Ends a launcher and its ranks with signal 9, but not their keepers. Ranks have sessions of their own, and outlive a launcher that is
    killed alone."""
    above = psutil.Process(launcher)
    for process in [above, *above.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if str(SCRIPT) in process.cmdline():
                process.kill()


@pytest.mark.parametrize(
    "kill_at",
    [pytest.param((17,), id="second epoch"), pytest.param((5, 17), id="both epochs", marks=pytest.mark.soak)],
)
def test_exact_after_all_groups_were_killed(
    own_keepers: Path, tmp_path: Path, kill_at: tuple[int, ...]
) -> None:
    """Shuffled, dropout, two workers, noise drawn for each sample; in the first and in the second epoch. The second group's newest
    checkpoint is older than the first's, by an epoch: it has lost its memory."""
    undisturbed = train(tmp_path / "one", own_keepers)
    assert {step for _, step in undisturbed} == set(range(1, 29))
    made = [train(tmp_path / "two", own_keepers, step, forget=step == 17) for step in (*kill_at, 0)]
    begun = [min(step for _, step in a) for a in made]
    assert begun[0] == 1 and begun == sorted(set(begun)) and begun[-1] > 12, begun
    for attempt in made:
        assert attempt == {at: undisturbed[at] for at in attempt}
    assert {step for a in made for _, step in a} == set(range(1, 29))


def test_a_manager_that_has_counted_already_is_refused() -> None:
    from unbroken.hooks.torchft import attach

    class Counted:
        def current_step(self) -> int:
            return 3

    manager: Any = Counted()
    with pytest.raises(UsageError, match="at step 3 already"):
        attach(manager, None, {})
