"""A run whose agents come over TLS: trains, survives its supervisor, and shows its key nowhere."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from unbroken.link.address import Address
from unbroken.link.tls import Identity
from unbroken.progress import read_terms

from .conftest import RunUnderTest

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NewRun = Callable[..., RunUnderTest]
PROGRAM = str(Path(__file__).with_name("over_tls.py"))


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


def test_a_run_over_tls_is_taken_over_and_its_key_is_nowhere_else(new_run: NewRun) -> None:
    run = new_run("--nodes", "2", "--nproc", "1", steps=150).start(program=PROGRAM)
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
