"""A host that waits for supervisors, where nobody may log in: `unbroken agent` on it.

Both sides show the one certificate that the hosts and the supervisor have (TLS 1.3). Then a connection is what ssh would give:
`program` runs at its other end, for one run and one node, for as long as the connection does. What the program started goes
on, also where the waiting process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from ...errors import RunError
from ...link.tls import Identity
from ...waiting import wait_within
from .program import LINE_BYTES

PORT = 7171
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_OWNERSHIPS = ("auto", "cgroup", "parent", "marks")
_FIRST_S = 10.0
_END_S = 10.0
_MOST = 256
_PIECE = 1 << 16


class NotOurs(RunError):
    """The other side has another certificate."""


class Reached:
    """A program at the other end, with the streams that asyncssh gives of one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._last = ""
        self.stdin = self.stdout = self.stderr = self

    async def readline(self) -> bytes:
        """The next line; b"" once the connection has ended."""
        try:
            line = await self._reader.readline()
        except (OSError, ValueError) as e:
            self._last, line = str(e), b""
        if line and not line.startswith(b"{"):
            self._last = line.decode(errors="replace").strip()
        return line

    def write(self, text: str) -> None:
        self._writer.write(text.encode())

    def write_eof(self) -> None:
        """Nothing more is asked; TLS knows no half of a connection that ends."""

    async def read(self) -> str:
        """What was said last that is no message: why there is no program."""
        return self._last


@contextlib.asynccontextmanager
async def reach(
    where: str, port: int, identity: Identity, run_id: str, node: str, ownership: str, notice_s: float
) -> AsyncIterator[Reached]:
    """A connection to a host that waits. Raises NotOurs, OSError (TimeoutError too)."""
    try:
        reader, writer = await asyncio.open_connection(
            where, port, ssl=identity.context(server=False), limit=LINE_BYTES
        )
    except ssl.SSLError as e:
        raise NotOurs(f"it has another certificate: {e.reason or e}", where=f"{where}:{port}") from e
    try:
        _check(writer, identity, f"{where}:{port}")
        _watch(writer, notice_s)
        first = {"run": run_id, "node": node, "ownership": ownership, "notice_s": notice_s}
        writer.write(json.dumps(first).encode() + b"\n")
        yield Reached(reader, writer)
    finally:
        writer.close()


def _check(writer: asyncio.StreamWriter, identity: Identity, where: str) -> None:
    try:
        identity.check(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    except ssl.SSLError as e:
        raise NotOurs(str(e), where=where) from e


def _watch(writer: asyncio.StreamWriter, notice_s: float) -> None:
    """Has the kernel end a connection whose other side does not answer for so long."""
    sock: socket.socket = writer.get_extra_info("socket")
    third = max(1, round(notice_s / 3))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(notice_s * 1000))


async def wait(identity: Identity, address: str, port: int, up: Callable[[str], None]) -> None:
    """Serves until it is cancelled; `up` is told where. Raises OSError where that address cannot be had."""
    waiting = _Waiting(identity)
    server = await asyncio.start_server(
        waiting.serve, address, port, ssl=identity.context(server=True), ssl_handshake_timeout=_FIRST_S,
        limit=LINE_BYTES,
    )  # fmt: skip
    async with server:
        name = server.sockets[0].getsockname()
        up(f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}")
        await server.serve_forever()


class _Waiting:
    """What one waiting process has to do with its connections."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._served = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: a supervisor, or a stranger, of whom nothing is read before both certificates are known."""
        peer = writer.get_extra_info("peername")[0]
        self._served += 1
        try:
            _check(writer, self._identity, peer)
            if self._served > _MOST:
                raise RunError(f"there are {_MOST} connections already", where=peer)
            async with asyncio.timeout(_FIRST_S):
                order = _read_order(await reader.readline())
            _watch(writer, order["notice_s"])
            await _run(order, reader, writer)
        except (RunError, ValueError, TimeoutError, OSError) as e:
            print(f"a connection from {peer} was ended: {e}", file=sys.stderr)
            with contextlib.suppress(OSError):
                writer.write(f"{e}\n".encode())
        finally:
            self._served -= 1
            writer.close()


def _read_order(line: bytes) -> dict[str, Any]:
    """What a supervisor says first. Raises ValueError."""
    found = json.loads(line or b"null")
    if not isinstance(found, dict):
        raise ValueError("it said nothing")
    for key in ("run", "node"):
        if not isinstance(found.get(key), str) or not _NAME.fullmatch(found[key]):
            raise ValueError(f"it named no {key}")
    if found.get("ownership") not in _OWNERSHIPS:
        raise ValueError("it asked for an ownership that there is not")
    if not isinstance(found.get("notice_s"), (int, float)) or not 1 <= found["notice_s"] <= 3600:
        raise ValueError("it gave no time after which it counts as gone")
    return found


async def _run(order: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Runs the program between the two ends; returns when either ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "unbroken.cluster.hosts.program", order["run"], order["node"],
        "--ownership", order["ownership"], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    said: list[bytes] = []
    there = asyncio.create_task(_copy(functools.partial(reader.read, _PIECE), process.stdin))
    back = asyncio.create_task(_copy(functools.partial(process.stdout.read, _PIECE), writer))
    errors = asyncio.create_task(_note(process.stderr, said))
    try:
        await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        if back.done() and said:  # it ended by itself, and said why
            await asyncio.wait([errors], timeout=1)
            writer.write(said[-1] + b"\n")
    finally:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await wait_within(process.wait(), _END_S)
        if process.returncode is None:
            process.kill()
        for task in (there, back, errors):
            task.cancel()


async def _copy(read: Callable[[], Any], out: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await read():
            out.write(data)
            await out.drain()


async def _note(lines: asyncio.StreamReader, said: list[bytes]) -> None:
    """Shows what the program complains of, and keeps the last line."""
    with contextlib.suppress(ValueError):
        while line := await lines.readline():
            said[:] = [line.strip()]
            sys.stderr.write(line.decode(errors="replace"))
