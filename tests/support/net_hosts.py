"""Hosts for tests: network namespaces on one bridge of this machine, whose links can be cut. Needs root and `ip`.

They share file systems, processes and clocks with this machine; host names and networks are their own. A bridge that belongs to
nobody joins them, so that each has an address `10.88.<net>.<number>` and reaches all others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .ssh_server import make_keys

REPO = Path(__file__).resolve().parents[2]
SSH_PORT = 2222


def why_not() -> str:
    """Why this machine cannot have such hosts; nothing where it can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    missing = [p for p in ("ip", "unshare", "nsenter") if shutil.which(p) is None]
    if missing:
        return f"hosts in network namespaces need {', '.join(missing)} (apt install iproute2 util-linux)"
    tried = subprocess.run(["ip", "netns", "add", "ubprobe"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", "ubprobe"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no network namespace can be made here: {tried.stderr.strip()}"


def ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class NetHosts:
    """`count` hosts h0, h1, ..., each with an ssh server on SSH_PORT where `ssh` says so; `options()` is a cluster of some."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self._net = os.getpid() % 250
        self._tag = f"ub{os.getpid() % 100_000}"
        self._children: list[subprocess.Popen[bytes]] = []
        make_keys(folder / "ssh")
        self.bridge = f"{self._tag}b"
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        names = "".join(f"{self.address(i)} h{i}\n" for i in range(count))
        for i in range(count):
            self._etc(i).mkdir(parents=True)
            (self._etc(i) / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            self._add(i)

    def _etc(self, i: int) -> Path:
        """What `ip netns exec` lays over /etc."""
        return Path("/etc/netns") / self.space(i)

    def _add(self, i: int) -> None:
        space = self.space(i)
        ip("netns", "add", space)
        ip("link", "add", self.port(i), "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", self.port(i), "master", self.bridge, "up")
        ip("-n", space, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        ip("-n", space, "route", "add", "default", "dev", "eth0")

    def space(self, i: int) -> str:
        return f"{self._tag}-{i}"

    def port(self, i: int) -> str:
        return f"{self._tag}v{i}"

    def address(self, i: int) -> str:
        return f"10.88.{self._net}.{i + 1}"

    # --- what runs there

    def argv(self, i: int, command: list[str]) -> list[str]:
        """The command as it runs on a host, with its network and name."""
        inside = ["sh", "-c", f'hostname h{i} && exec "$@"', "sh", *command]
        return ["ip", "netns", "exec", self.space(i), "unshare", "--uts", *inside]

    def serve_ssh(self, i: int, **env: str) -> None:
        """Starts the ssh server of a host; what comes in by it has `env` too."""
        command = [sys.executable, "-m", "tests.support.ssh_server", "--folder", str(self.folder / "ssh"), "--port", str(SSH_PORT)]  # fmt: skip
        with open(self.folder / f"ssh-{i}.log", "ab") as log:
            self._children.append(
                subprocess.Popen(
                    self.argv(i, command), cwd=REPO, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env={**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), **env}, start_new_session=True,
                )
            )  # fmt: skip

    def wait_for_ssh(self, hosts: list[int], within: float = 60) -> None:
        deadline = time.monotonic() + within
        for i in hosts:
            probe = f"import socket; socket.create_connection(('{self.address(i)}', {SSH_PORT}), 2)"
            while subprocess.run(self.argv(0, [sys.executable, "-I", "-S", "-c", probe]), capture_output=True, check=False).returncode:  # fmt: skip
                if time.monotonic() > deadline:
                    raise TimeoutError((self.folder / f"ssh-{i}.log").read_text())
                time.sleep(0.1)

    def cluster(self, hosts: list[int]) -> str:
        """`--cluster` for a run on these."""
        lines = [f"h{i} address={self.address(i)} port={SSH_PORT} python={sys.executable}" for i in hosts]
        (self.folder / "HOSTS").write_text("\n".join(lines) + "\n")
        keys = self.folder / "ssh"
        return f"hosts,file={self.folder / 'HOSTS'},key={keys / 'user'},known_hosts={keys / 'known_hosts'},notice=3s"

    def pids(self, i: int) -> list[int]:
        return [int(p) for p in ip("netns", "pids", self.space(i), check=False).split()]

    # --- faults

    def cut(self, i: int) -> None:
        """The link goes dead without a reset, as that of a switch port that is lost."""
        ip("link", "set", self.port(i), "nomaster")

    def heal(self, i: int) -> None:
        ip("link", "set", self.port(i), "master", self.bridge)
        for j in range(self.count):
            ip("-n", self.space(i), "neigh", "del", self.address(j), "dev", "eth0", check=False)

    def deafen(self, i: int, others: list[int]) -> None:
        """What this host sends reaches none of these, what they send reaches it: a link that works in one direction only."""
        for j in others:
            ip("-n", self.space(i), "neigh", "replace", self.address(j), "lladdr", "02:00:00:00:00:fe", "nud", "permanent", "dev", "eth0")  # fmt: skip

    def slow(self, i: int, rate: str = "2mbit") -> None:
        """The link carries no more than this in either direction."""
        for where in (["-n", self.space(i)], []):
            device = "eth0" if where else self.port(i)
            subprocess.run(["tc", *where, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms"], check=True)  # fmt: skip

    def crash(self, i: int) -> None:
        """The host is gone from one moment to the next: nobody hears a last word of it."""
        self.cut(i)
        deadline = time.monotonic() + 10
        while (pids := self.pids(i)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def close(self) -> None:
        for i in range(self.count):
            self.crash(i)
            ip("netns", "del", self.space(i), check=False)
            ip("link", "del", self.port(i), check=False)
            shutil.rmtree(self._etc(i), ignore_errors=True)
        ip("link", "del", self.bridge, check=False)
        for child in self._children:
            child.wait(10)


@contextlib.contextmanager
def net_hosts(folder: Path, count: int) -> Iterator[NetHosts]:
    """So many hosts, and nothing of them afterwards."""
    made = NetHosts(folder, count)
    try:
        yield made
    finally:
        made.close()
