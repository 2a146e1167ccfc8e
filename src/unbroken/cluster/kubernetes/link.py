"""The program of a pod as the supervisor reaches it: started by exec in the agent's container, connected again after each break.

What is secret comes to the agent on this connection alone: it stands in no object of the API, and in no command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from ...errors import RunError
from ...version import __version__
from ..hosts.connection import Connection, HostRefused
from ..hosts.options import Host, HostsOptions
from ..hosts.program import LINE_BYTES, Message
from .api import Api, Refused
from .manifest import AGENT, PROGRAM

_STDIN, _STDOUT, _STDERR, _ERROR = 0, 1, 2, 3
_FRAME = 1 << 15


class ExecProcess:
    """A program behind a websocket, as a child process shows itself: `stdin`, `stdout`, `stderr`."""

    def __init__(self, websocket: Any) -> None:
        self._websocket = websocket
        self.ended = False
        """Whether the API has said how the program ended."""
        self.stdin, self.stdout, self.stderr = self, _Lines(), _Lines()
        self._writing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def write(self, text: str) -> None:
        """To its standard input."""
        data = text.encode()
        for at in range(0, len(data), _FRAME):
            self._writing.put_nowait(bytes([_STDIN]) + data[at : at + _FRAME])

    def write_eof(self) -> None:
        """Closes the connection: this protocol cannot close standard input alone."""
        self._writing.put_nowait(None)

    async def _write(self) -> None:
        with contextlib.suppress(
            Exception
        ):  # whatever the library raises of a broken connection: the reader says it
            while (frame := await self._writing.get()) is not None:
                await self._websocket.send_bytes(frame)
            await asyncio.sleep(0.2)
            await self._websocket.close()

    async def _read(self) -> None:
        try:
            async for message in self._websocket:
                data = message.data if isinstance(message.data, bytes) else str(message.data).encode()
                if not data:
                    continue
                if data[0] == _STDOUT:
                    self.stdout.reader.feed_data(data[1:])
                elif data[0] == _STDERR:
                    self.stderr.reader.feed_data(data[1:])
                elif data[0] == _ERROR:
                    self.ended = True
                    self.stderr.reader.feed_data(_read_error(data[1:]))
        finally:
            self.stdout.reader.feed_eof()
            self.stderr.reader.feed_eof()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(Exception):
            await self._websocket.close()


class _Lines:
    """What a process prints, as text."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader(limit=LINE_BYTES)

    async def readline(self) -> str:
        return (await self.reader.readline()).decode(errors="replace")

    async def read(self) -> str:
        return (await self.reader.read()).decode(errors="replace")


class PodLink(Connection):
    """The connection to one pod. `uid` and `name` are the pod's."""

    def __init__(
        self,
        api: Api,
        run_id: str,
        node: str,
        pod: str,
        *,
        python: str,
        image: str,
        on_up: Callable[[PodLink, Message], None],
        on_down: Callable[[PodLink], None],
        on_event: Callable[[PodLink, Message], None],
    ) -> None:
        super().__init__(
            run_id, Host(node), HostsOptions(hosts=(node,)), on_up=on_up, on_down=on_down, on_event=on_event  # type: ignore[arg-type]
        )  # fmt: skip
        self._api, self.node, self.pod, self._python, self._image = api, node, pod, python, image

    async def _open(self, stack: contextlib.AsyncExitStack) -> Any:
        argv = [self._python, "-m", PROGRAM, "serve", "--run-id", self._run_id]
        try:
            websocket = await self._api.run_in(stack, self.pod, AGENT, argv)
        except Refused as e:
            if e.status in (401, 403):
                raise HostRefused(
                    f"nothing may be started in the pod: {e.message}", where=self.pod,
                    hint="A run needs get and create of pods/exec: docs/kubernetes-rbac.yaml",
                ) from e  # fmt: skip
            raise
        process = ExecProcess(websocket)
        stack.push_async_callback(process.close)
        return process

    async def _read_report(self, process: Any) -> Message:
        try:
            report = await super()._read_report(process)
        except HostRefused as e:
            if process.ended:
                raise
            # Nobody has said how it ended: the connection broke, or the node is slow. It is tried again.
            raise RunError("our program in the pod has not answered yet", where=self.pod) from e
        if trouble := self._find_trouble(report):
            raise trouble
        return report

    def _find_trouble(self, report: Message) -> RunError | None:
        where = f"{self._image} on {self.node}"
        if report["unbroken"] != __version__:
            return HostRefused(
                f"unbroken {report['unbroken']} is in the image, and {__version__} here", where=where,
                hint="Use an image with the same version",
            )  # fmt: skip
        if report["missing"]:
            return HostRefused(
                f"{', '.join(report['missing'])} cannot be imported there", where=where,
                hint=f"Install it in the image for {report['python']}, or name another interpreter: python=PATH",
            )  # fmt: skip
        return None

    def _explain_silence(self, said: str) -> HostRefused:
        return explain_silence(self._image, self.node, said)


def explain_silence(image: str, node: str, said: str) -> HostRefused:
    """Why our program does not run in an image, of which the last word was `said`."""
    return HostRefused(
        f"the image does not run our program: {said}", where=f"{image} on {node}" if node else image,
        hint="Use an image that has unbroken, and name its Python: --cluster kubernetes,image=...,python=/path/to/python",
    )  # fmt: skip


def _read_error(data: bytes) -> bytes:
    """How the program ended, as the API says it; nothing where it ended well."""
    with contextlib.suppress(ValueError):
        status = json.loads(data)
        if status.get("status") == "Success":
            return b""
        return f"\n{status.get('message', '')}\n".encode()
    return data
