"""Warm processes: what a rank shows is what a cold start shows, and whatever is not so starts cold, in words.

The packages here lie in a folder named `site-packages`, so that they count as installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.cluster.holding.apart import Apart, Container
from unbroken.cluster.holding.descent import Marks, Parents
from unbroken.cluster.holding.processes import end, marked, still_there
from unbroken.private import private_folder
from unbroken.recover.node.ranks.flight import record_flight
from unbroken.recover.node.ranks.process import as_a_rank, run_cold
from unbroken.recover.node.warm.imports import can_record, check_lines, find_own_folder, read_imports
from unbroken.recover.node.warm.pool import WarmPool
from unbroken.recover.node.warm.process import RankStart

SHOW = """
import colorsys
import json, os, signal, sys, threading
found = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "file": __file__, "name": __name__, "path": sys.path, "flags": str(sys.flags),
    "environ": {k: v for k, v in os.environ.items() if k not in CHANGING}, "cwd": os.getcwd(),
    "modules": sorted(sys.modules), "fds": sorted(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
    "stdin": os.readlink("/proc/self/fd/0"), "stdout": os.readlink("/proc/self/fd/1").rpartition("/")[2],
    "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    "spec": getattr(__spec__, "name", None), "title": open("/proc/self/comm").read(), "cmdline": open("/proc/self/cmdline").read(),
    "buffering": sys.stdout.write_through, "session": os.getsid(0) == os.getpid(), "doc": __doc__,
}
print("FOUND" + json.dumps(found))
print("to the other one", file=sys.stderr)
""".replace("CHANGING", '("UNBROKEN_ATTEMPT", "MASTER_PORT")')


class Ranks:
    """Starts a script as rank 0, cold and then warm, on a node of its own."""

    def __init__(self, folder: Path, kind: Callable[[str, Path], Marks] = Marks) -> None:
        self.folder, self.packages = folder, folder / "site-packages"
        (folder / "project").mkdir()
        self.packages.mkdir()
        self.run_id = f"warm{os.getpid()}{time.monotonic_ns()}"
        self.owner = kind(self.run_id, folder / "held")
        self.told: list[dict[str, Any]] = []
        self.pool = WarmPool("n0", folder, self.owner, as_a_rank, lambda **m: self.told.append(m))
        self.words: tuple[str, ...] = (str(folder / "project" / "train.py"), "--a", "1")
        self.env: dict[str, str] = {}

    def package(self, name: str, code: str) -> None:
        (self.packages / f"{name}.py").write_text(textwrap.dedent(code))

    def script(self, code: str, name: str = "train") -> None:
        (self.folder / "project" / f"{name}.py").write_text(textwrap.dedent(code))

    def start(self, attempt: int, **env: str) -> RankStart:
        every = {
            **os.environ, "PYTHONPATH": str(self.packages), "RANK": "0", "MASTER_PORT": str(29000 + attempt),
            "UNBROKEN_RUN_ID": self.run_id, "UNBROKEN_NODE": "n0", "UNBROKEN_ROLE": "rank", "UNBROKEN_ATTEMPT": str(attempt),
            **self.env, **env,
        }  # fmt: skip
        argv = (sys.executable, "-u", *self.words)
        return RankStart(
            0, attempt, argv, str(self.folder / "project"), every, self.folder / f"rank.{attempt}.log"
        )

    def log(self, attempt: int) -> str:
        return (self.folder / f"rank.{attempt}.log").read_text()

    async def wait(self, process: Any) -> int:
        deadline = time.monotonic() + 60
        while (code := process.poll()) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        return int(code)

    async def cold(self, attempt: int = 1, **env: str) -> int:
        return await self.wait(run_cold(self.pool.record(0, self.start(attempt, **env)), "n0", self.owner))

    async def make_ready(self, attempt: int = 1, **env: str) -> None:
        self.pool.prepare({0: self.start(attempt, **env)})
        assert self.pool._preparing is not None
        await self.pool._preparing

    async def warm(self, attempt: int = 2, **env: str) -> int | str:
        taken = await self.pool.take(0, self.start(attempt, **env))
        return taken if isinstance(taken, str) else await self.wait(taken)

    async def both(self) -> int | str:
        """Cold, then warm; how the second ended, or why there was none."""
        await self.cold()
        await self.make_ready()
        return await self.warm()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.pool.end()
    assert end(lambda: marked(made.run_id)) == []


def found(log: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(log.split("FOUND", 1)[1].splitlines()[0])
    return value


# --- what a script sees


def test_a_script_sees_what_it_sees_cold(ranks: Ranks) -> None:
    ranks.package("installed", "import decimal\nprint('hello from an import')")
    ranks.script('"""What it is for."""\nimport installed, own\n' + SHOW + "sys.exit(7)")
    ranks.script("NAME = __name__", "own")
    assert asyncio.run(ranks.both()) == 7
    cold, warm = found(ranks.log(1)), found(ranks.log(2))
    assert warm.pop("stdout") == "rank.2.log" and cold.pop("stdout") == "rank.1.log"
    assert cold == warm
    assert "installed" in warm["modules"] and warm["fds"] == ["0", "1", "2", "3"], "3 is that of the listing"
    assert "PYTHONPATH" in warm["environ"] and not [k for k in warm["environ"] if k == "UNBROKEN_START"]
    assert ranks.log(1).splitlines()[0] == ranks.log(2).splitlines()[0] == "hello from an import"
    assert ranks.told[0]["ready"], ranks.told


def test_a_warm_process_in_the_container_of_the_next_attempt_is_a_rank_of_that(tmp_path: Path) -> None:
    """As on Slurm: each attempt's ranks have a step of their own, with variables that their agent does not know."""

    def apart(run_id: str, place: Path) -> Apart:
        private_folder(place)
        return Apart(
            run_id, place, Container(("/bin/sh", "-c", 'SLURM_STEP_ID=$$ exec "$@"', "sh"), several=True)
        )

    ranks = Ranks(tmp_path, apart)
    ranks.script(
        "import os, decimal, colorsys\nprint(os.environ['SLURM_STEP_ID'], os.environ['UNBROKEN_ATTEMPT'])"
    )

    async def go() -> int | str:
        assert await ranks.cold() == 0
        await ranks.make_ready()
        ended = await asyncio.to_thread(ranks.owner.end_ranks, "n0", keep=ranks.pool.pids)
        assert ended.gone
        return await ranks.warm()

    assert asyncio.run(go()) == 0, ranks.told
    (one, first), (two, second) = ranks.log(1).split(), ranks.log(2).split()
    assert one != two and (first, second) == ("1", "2")
    assert ranks.owner.end_ranks("n0").gone and end(lambda: marked(ranks.run_id)) == []


