"""One host as a supervisor reaches it, over ssh or where it waits: connected again after each break, its orders answered or refused."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shlex
from collections.abc import Callable
from typing import Any

from ...errors import MissingExtra, RunError, UnsafeFile
from ...link.tls import Identity
from ...waiting import wait_within
from .options import Host, HostsOptions
from .program import Message
from .waiting import PORT, NotOurs, reach

_log = logging.getLogger("unbroken.supervisor")
_CONNECT_S = 15.0
_AGAIN_S = 1.0
_AGAIN_MOST_S = 5.0
_NOISE_LINES = 200
_ORDER_S = 30.0
_SLOW_S = 300.0


class HostRefused(RunError):
    """The host lets nobody in, or cannot run our program: trying again does not help."""


def load_asyncssh() -> Any:
    """The library. Raises MissingExtra."""
    try:
        import asyncssh
    except ModuleNotFoundError:
        raise MissingExtra("asyncssh", "hosts", what="a cluster of hosts") from None
    return asyncssh


class Connection:
    """`report` is what the host said of itself last, None before. `why` says why it is not reached, "" while it is."""

    def __init__(
        self,
        run_id: str,
        host: Host,
        options: HostsOptions,
        *,
        on_up: Callable[[Connection, Message], None],
        on_down: Callable[[Connection], None],
        on_event: Callable[[Connection, Message], None],
    ) -> None:
        self.host, self._run_id, self._options = host, run_id, options
        self._on_up, self._on_down, self._on_event = on_up, on_down, on_event
        self.report: Message | None = None
        self.why = "not reached yet"
        self.hint: str | None = None
        self.refused = False
        self.slow = False
        """Its program was started, and has said nothing yet for a while."""
        self.tried = asyncio.Event()
        """Set once it was reached or not: then `why` says something."""
        self._process: Any = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def up(self) -> bool:
        """Whether the host answers."""
        return self._process is not None

    def start(self) -> None:
        """Connects, and again after each break, until `close`."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        pause = _AGAIN_S
        while True:
            try:
                await self._serve()
                pause = _AGAIN_S
            except HostRefused as e:
                self.refused = True
                self._note_down(e)
            except RunError as e:
                self._note_down(e)
            except Exception as e:  # noqa: BLE001  whatever the library raises of a connection that breaks while it begins
                _log.warning("%s: %s: %s", self.host.name, type(e).__name__, e)
                self._note_down(RunError(f"the connection to it broke: {e}", where=self.host.name))
            if self._closing:
                return  # what a library raises as its connection is closed has taken the cancellation's place
            await asyncio.sleep(pause)
            pause = min(2 * pause, _AGAIN_MOST_S)

    def _note_down(self, error: RunError) -> None:
        if self.why != error.message:
            _log.warning("%s is not reached: %s", self.host.name, error)
        self.why, self.hint = error.message, error.hint
        self.tried.set()
        self._on_down(self)

    async def _serve(self) -> None:
        """One connection from its first moment to its last. Raises RunError where there is none."""
        async with contextlib.AsyncExitStack() as stack:
            process = await self._open(stack)
            report = await self._read_report(process)
            self._process, self.report, self.why, self.hint, self.refused = process, report, "", None, False
            self.tried.set()
            self._on_up(self, report)
            try:
                while line := await process.stdout.readline():
                    self._take(json.loads(line))
            except (ValueError, OSError) as e:
                _log.warning("%s: %s", self.host.name, e)
            except Exception as e:  # noqa: BLE001  whatever the library raises of a broken connection
                _log.info("the connection to %s broke: %s", self.host.name, e)
            finally:
                self._process, broken = None, RunError("the connection to it broke", where=self.host.name)
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(broken)
            self._note_down(broken)

    async def _open(self, stack: contextlib.AsyncExitStack) -> Any:
        return await (self._reach(stack) if self._options.identity else self._log_in(stack))

    async def _reach(self, stack: contextlib.AsyncExitStack) -> Any:
        """To a host that waits."""
        o, h = self._options, self.host
        assert o.identity is not None
        where, port = h.address or h.name, h.port or o.port or PORT
        try:
            async with asyncio.timeout(_CONNECT_S):
                identity = Identity.read(o.identity)
                connecting = reach(where, port, identity, self._run_id, h.name, o.ownership, float(o.notice))
                return await stack.enter_async_context(connecting)
        except (UnsafeFile, NotOurs) as e:
            raise HostRefused(
                e.message,
                where=e.where,
                hint=e.hint or "Copy the file of identity= to every host: the same one",
            ) from e
        except TimeoutError:
            raise RunError(f"no answer within {_CONNECT_S:g} s", where=f"{where}:{port}") from None
        except OSError as e:
            raise RunError(
                f"nobody waits there: {e.strerror or e}", where=f"{where}:{port}",
                hint=f"On {h.name}: unbroken agent --identity FILE",
            ) from e  # fmt: skip

    async def _log_in(self, stack: contextlib.AsyncExitStack) -> Any:
        ssh, o, h = load_asyncssh(), self._options, self.host
        given: dict[str, Any] = {
            "keepalive_interval": max(1.0, float(o.notice) / 3),
            "keepalive_count_max": 2,
        }
        if user := h.user or o.user:
            given["username"] = user
        if port := h.port or o.port:
            given["port"] = port
        if o.key:
            given["client_keys"] = [str(o.key)]
        if o.known_hosts:
            given["known_hosts"] = str(o.known_hosts)
        where = h.address or h.name
        command = shlex.join([
            h.python or o.python, "-m", "unbroken.cluster.hosts.program", self._run_id, h.name, "--ownership", o.ownership
        ])  # fmt: skip
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await stack.enter_async_context(ssh.connect(where, **given))
                return await stack.enter_async_context(connection.create_process(command))
        except TimeoutError:
            raise RunError(f"no answer within {_CONNECT_S:g} s", where=where) from None
        except ssh.HostKeyNotVerifiable as e:
            raise HostRefused(
                f"the host key of {h.name} is not known ({e.reason})", where=where,
                hint=f"Compare it with what the host's administrator says, then let ssh learn it once: ssh {where} true",
            ) from e  # fmt: skip
        except ssh.PermissionDenied as e:
            raise HostRefused(
                f"{h.name} lets nobody in: {e.reason}", where=where,
                hint="Log in once by hand; name a user=, a key=, or start an ssh-agent that has the key",
            ) from e  # fmt: skip
        except (OSError, ssh.Error) as e:
            raise RunError(f"it cannot be reached: {getattr(e, 'strerror', None) or e}", where=where) from e

    async def _read_report(self, process: Any) -> Message:
        """What the program says first; a busy host, or a busy file system that Python comes from, has minutes to start it, and
        others are not held up meanwhile. Raises RunError."""
        reading = asyncio.create_task(self._find_report(process))
        try:
            if not (await asyncio.wait({reading}, timeout=_ORDER_S))[0]:
                self.slow = True
                self._note_down(
                    RunError(
                        f"its program has not started within {_ORDER_S:.0f} s: the host is busy, or its file system",
                        where=self.host.name,
                    )
                )
                await asyncio.wait({reading}, timeout=_SLOW_S)
            if reading.done() and (found := reading.result()) is not None:
                return found
        except RunError:
            raise
        except Exception as e:  # whatever the library raises of a broken connection
            raise RunError(f"the connection to it broke: {e}", where=self.host.name) from e
        finally:
            self.slow = False
            late = not reading.done()
            reading.cancel()
        process.stdin.write_eof()
        said = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                said = (await process.stderr.read()).strip()
        if late and not said:
            raise RunError(
                f"its program did not start within {_SLOW_S / 60:.0f} minutes", where=self.host.name
            )
        raise self._explain_silence(said.splitlines()[-1][:300] if said else "it said nothing")

    async def _find_report(self, process: Any) -> Message | None:
        """The report, behind whatever a login shell prints; None where the program ends without one."""
        for _ in range(_NOISE_LINES):
            line = await process.stdout.readline()
            if not line:
                break
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and "unbroken" in found:
                    return found
        return None

    def _explain_silence(self, said: str) -> HostRefused:
        """What it means that our program does not answer, of which the last word was `said`."""
        if self._options.identity:
            return HostRefused(
                f"{self.host.name} gives us no program: {said}", where=self.host.name,
                hint="See what `unbroken agent` says there; it needs the same file as identity= names here",
            )  # fmt: skip
        return HostRefused(
            f"{self.host.name} does not run our program: {said}", where=self.host.python or self._options.python,
            hint="Name a Python there that has unbroken: --cluster hosts,...,python=/path/to/python, or python= in its line",
        )  # fmt: skip

    def _take(self, message: Message) -> None:
        if "event" in message:
            self._on_event(self, message)
            return
        waiting = self._waiting.get(message.get("answer", 0))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def order(self, op: str, *, within_s: float = _ORDER_S, **fields: Any) -> Message:
        """Has the host do something. Raises RunError, also where it is not reached."""
        if self._process is None:
            raise RunError(f"{self.host.name} is not reached: {self.why}", where=self.host.name)
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps({"op": op, "id": number, **fields}) + "\n")
            answer: Message = await wait_within(future, within_s)
        except TimeoutError:
            raise RunError(f"no answer to '{op}' within {within_s:.0f} s", where=self.host.name) from None
        finally:
            del self._waiting[number]
        if not answer.get("ok"):
            raise RunError(
                str(answer.get("what")), where=answer.get("where") or self.host.name, hint=answer.get("hint")
            )
        return answer

    async def close(self) -> None:
        """Ends the connection; what runs on the host goes on."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
