"""The coordinator's port: who shows the token is welcomed, and what makes no sense costs the sender its link only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator

from ....errors import EvaluationError, UnbrokenError
from ....link.bounds import HELLO_BYTES, HELLO_S, Malformed
from ....link.listener import Listener
from ....private import write_secret
from ...engines.live import Link
from ...engines.wire import receive
from ...suite import received
from ..state import Run
from .feeding import Feeder


@contextlib.asynccontextmanager
async def listening(run: Run, feeder: Feeder) -> AsyncIterator[None]:
    """Workers can join as long as this is open; cluster.json tells them where and with which token. Raises OSError."""
    token = secrets.token_hex(16)
    wide = run.launchers.engine.remote or not run.settings.slots

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve(run, feeder, token, listener, reader, writer)

    listener = Listener(serve, "0.0.0.0" if wide else "127.0.0.1")
    host = (run.settings.advertise or _address()) if wide else "127.0.0.1"
    folder = run.job.folder
    where = {
        "host": host,
        "port": listener.address[1],
        "token": token,
        "shared": str(folder.shared.resolve()),
    }
    write_secret(folder.cluster, json.dumps(where).encode())
    try:
        yield
    finally:
        folder.cluster.unlink(missing_ok=True)
        listener.close()
        for link in list(feeder.links.values()):
            link.writer.close()


async def _serve(
    run: Run, feeder: Feeder, token: str, listener: Listener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:  # fmt: skip
    """One connection, from its first byte to its end."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link: Link | None = None
    why, blame = "the connection ended", True
    try:
        hello = await asyncio.wait_for(receive(reader, HELLO_BYTES), HELLO_S)
        if hello is None or not received.admits(hello, token):
            return
        listener.known(writer)
        link = feeder.welcome(hello, writer)
        while link is not None and (message := await receive(reader)) is not None:
            link.heard = time.monotonic()
            feeder.receive(link, message)
            await writer.drain()
            if message["op"] == "bye":
                why = link.leaving
    except (OSError, TimeoutError):
        pass  # as a closed connection: `gone` says what follows
    except Malformed as e:  # the worker's, and no one else's: what it held goes to others
        why, blame = f"it sent a message that makes no sense: {e}", isinstance(e, received.BadAnswers)
    except Exception as e:  # noqa: BLE001  the server would swallow it: it is ours, and ends the run
        ours = EvaluationError(f"the coordinator failed: {type(e).__name__}: {e}")
        run.control.abort(e if isinstance(e, UnbrokenError) else ours)
    finally:
        if link is not None:
            feeder.gone(link, why, blame=blame)
        writer.close()
        run.control.wake()


def _address() -> str:
    """This machine's address, as others reach it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))  # no packet is sent: only the route is looked up
        return str(s.getsockname()[0])
    return socket.gethostname()