def test_without_the_hook_it_would_see_the_same(ranks: Ranks) -> None:
    """A cold start records its imports, and shows nothing of that."""
    ranks.script(SHOW)

    async def run() -> None:
        await ranks.wait(run_cold(ranks.start(1), "n0", ranks.owner))
        await ranks.cold(2)

    asyncio.run(run())
    plain, recorded = found(ranks.log(1)), found(ranks.log(2))
    assert {**plain, "stdout": 0} == {**recorded, "stdout": 0}


def test_a_module_is_run_as_a_module(ranks: Ranks) -> None:
    ranks.package("installed", "import decimal")
    ranks.script("import installed\n" + SHOW, "job")
    ranks.words = ("-m", "job", "x")
    assert asyncio.run(ranks.both()) == 0
    assert {**found(ranks.log(1)), "stdout": 0} == {**found(ranks.log(2)), "stdout": 0}


def test_an_error_has_its_traceback_and_its_exit_code(ranks: Ranks) -> None:
    ranks.package("installed", "import decimal")
    ranks.script("import installed\ndef f():\n    raise ValueError('so')\nf()")
    assert asyncio.run(ranks.both()) == 1
    assert ranks.log(1) == ranks.log(2) and "ValueError: so" in ranks.log(2)


def test_the_attempt_is_the_new_one(ranks: Ranks) -> None:
    ranks.package("installed", "import decimal")
    ranks.script(
        "import installed, os, sys\nprint(os.environ['UNBROKEN_ATTEMPT'], os.environ['MASTER_PORT'], sys.argv[1:])"
    )

    async def run() -> None:
        await ranks.cold()
        await ranks.make_ready()
        ranks.words = (*ranks.words[:1], "--resume", "there", "x")
        assert await ranks.warm(12) == 0

    asyncio.run(run())
    assert ranks.log(12) == "12 29012 ['--resume', 'there', 'x']\n"


