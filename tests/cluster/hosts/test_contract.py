"""Hosts over ssh keep the contract, with real processes: four of them on this machine, each with an ssh server of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("asyncssh", reason="needs asyncssh: pip install -r requirements/all.txt")

import sys

from unbroken.cluster.contract import Cluster, Request
from unbroken.cluster.registry import make_cluster
from unbroken.errors import DoesNotFit, UnbrokenError

from ...support.ssh_server import SshHosts, make_keys
from ..contract import ClusterContract
from ..test_contract_local import LocalBench
from .bench import IMPOSSIBLE, lend

pytestmark = pytest.mark.slow
NAMES = [
    f"s{i}" for i in range(4)
]  # no other test's: a host is not taken where another run has an agent on it


class HostsBench(LocalBench):
    impossible: ClassVar[Mapping[str, str]] = IMPOSSIBLE

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self.ssh = SshHosts(folder / "ssh", NAMES, {"XDG_STATE_HOME": str(folder / "state")})
        lines = [f"{n} address=127.0.0.1 port={self.ssh.ports[n]} python={sys.executable}" for n in NAMES]
        (folder / "HOSTS").write_text("# four\n" + "\n".join(lines) + "\n")

    def options(self) -> dict[str, str]:
        keys = self.ssh.folder
        return {
            "file": str(self.folder / "HOSTS"), "key": str(keys / "user"), "known_hosts": str(keys / "known_hosts"),
        }  # fmt: skip

    def open(self) -> Cluster:
        return make_cluster("hosts", self.run_id, self.options())

    def hold(self) -> None:
        for name in NAMES:
            self.ssh.shut(name)

    def grant(self) -> None:
        for name in NAMES:
            self.ssh.open(name)

    def isolate(self, node: str) -> None:
        self.ssh.shut(node)

    def return_node(self, node: str) -> None:
        self.ssh.open(node)

    def close(self) -> None:
        self.ssh.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[HostsBench]:
    yield from lend(HostsBench(tmp_path))


class TestHosts(ClusterContract):
    pass


def test_who_lets_us_in_where_to_and_with_what_is_said_before_training(bench: HostsBench) -> None:
    """An unknown host key, nobody let in, a Python without unbroken, no host there: in words, with what to do."""
    right = bench.options()
    other = bench.folder / "other"
    make_keys(other)
    (bench.folder / "BAD").write_text(
        f"s0 address=127.0.0.1 port={bench.ssh.ports['s0']} python=/bin/false\n"
    )
    (bench.folder / "GONE").write_text("s0 address=127.0.0.1 port=1\n")
    for wrong, says, do in (
        ({"known_hosts": str(other / "known_hosts")}, "host key of s0 is not known", "let ssh learn it once"),
        ({"key": str(other / "user")}, "lets nobody in", "name a user="),
        ({"file": str(bench.folder / "BAD")}, "does not run our program", "python=/path/to/python"),
        ({"file": str(bench.folder / "GONE")}, "no host can be reached", "log in there with ssh"),
        ({"file": str(bench.folder / "NONE")}, "list of hosts cannot be read", ""),
    ):
        cluster = make_cluster("hosts", bench.run_id, {**right, **wrong})
        with pytest.raises(UnbrokenError, match=says) as error:
            cluster.check(Request(1))
        assert do in (error.value.hint or "")
    make_cluster("hosts", bench.run_id, right).check(Request(3, 1))
    with pytest.raises(DoesNotFit):
        make_cluster("hosts", bench.run_id, right).check(Request(4, 1))
