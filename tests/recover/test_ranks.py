"""One rank's process: its environment is torchrun's, its page or log is followed, its end is told once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.cluster.holding.descent import Marks
from unbroken.cluster.holding.processes import end, marked
from unbroken.progress import Phase, RunDir
from unbroken.recover.node.logs.folder import NodeFolder
from unbroken.recover.node.ranks.process import (
    LaunchOrder,
    RankProcess,
    _argv,
    describe_start,
    prepare_files,
    run_cold,
)

ORDER = LaunchOrder(
    attempt=3, run_id="test", command=("script.py", "--x"), cwd="/", ranks={2: 0, 3: 1}, world_size=4, slot=1, slots=2,
    nproc=2, master_addr="10.0.0.1", master_port=29500, restarts=2, devices="4,5",
)  # fmt: skip


def test_order_over_the_wire() -> None:
    assert (
        LaunchOrder.from_message(json.loads(json.dumps({"op": "launch", "id": 7, **ORDER.as_message()})))
        == ORDER
    )


def test_environment_is_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = ORDER.environment(3, 1)
    assert env | {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "test-3", "CUDA_VISIBLE_DEVICES": "4,5",
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    } == env  # fmt: skip
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in ORDER.environment(3, 1), "the user's own value stays"


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (("a.py", "x"), [sys.executable, "-u", "a.py", "x"]),
        (("-m", "a.b", "x"), [sys.executable, "-u", "-m", "a.b", "x"]),
        (("python", "a.py"), [sys.executable, "-u", "a.py"]),
        (("bash", "-c", "true"), ["bash", "-c", "true"]),
    ],
)
def test_how_a_command_is_run(command: tuple[str, ...], argv: list[str]) -> None:
    assert _argv(command) == argv


class Started:
    """Starts a script as rank 2 of `ORDER` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, RunDir(folder / "run")
        self.run_id = f"test{os.getpid()}{time.monotonic_ns()}"
        self.all: list[RankProcess] = []

    def __call__(self, code: str, *, follow_log: bool = True) -> RankProcess:
        (self.folder / "script.py").write_text(textwrap.dedent(code))
        order = LaunchOrder(
            **{
                **vars(ORDER),
                "cwd": str(self.folder),
                "run_id": self.run_id,
                "follow_log": follow_log,
                "devices": None,
            }
        )
        start = describe_start(
            order, 2, 0, NodeFolder(self.run_dir, self.run_dir), "node-001", self.folder / "pages", self.folder / "keeper.sock"
        )  # fmt: skip
        prepare_files(start)
        process = run_cold(start, "node-001", Marks(self.run_id, self.folder))
        rank = RankProcess(process, start, follow_log)
        self.all.append(rank)
        return rank

    def log(self) -> str:
        return self.run_dir.rank_log(3, "node-001", 2).read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path)
    yield made
    assert end(lambda: marked(made.run_id)) == []
    for rank in made.all:
        rank._process.wait()
        rank.close()


def test_page_is_followed_and_the_end_told_once(start: Started, eventually: Callable[..., None]) -> None:
    rank = start("""
        import os, sys, unbroken
        run = unbroken.attach(total_steps=9)
        print(os.environ["UNBROKEN_ROLE"], run.rank, run.attempt, run.node, sys.argv[1:], flush=True)
        for s in range(5):
            run.step(s, loss=s / 8, tokens=3)
        sys.exit(7)
    """)
    eventually(lambda: not rank.running)
    news = rank.sample(1.0)
    assert news is not None and news["source"] == "page" and news["total"] == 9
    assert [(s, t, float.fromhex(x)) for s, t, x, _ in news["steps"]] == [(s, 3, s / 8) for s in range(5)]
    assert rank.sample(2.0) is None, "no news, no message"
    assert rank.attached and rank.just_ended() and not rank.just_ended()
    assert {k: rank.ending()[k] for k in ("code", "signal", "ours")} == {
        "code": 7,
        "signal": None,
        "ours": False,
    }
    assert rank.describe()["running"] is False
    assert start.log() == "rank 2 3 node-001 ['--x']\n"


@pytest.mark.parametrize(
    ("after", "killed_by_agent"),
    [("", True), ("sys.exit(3)", True), ("sys.exit(0)", True), ("run.step(2); sys.exit(4)", False)],
)
def test_a_rank_that_found_its_lease_lapsed_did_not_fail(
    start: Started, eventually: Callable[..., None], after: str, killed_by_agent: bool
) -> None:
    """Whatever the script makes of the exception; one that goes on ended by itself. None of them is done."""
    rank = start(f"""
        import sys, time, unbroken
        run = unbroken.attach()
        while True:
            time.sleep(0.01)
            try:
                run.step(1)
            except unbroken.errors.LeaseExpired:
                time.sleep(0.3)
                {after}
                raise
    """)
    eventually(lambda: rank.attached)
    expired = time.time()
    rank.set_lease(time.monotonic() - 1e-6, 1)
    # A supervisor that comes back before the rank is gone changes nothing.
    time.sleep(0.2)
    rank.set_lease(time.monotonic() + 100, 1)
    eventually(lambda: not rank.running)
    ending = rank.ending()
    assert ending["code"] != 0
    assert ending["ours"] is killed_by_agent and rank.describe()["ours"] is killed_by_agent
    assert (ending["time"] < expired + 0.25) is killed_by_agent, (
        "its time is that of the expiry, before what followed from it"
    )