def test_it_is_found_as_a_rank_once_it_is_one(ranks: Ranks) -> None:
    ranks.package("installed", "import decimal")
    ranks.script("import installed, time, os, sys\nif os.environ['UNBROKEN_ATTEMPT'] != '1': time.sleep(60)")

    async def run() -> None:
        await ranks.cold()
        await ranks.make_ready()
        (waiting,) = marked(ranks.run_id)
        assert (waiting.role, ranks.pool.pids) == ("warm", {waiting.pid})
        assert ranks.owner.end_ranks("n0", keep=ranks.pool.pids).survivors == () and still_there(waiting)
        taken = await ranks.pool.take(0, ranks.start(4))
        assert not isinstance(taken, str) and ranks.pool.pids == frozenset()
        (rank,) = marked(ranks.run_id)
        assert (rank.pid, rank.role, rank.attempt, rank.rank) == (taken.pid, "rank", 4, 0)
        assert ranks.owner.end_ranks("n0", keep=ranks.pool.pids).survivors == ()
        assert await ranks.wait(taken) == -signal.SIGKILL

    asyncio.run(run())


# --- what is no cold start any more

SPOILED = {
    "uses the random generator of random": "import random\nimport fractions\nrandom.random()",
    "starts a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "leaves": "f = open(__file__)",
    "starts a process": "import subprocess, sys\np = subprocess.Popen(['sleep', '60'])",
    "changes sys.path": "import sys\nsys.path.insert(0, '/nowhere')",
    "changes the working directory": "import os\nos.chdir('/')",
    "fails": "import os\nif os.environ['UNBROKEN_ROLE'] == 'warm': raise ValueError('no')",
    "looks for own": "try:\n    import own\nexcept ImportError:\n    pass",
    "ended while it imported": "import os\nif os.environ['UNBROKEN_ROLE'] == 'warm': os._exit(3)",
}


@pytest.mark.parametrize("why", SPOILED)
def test_what_an_import_does_to_a_process_spoils_it(ranks: Ranks, why: str) -> None:
    """It is made again without that import, which the script makes itself then."""
    ranks.package("bad", SPOILED[why])
    ranks.package("good", "import decimal")
    ranks.script("import good, bad, os, sys, colorsys\nprint('ran', flush=True)\nos._exit(5)")
    ranks.script("", "own")
    ended = asyncio.run(ranks.both())
    (told,) = ranks.told
    if told["ready"]:
        assert ended == 5 and ranks.pool._without == {"bad"}
    else:
        assert why in told["why"] and ended == told["why"]
        assert (
            "ran" not in (ranks.folder / "rank.2.log").read_text()
            if (ranks.folder / "rank.2.log").exists()
            else True
        )
    assert [p for p in marked(ranks.run_id) if p.role == "warm"] == [], "nothing of a spoiled one is left"


def test_a_package_of_the_scripts_folder_is_not_imported(ranks: Ranks) -> None:
    """Neither its own, nor an installed one that its own hides."""
    ranks.package("shared", "print('the installed one')")
    ranks.script("import os\nprint('its own', os.environ['UNBROKEN_ATTEMPT'])", "shared")
    ranks.package("good", "import decimal")
    ranks.script("import good, shared")
    assert asyncio.run(ranks.both()) == 0
    assert ranks.log(2) == "its own 2\n"


