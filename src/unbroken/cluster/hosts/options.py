"""Which hosts there are, and how they are reached."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError, UsageError
from ...units import Duration

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_KEYS = ("address", "port", "user", "python")
_MOST = 100_000


@dataclass(frozen=True)
class HostsOptions:
    """Options of `--cluster hosts`."""

    file: Path | None = None
    """A file with a host a line: its name, then where it differs address=, port=, user=, python=; # begins a comment."""
    hosts: tuple[str, ...] = ()
    """The hosts themselves, where there is no file."""
    user: str = ""
    """Whom to log in as; by default ssh's configuration says."""
    port: int = 0
    """0: as ssh's configuration says; with `identity` 7171."""
    key: Path | None = None
    """A private key for ssh, beside those that it finds itself."""
    known_hosts: Path | None = None
    """The file of known host keys; by default ssh's own."""
    identity: Path | None = None
    """Nobody logs in: the hosts wait for supervisors (`unbroken agent`), and this is the certificate that all have."""
    python: str = "python3"
    """The Python on the hosts, which has unbroken."""
    interface: str = ""
    """The interface of the supervisor's host by which the hosts reach it, such as ib0. Default: by the routes of this host."""
    ownership: str = "auto"
    """How processes are held there: cgroup, parent, marks; auto takes the surest that works."""
    notice: Duration = Duration("6s")
    """After so long without a sign a connection counts as broken."""

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.hosts):
            raise UsageError(
                "say which hosts: either file=HOSTS, or hosts=a,b,c", hint="--cluster hosts,file=HOSTS"
            )
        if self.identity and (self.user or self.key or self.known_hosts):
            raise UsageError(
                "hosts that wait (identity=) are not logged in to: no user=, key= or known_hosts= counts"
            )
        if not 0 <= self.port < 1 << 16:
            raise UsageError(f"there is no port {self.port}")
        if self.notice < 1:
            raise UsageError("notice must be a second or more: a busy network is none that is broken")


@dataclass(frozen=True)
class Host:
    """One host. `name` is its node's; empty fields are as the options say."""

    name: str
    address: str = ""
    port: int = 0
    user: str = ""
    python: str = ""


def list_hosts(options: HostsOptions) -> list[Host]:
    """The hosts, in their order. Raises InputError, UsageError."""
    if options.file is None:
        return _check([_parse(name, "--cluster hosts") for name in options.hosts], "--cluster hosts")
    where = str(options.file)
    try:
        text = options.file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"the list of hosts cannot be read: {e}", where=where) from e
    lines = [(n, line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    return _check([_parse(line, f"{where}, line {n}") for n, line in lines if line], where)


def _parse(line: str, where: str) -> Host:
    name, *words = line.split()
    if not _NAME.fullmatch(name):
        raise UsageError(f"'{name}' is no name of a host", where=where)
    fields: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise UsageError(f"expected {', '.join(f'{k}=' for k in _KEYS)}, found '{word}'", where=where)
        fields[key] = value
    port = fields.pop("port", "0")
    if not port.isdigit() or int(port) >= 1 << 16:
        raise UsageError(f"there is no port {port}", where=where)
    return Host(name, port=int(port), **fields)


def _check(hosts: list[Host], where: str) -> list[Host]:
    names = [h.name for h in hosts]
    if double := {n for n in names if names.count(n) > 1} if len(names) < _MOST else set():
        raise UsageError(f"'{min(double)}' is there twice", where=where)
    if not hosts:
        raise UsageError("there is no host in the list", where=where)
    return hosts
