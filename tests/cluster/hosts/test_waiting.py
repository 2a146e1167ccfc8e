"""Hosts that wait for supervisors keep the contract, with real processes: four on this machine, without ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from unbroken.cluster.contract import Cluster, Request
from unbroken.cluster.hosts.options import HostsOptions
from unbroken.cluster.hosts.waiting import _read_order
from unbroken.cluster.registry import make_cluster
from unbroken.errors import UnbrokenError, UsageError
from unbroken.link.tls import Identity

from ..contract import ClusterContract
from ..test_contract_local import LocalBench
from .bench import IMPOSSIBLE, lend

NAMES = [
    f"w{i}" for i in range(4)
]  # no other test's: a host is not taken where another run has an agent on it
AGENT = [sys.executable, "-m", "unbroken", "agent"]


class WaitingHost:
    """`unbroken agent` in a process of its own, at the same port each time."""

    def __init__(self, identity: Path, state: Path) -> None:
        self._identity, self._state, self.port = identity, state, 0
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [*AGENT, "--identity", str(self._identity), "--listen", "127.0.0.1", "--port", str(self.port)],
                stdout=subprocess.PIPE, text=True, env={**os.environ, "XDG_STATE_HOME": str(self._state)},
            )  # fmt: skip
            assert self._process.stdout is not None
            said = self._process.stdout.readline()
            found = re.search(r":(\d+)$", said.strip())
            assert found, said
            self.port = int(found[1])

    def shut(self, how: int = signal.SIGTERM) -> int | None:
        if self._process is None:
            return None
        process, self._process = self._process, None
        process.send_signal(how)
        with process:
            return process.wait(20)


class WaitingBench(LocalBench):
    impossible: ClassVar[Mapping[str, str]] = IMPOSSIBLE

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self.identity = folder / "identity"
        Identity.make("hosts").write(self.identity)
        self.hosts = {n: WaitingHost(self.identity, folder / "state") for n in NAMES}
        for host in self.hosts.values():
            host.open()
        lines = [f"{n} address=127.0.0.1 port={h.port}" for n, h in self.hosts.items()]
        (folder / "HOSTS").write_text("\n".join(lines) + "\n")

    def options(self) -> dict[str, str]:
        return {"file": str(self.folder / "HOSTS"), "identity": str(self.identity)}

    def open(self) -> Cluster:
        return make_cluster("hosts", self.run_id, self.options())

    def hold(self) -> None:
        for host in self.hosts.values():
            host.shut(signal.SIGKILL)

    def grant(self) -> None:
        for host in self.hosts.values():
            host.open()

    def isolate(self, node: str) -> None:
        self.hosts[node].shut(signal.SIGKILL)

    def return_node(self, node: str) -> None:
        self.hosts[node].open()

    def close(self) -> None:
        for host in self.hosts.values():
            host.shut()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[WaitingBench]:
    yield from lend(WaitingBench(tmp_path))


@pytest.mark.slow
@pytest.mark.soak  # the same contract that hosts with a login pass in `make test-all`
class TestWaitingHosts(ClusterContract):
    pass


@pytest.mark.slow
def test_what_is_wrong_is_said_before_training(bench: WaitingBench) -> None:
    """Another certificate, one that others may read, nobody who waits: in words, with what to do; and a stranger gets nothing."""
    right = bench.options()
    make_cluster("hosts", bench.run_id, right).check(Request(3, 1))
    other, loose = bench.folder / "other", bench.folder / "loose"
    Identity.make("hosts").write(other)
    loose.write_bytes(bench.identity.read_bytes())
    loose.chmod(0o644)
    (bench.folder / "GONE").write_text("w0 address=127.0.0.1 port=1\n")
    for wrong, says, do in (
        ({"identity": str(other)}, "certificate", "every host"),
        ({"identity": str(loose)}, "others", ""),
        ({"file": str(bench.folder / "GONE")}, "nobody waits there", "unbroken agent --identity"),
    ):
        with pytest.raises(UnbrokenError, match=says) as error:
            make_cluster("hosts", bench.run_id, {**right, **wrong}).check(Request(1))
        assert do in (error.value.hint or "")
    with socket.create_connection(("127.0.0.1", bench.hosts["w0"].port), 5) as stranger:
        stranger.sendall(b'{"run":"x","node":"w0","ownership":"auto","notice_s":3}\n')
        stranger.settimeout(15)
        with contextlib.suppress(OSError):
            assert b"unbroken" not in stranger.recv(1000)
    make_cluster("hosts", bench.run_id, right).check(Request(3, 1))
    assert bench.hosts["w0"].shut() == 0


@pytest.mark.parametrize(
    "line",
    [
        b"", b"null", b"[]", b"{", b'{"run":"r"}', b'{"run":"-r","node":"h","ownership":"auto","notice_s":3}',
        b'{"run":"r","node":"../h","ownership":"auto","notice_s":3}', b'{"run":"r","node":"h","ownership":"--x","notice_s":3}',
        b'{"run":"r","node":"h","ownership":"auto","notice_s":1e9}',
    ],
)  # fmt: skip
def test_what_no_supervisor_says(line: bytes) -> None:
    with pytest.raises(ValueError):
        _read_order(line)


def test_options_of_a_login_beside_a_certificate() -> None:
    with pytest.raises(UsageError, match="not logged in to"):
        HostsOptions(hosts=("a",), identity=Path("x"), user="me")


@pytest.mark.slow
def test_the_command_makes_a_certificate_once_and_asks_for_one(tmp_path: Path) -> None:
    file = tmp_path / "identity"

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*AGENT, "--identity", str(file), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    missing = run()
    assert missing.returncode == 3 and "--make" in missing.stderr
    assert run("--make").returncode == 0 and file.stat().st_mode & 0o777 == 0o600
    assert run("--make").returncode == 2
    taken = run("--interface", "nosuch0")
    assert taken.returncode == 2 and "no interface" in taken.stderr


async def one_program(identity: Path, port: int, words: list[str]) -> str:
    """What somebody with the certificate is told who asks for something else."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=Identity.read(identity).context(server=False)
    )
    writer.write(" ".join(words).encode() + b"\n")
    said = (await reader.read()).decode()
    writer.close()
    return said


@pytest.mark.slow
def test_who_asks_for_nothing_that_there_is_gets_a_line(bench: WaitingBench) -> None:
    assert "named no run" in asyncio.run(one_program(bench.identity, bench.hosts["w1"].port, ["{}"]))