def test_imports_after_the_script_set_a_variable_are_its_own(ranks: Ranks) -> None:
    ranks.package("first", "import decimal")
    ranks.package("second", "import os\nHOME = os.environ.get('THE_HOME')")
    ranks.script(
        "import first, os\nos.environ['THE_HOME'] = 'there'\nimport second, colorsys\nprint(second.HOME)"
    )
    assert asyncio.run(ranks.both()) == 0
    assert ranks.log(2) == "there\n"
    assert "THE_HOME" in ranks.told[0]["why"] and ranks.told[0]["ready"]


def test_what_a_compiler_sets_for_itself_keeps_no_import_back(ranks: Ranks) -> None:
    ranks.package("plain", "import decimal")
    ranks.package("last", "")
    ranks.package("reader", "import os\nHOME = os.environ.get('TRITON_CACHE_DIR')")
    ranks.script(
        "import sys, os\nbefore = ['decimal' in sys.modules, 'reader' in sys.modules, 'colorsys' in sys.modules]\n"
        "os.environ['TRITON_CACHE_DIR'] = 'there'\nimport plain, reader, colorsys, last\nprint(reader.HOME, *before)"
    )
    assert asyncio.run(ranks.both()) == 0
    assert ranks.log(2) == "there True False True\n"
    assert ranks.told[0] | {"seconds": 0, "modules": 0, "bytes": 0} == {
        "op": "warm", "local": 0, "ready": True, "why": "", "seconds": 0, "modules": 0, "bytes": 0
    }  # fmt: skip


def test_what_a_compiler_hashes_of_its_own_files_is_known_before_the_script(ranks: Ranks) -> None:
    for folder in ("triton", "triton/runtime", "torch", "torch/_inductor"):
        (ranks.packages / folder).mkdir()
        (ranks.packages / folder / "__init__.py").touch()
    ranks.package(
        "triton/runtime/cache",
        "import functools\n@functools.lru_cache\ndef triton_key():\n    return 'key'\n",
    )
    ranks.package(
        "torch/_inductor/codecache",
        "known = []\ndef torch_key():\n    known.append('key')\ntorch_key.set = known.append\n",
    )
    ranks.package("last", "import gc")
    ranks.script(
        "import triton.runtime.cache as c, torch._inductor.codecache as d, last, gc\n"
        "print(c.triton_key.cache_info().currsize, len(d.known), gc.get_freeze_count() > 1000)"
    )
    assert asyncio.run(ranks.both()) == 0
    assert ranks.log(1) == "0 0 False\n" and ranks.log(2) == "1 1 True\n"


def test_a_variable_that_was_read_may_not_be_another_one(ranks: Ranks) -> None:
    ranks.package("reader", "import os\nRANK = os.environ['MASTER_PORT']")
    ranks.script("import reader, colorsys\nprint(reader.RANK)")
    assert "MASTER_PORT is another one now, and was read when reader was imported" in str(
        asyncio.run(ranks.both())
    )