def test_log_is_followed_where_the_page_is_not_used(start: Started, eventually: Callable[..., None]) -> None:
    rank = start("""
        import time
        for s in range(6):
            print(f"step {s} loss {s}.5")
        print("step 6 lo", end="", flush=True)
        time.sleep(0.3)
        print("ss 6.5", flush=True)
        time.sleep(300)
    """)
    got: dict[int, float] = {}
    seen: set[str] = set()

    def look() -> bool:
        news = rank.sample(time.monotonic())
        if news:
            seen.add(news["source"])
            got.update({s: float.fromhex(x) for s, _, x, _ in news["steps"]})
        return 6 in got

    eventually(look)
    assert got == {s: s + 0.5 for s in range(7)}, "a line that came in two pieces is one line"
    assert "log" in seen and not rank.attached


def test_a_silent_script_shows_signs_of_life_by_its_processor_time(
    start: Started, eventually: Callable[..., None]
) -> None:
    rank = start("while True: pass")
    counts: list[int] = []

    def busy() -> bool:
        news = rank.sample(time.monotonic())
        if news:
            assert news["source"] == "idle" and news["steps"] == []
            counts.append(news["count"])
        return len(counts) >= 3 and counts[-1] >= 2

    eventually(busy, within=20)


def test_killed_by_a_signal(start: Started, eventually: Callable[..., None]) -> None:
    rank = start("import time; time.sleep(300)")
    rank.killed_by_agent = True
    rank.send(signal.SIGKILL)
    eventually(rank.just_ended)
    assert {k: rank.ending()[k] for k in ("code", "signal", "ours")} == {
        "code": None,
        "signal": 9,
        "ours": True,
    }
    rank.send(signal.SIGKILL)  # nothing to send to: no error


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_the_agent_ignores_ends_a_script_without_a_handler(
    start: Started, eventually: Callable[..., None], sig: signal.Signals
) -> None:
    before = signal.signal(sig, signal.SIG_IGN)
    try:
        rank = start("import time; print('up', flush=True); time.sleep(300)")
    finally:
        signal.signal(sig, before)
    eventually(lambda: "up" in start.log())
    rank.send(sig)
    eventually(rank.just_ended)
    assert rank.ending()["signal"] == sig


def test_lease_and_stop_reach_the_script(start: Started, eventually: Callable[..., None]) -> None:
    rank = start("""
        import sys, time, unbroken
        run = unbroken.attach()
        for s in range(10**6):
            run.step(s)
            if run.should_stop(s):
                sys.exit(unbroken.EXIT_STOPPED)
            time.sleep(0.002)
    """)
    rank.set_lease(time.monotonic() + 100, 1)
    eventually(lambda: (rank.sample(time.monotonic()) or {}).get("phase") == Phase.TRAINING)
    target = rank.stop_at(10**9) + 50
    assert rank.stop_at(target) < target
    eventually(lambda: not rank.running)
    assert rank.ending()["code"] == 75
    news = rank.sample(time.monotonic())
    assert news is not None and news["steps"][-1][0] == target


def test_a_rank_never_outlives_its_agent(tmp_path: Path, eventually: Callable[..., None]) -> None:
    """kill -9 of the process that launched it: the kernel ends the rank."""
    run_id = f"test{os.getpid()}orphan"
    (tmp_path / "script.py").write_text("import time; time.sleep(300)")
    code = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from unbroken.cluster.holding.descent import Marks
        from unbroken.progress import RunDir
        from unbroken.recover.node.logs.folder import NodeFolder
        from unbroken.recover.node.ranks.process import LaunchOrder, describe_start, prepare_files, run_cold
        here = Path(sys.argv[1])
        order = LaunchOrder(1, sys.argv[2], ("script.py",), str(here), {0: 0}, 1, 0, 1, 1, "127.0.0.1", 1, 0)
        owner = Marks(sys.argv[2], here)
        run_dir = RunDir(here / "run")
        folder = NodeFolder(run_dir, run_dir)
        start = describe_start(order, 0, 0, folder, "node-000", here / "pages", here / "s")
        prepare_files(start)
        run_cold(start, "node-000", owner)
        print("go", flush=True)
        time.sleep(300)
    """)
    agent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), run_id], stdout=subprocess.PIPE)
    assert agent.stdout is not None and agent.stdout.readline() == b"go\n"
    assert len(marked(run_id)) == 1
    agent.kill()
    agent.wait()
    agent.stdout.close()
    eventually(lambda: marked(run_id) == [])
