"""A run whose agents come over TLS: trains, survives its supervisor, and shows its key nowhere."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from unbroken.cluster.holding.processes import marked
from unbroken.link.address import Address
from unbroken.link.tls import Identity
from unbroken.progress import read_spec, read_terms

from .conftest import RunUnderTest

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NewRun = Callable[..., RunUnderTest]
PROGRAM = str(Path(__file__).with_name("plain_cluster.py"))


def shown_by(run_id: str, needles: list[bytes]) -> list[str]:
    """Processes of the run whose arguments or environment hold one of these."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            argv = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if run_id.encode() in environ + argv and any(n in environ + argv for n in needles):
            found.append(argv.decode(errors="replace"))
    return found


def test_a_run_over_tls_is_taken_over_and_its_key_is_nowhere_else(new_run: NewRun, tmp_path: Path) -> None:
    """On another cluster than this machine, named on the command line: its agents are given nothing but their arguments."""
    (notes := tmp_path / "notes").mkdir()
    cluster = f"plain,notes={notes},size=2"
    run = new_run("--nodes", "2", "--nproc", "1", "--cluster", cluster, steps=150).start(
        program=PROGRAM, NOT_ON_NODES="1"
    )
    run.until_step(3)
    (term,) = read_terms(run.run_dir)
    assert isinstance(term.address, str)
    address = Address.parse(term.address)
    assert address.kind == "tls" and address.host == "127.0.0.1"
    assert run.run_dir.identity.stat().st_mode & 0o777 == 0o600
    identity = Identity.read(run.run_dir.identity)
    secrets = [
        line.encode() for line in (*identity.key.splitlines()[1:-1], run.run_dir.token.read_text().strip())
    ]
    assert shown_by(term.run_id, secrets) == []
    assert run.process is not None
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(10)
    assert not any(
        b"NOT_ON_NODES" in (Path("/proc") / str(p.pid) / "environ").read_bytes() for p in marked(term.run_id)
    )
    run.options = run.options[:4]  # run.toml says where it runs
    run.start(program=PROGRAM)
    assert run.wait() == 0, run.output
    assert "took over attempt 1" in run.output
    assert len(read_terms(run.run_dir)) == 2 and run.attempts() == 1
    assert Identity.read(run.run_dir.identity) == identity
    assert run.faults.left_over() == []
    holders = [
        str(p.relative_to(run.run_dir.path))
        for p in run.run_dir.path.rglob("*")
        if p.is_file() and any(s in p.read_bytes() for s in secrets)
    ]
    assert sorted(holders) == ["identity.pem", "token"]
    assert read_spec(run.run_dir.spec).cluster.options == {"notes": str(notes), "size": "2"}


def test_what_a_cluster_cannot_do_is_said_before_anything_is_written(new_run: NewRun, tmp_path: Path) -> None:
    for cluster, says in (
        ("plane", "Did you mean 'plain'"),
        (f"plain,notes={tmp_path},sise=3", "Did you mean 'size'"),
        ("plain", "'notes' is missing"),
        (f"plain,notes={tmp_path},size=many", "expected a whole number"),
        (f"plain,notes={tmp_path},size=1", "there are 1 plain nodes"),
    ):
        run = new_run("--nodes", "2", "--cluster", cluster)
        assert run.start(program=PROGRAM).wait() in (2, 14) and says in run.output
        assert not run.run_dir.path.exists()


def test_a_script_that_is_not_on_a_node_is_said_to_be_missing_there(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run("--cluster", f"plain,notes={tmp_path / 'notes'}")
    (tmp_path / "notes").mkdir()
    run.command = ["absent.py"]
    assert run.start(program=PROGRAM).wait() == 10
    assert "the script does not exist (node plain-0" in run.output and run.attempts() == 0


NOISY = """
import os, sys, time
import unbroken

run = unbroken.attach(total_steps=int(sys.argv[1]))
rank = int(os.environ["RANK"])
for step in range(1, int(sys.argv[1]) + 1):
    time.sleep(float(sys.argv[2]))
    run.step(step, loss=1.0 / step, tokens=100)
    print("rank", rank, "step", step, "x" * 5000)
    if run.should_stop(step):
        sys.exit(unbroken.EXIT_STOPPED)
    if step == 30 and rank == 1 and os.environ["UNBROKEN_ATTEMPT"] == "1":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""


def test_logs_come_over_the_link_where_nodes_have_no_run_directory(new_run: NewRun, tmp_path: Path) -> None:
    """Every line is there, once, over a failure and a supervisor that is killed; the diagnosis has read them."""
    (notes := tmp_path / "notes").mkdir()
    options = (
        "--nodes",
        "2",
        "--cluster",
        f"plain,apart,notes={notes}",
        "--record",
        "own-disk",
        "--lease",
        "5s",
    )
    run = new_run(*options, steps=80, script=NOISY).start(program=PROGRAM)
    run.until_step(10)
    assert run.process is not None
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(10)
    run.start(program=PROGRAM)
    assert run.wait() == 0, run.output
    assert "took over attempt 1" in run.output
    assert "has not got the run directory" in run.output
    _, incident = run.incidents()  # the first is the takeover
    assert incident["verdict"]["reason"] == "ECCError" and incident["verdict"]["root"]["rank"] == 1
    log = run.run_dir.rank_log(1, "plain-1", 1).read_text()
    assert log.count("rank 1 step") == 30 and "uncorrectable ECC" in log
    steps = run.attempts() == 2 and run.run_dir.rank_log(2, "plain-0", 0).read_text().count("rank 0 step")
    assert steps == 80 and "\0" not in log
    assert "attempt 2 begins" in run.run_dir.agent_log("plain-0").with_suffix(".keeper.log").read_text()
    assert not (tmp_path / "nowhere").exists() and run.faults.left_over() == []