def test_where_the_flight_recorder_dumps_is_of_each_attempt_and_keeps_nobody_cold(ranks: Ranks) -> None:
    """A rank with GPUs has it, and a dump of one attempt may not lie where the next one's does."""
    pages = ranks.packages
    first, second = (record_flight(pages / f"attempt-{n}" / "rank.log", pages, n) for n in (1, 2))
    ranks.package("good", "import decimal")
    ranks.script("import good, colorsys, os\nprint(os.environ['TORCH_NCCL_DEBUG_INFO_TEMP_FILE'])")

    async def run() -> int | str:
        await ranks.cold(**first)
        await ranks.make_ready(**first)
        return await ranks.warm(**second)

    assert asyncio.run(run()) == 0
    assert ranks.log(2) == second["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + "\n" != ranks.log(1)


def test_another_environment_starts_cold(ranks: Ranks) -> None:
    ranks.package("good", "import decimal")
    ranks.script("import good, colorsys")

    async def run() -> int | str:
        await ranks.cold()
        await ranks.make_ready()
        return await ranks.warm(CUDA_VISIBLE_DEVICES="1")

    assert asyncio.run(run()) == "CUDA_VISIBLE_DEVICES is another one now"


def test_a_package_that_was_changed_meanwhile_is_not_used(ranks: Ranks) -> None:
    ranks.package("good", "import decimal")
    ranks.script("import good, colorsys")

    async def run() -> int | str:
        await ranks.cold()
        await ranks.make_ready()
        ranks.package("good", "import decimal, fractions")
        return await ranks.warm()

    assert "good.py was changed since" in str(asyncio.run(run()))


def test_another_script_starts_cold(ranks: Ranks) -> None:
    ranks.package("good", "import decimal")
    ranks.script("import good, colorsys")

    async def run() -> int | str:
        await ranks.cold()
        await ranks.make_ready()
        ranks.words = (str(ranks.folder / "project" / "other.py"),)
        return await ranks.warm()

    assert asyncio.run(run()) == "the script is another one"


def test_one_that_died_or_stopped_while_it_waited_is_survived(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.package("good", "import decimal")
    ranks.script("import good, colorsys")
    monkeypatch.setattr("unbroken.recover.node.warm.process.ANSWER_S", 0.2)

    async def run(sig: int) -> int | str:
        await ranks.cold()
        await ranks.make_ready()
        (pid,) = ranks.pool.pids
        os.kill(pid, sig)
        if sig == signal.SIGKILL:
            await ranks.wait(ranks.pool._ready[0]._process)
        return await ranks.warm()

    assert asyncio.run(run(signal.SIGKILL)) == "its warm process has ended"
    assert asyncio.run(run(signal.SIGSTOP)) == "its warm process did not answer"


def test_no_process_waits_where_the_command_is_no_script(ranks: Ranks) -> None:
    assert can_record((sys.executable, "-u", "a.py")) and can_record((sys.executable, "-u", "-m", "a"))
    assert not can_record(("bash", "-c", "true")) and not can_record((sys.executable, "-u", "-I", "a.py"))
    assert not can_record((sys.executable, "-u"))
    ranks.words = ("-c", "pass")
    asyncio.run(ranks.make_ready())
    assert not ranks.told[0]["ready"] and "no Python script" in ranks.told[0]["why"]


def test_its_own_folder_is_what_the_interpreter_takes(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.py").touch()
    (tmp_path / "a.py").symlink_to(tmp_path / "real" / "a.py")
    assert find_own_folder(("python", "-u", "a.py"), str(tmp_path)) == str(tmp_path / "real")
    assert find_own_folder(("python", "-u", "-m", "a"), str(tmp_path)) == str(tmp_path)


def test_a_record_of_another_node_is_checked(tmp_path: Path) -> None:
    assert check_lines(["a", "b.c"]) == ["a", "b.c"]
    assert check_lines("ab") == check_lines([1]) == check_lines(["x" * 10_000]) == check_lines(None) == []
    assert read_imports(tmp_path) == []


def test_what_waits_dies_with_its_agent(tmp_path: Path) -> None:
    """Held by a small parent, as on a machine without cgroups: the fence of the node leaves nothing."""
    ranks = Ranks(tmp_path, Parents)
    ranks.package("good", "import decimal")
    ranks.script("import good, colorsys")

    async def run() -> None:
        await ranks.cold()
        await ranks.make_ready()

    asyncio.run(run())
    assert len(ranks.pool.pids) == 1
    assert ranks.owner.end_ranks("n0").gone and ranks.pool.pids == frozenset()
    ranks.pool.end()


def test_a_sitecustomize_of_the_users_own_is_loaded(ranks: Ranks) -> None:
    """Ours stands in front of it, and steps aside."""
    ranks.package("sitecustomize", "import sys\nsys.of_the_user = __file__")
    ranks.package("good", "import decimal")
    ranks.script("import good, colorsys, sys\nprint(sys.of_the_user, sys.modules['sitecustomize'].__file__)")
    assert asyncio.run(ranks.both()) == 0
    assert (
        ranks.log(1)
        == ranks.log(2)
        == f"{ranks.packages}/sitecustomize.py {ranks.packages}/sitecustomize.py\n"
    )
