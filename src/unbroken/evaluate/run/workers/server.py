"""The coordinator's port: who shows the token is welcomed, and what makes no sense costs the sender its link only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

from ....errors import EvaluationError, UnbrokenError
from ....link.address import check_socket, own_address
from ....link.bounds import HELLO_BYTES, HELLO_S, Malformed
from ....link.listener import Listener
from ....link.tls import Identity
from ....private import private_folder, write_secret
from ....waiting import wait_within
from ...engines.live import WorkerLink
from ...engines.wire import Receiver
from ...suite import received
from ..state import EvaluationRun
from .feeding import Feeder


@contextlib.asynccontextmanager
async def listening(run: EvaluationRun, feeder: Feeder) -> AsyncIterator[None]:
    """Workers can join as long as this is open; cluster.json tells them where and with what to show. Raises OSError,
    RunError where workers of other machines need a certificate and none can be made."""
    token = secrets.token_hex(16)
    wide = run.launchers.engine.remote or not run.settings.slots
    identity = Identity.make("evaluation") if wide else None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve(run, feeder, token, listener, reader, writer)

    folder = run.job.folder
    if identity is None:
        listener = Listener(serve, _socket_of(folder.cluster))
    else:
        name = run.settings.advertise or own_address()
        listener = Listener(serve, "0.0.0.0", identity=identity, name=name)
    where = {
        "schema": 2, "address": str(listener.address), "token": token, "shared": str(folder.shared.resolve()),
        "identity": identity.pem if identity else "",
    }  # fmt: skip
    try:
        write_secret(folder.cluster, json.dumps(where).encode())
        yield
    finally:
        folder.cluster.unlink(missing_ok=True)
        listener.close()
        if identity is None:
            with contextlib.suppress(OSError):
                Path(listener.address.host).parent.rmdir()
        for link in list(feeder.links.values()):
            link.writer.close()


async def _serve(
    run: EvaluationRun, feeder: Feeder, token: str, listener: Listener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:  # fmt: skip
    """One connection, from its first byte to its end."""
    link: WorkerLink | None = None
    why, blame = "the connection ended", True
    try:
        receiver = Receiver(reader, HELLO_BYTES)
        hello = await wait_within(receiver.receive(), HELLO_S)
        if hello is None or not received.admits(hello, token):
            return
        listener.known(writer)
        receiver.admit()
        link = feeder.welcome(hello, writer)
        while link is not None and (message := await receiver.receive()) is not None:
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


def _socket_of(cluster: Path) -> Path:
    """The Unix socket for an evaluation on this machine alone: the same for each of its coordinators, so that one that was
    killed leaves nothing that the next does not replace."""
    shm = Path("/dev/shm")
    root = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    name = sha256(f"{os.geteuid()}|{cluster.resolve()}".encode()).hexdigest()[:16]
    path = private_folder(root / f"unbroken-eval-{name}") / "coordinator.sock"
    check_socket(path, "TMPDIR", "the coordinator's socket")
    return path
