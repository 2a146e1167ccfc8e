"""A server of ssh for tests, which asks for a key and runs commands as this user: a host without sshd takes part.

In a process of its own: `python -m tests.support.ssh_server --folder KEYS --listen ADDRESS --port 2222`; keys as `make_keys` makes.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncssh


def make_keys(folder: Path) -> None:
    """`host` and `user`, with their public halves, and `known_hosts` for any address."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("host", "user"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(folder / name))
        key.write_public_key(str(folder / f"{name}.pub"))
    (folder / "known_hosts").write_text("* " + (folder / "host.pub").read_text())


async def serve(
    folder: Path, listen: str, port: int, environment: Mapping[str, str]
) -> tuple[asyncssh.SSHAcceptor, set[asyncssh.SSHServerConnection]]:
    """Serves from now on; the connections that there are."""
    there: set[asyncssh.SSHServerConnection] = set()

    class Server(asyncssh.SSHServer):
        def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
            self._conn = conn
            there.add(conn)

        def connection_lost(self, exc: Exception | None) -> None:
            there.discard(self._conn)

    async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
        child = await asyncio.create_subprocess_shell(
            process.command or "true", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        pumps = [
            asyncio.create_task(pump(process.stdin.read, child.stdin)),
            asyncio.create_task(pump(child.stdout.read, process.stdout)),  # type: ignore[union-attr]
            asyncio.create_task(pump(child.stderr.read, process.stderr)),  # type: ignore[union-attr]
        ]
        try:
            code = await child.wait()
            await asyncio.wait(pumps[1:])
            process.exit(code)
        finally:
            for task in pumps:
                task.cancel()

    async def pump(read: Any, out: Any) -> None:
        try:
            while data := await read(1 << 16):
                out.write(data)
        except (OSError, asyncssh.Error):
            pass
        finally:
            if isinstance(out, asyncio.StreamWriter):
                out.close()

    acceptor = await asyncssh.listen(
        listen, port, server_factory=Server, process_factory=run, encoding=None,
        server_host_keys=[str(folder / "host")], authorized_client_keys=str(folder / "user.pub"), reuse_address=True,
    )  # fmt: skip
    return acceptor, there


@functools.cache
def run_beside() -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own, for as long as this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="ssh").start()
    return loop


class SshHosts:
    """Servers in a thread of this process, one a name, each at a port of the loopback."""

    def __init__(self, folder: Path, names: list[str], environment: Mapping[str, str]) -> None:
        self.folder, self._environment = folder, environment
        make_keys(folder)
        self._loop = run_beside()
        self._served: dict[str, Any] = {}
        self.ports: dict[str, int] = dict.fromkeys(names, 0)
        for name in names:
            self.open(name)

    def open(self, name: str) -> None:
        """Lets connections in, at the same port as before."""
        if name not in self._served:
            work = serve(self.folder, "127.0.0.1", self.ports[name], self._environment)
            self._served[name] = acceptor, _ = asyncio.run_coroutine_threadsafe(work, self._loop).result(20)
            self.ports[name] = acceptor.get_port()

    def shut(self, name: str) -> None:
        """Breaks its connections, and lets nobody in."""
        if name in self._served:
            acceptor, there = self._served.pop(name)

            async def shut() -> None:
                acceptor.close()
                for connection in list(there):
                    connection.abort()

            asyncio.run_coroutine_threadsafe(shut(), self._loop).result(20)

    def close(self) -> None:
        for name in list(self._served):
            self.shut(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--listen", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=2222)
    args = parser.parse_args()

    async def forever() -> None:
        await serve(args.folder, args.listen, args.port, {})
        await asyncio.Event().wait()

    asyncio.run(forever())


if __name__ == "__main__":
    main()
