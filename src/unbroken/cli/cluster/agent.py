"""`unbroken agent`: this host waits for supervisors, where nobody may log in over ssh."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InputError, RunError, UsageError

if TYPE_CHECKING:
    from ...link.tls import Identity

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def agent(
    identity: Annotated[
        Path,
        typer.Option(help="The certificate with its key that all hosts and the supervisor have: mode 0600."),
    ],
    make: Annotated[
        bool, typer.Option("--make", help="Make that file, and end: copy it to every host.")
    ] = False,
    listen: Annotated[str, typer.Option(help="The address to wait at. Default: all of this host's.")] = "",
    interface: Annotated[str, typer.Option(help="Wait at the address of this interface, such as ib0.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 7171,
) -> None:
    """Let this host take part in runs: wait for supervisors that have the same certificate, and start agents for them.

    Who has the file may run anything here as you, as with a key for ssh. Runs go on when this process ends; a supervisor
    connects again once it is back.
    """
    from ...link.tls import Identity

    if make:
        _make(identity)
        return
    if listen and interface:
        raise UsageError("--listen and --interface both say where to wait", hint="Give one of them")
    if not identity.exists():
        raise InputError("there is no certificate", where=str(identity),
                         hint=f"Make one once, and copy it to every host: unbroken agent --identity {identity} --make")  # fmt: skip
    ours = Identity.read(identity)
    if interface:
        from ...cluster.survey import find_address

        listen = find_address(interface)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_wait(ours, listen, port))


def _make(path: Path) -> None:
    from ...link.tls import Identity

    if path.exists():
        raise UsageError("there is one already: who has it would be shut out", where=str(path),
                         hint="Remove it first, or name another file")  # fmt: skip
    Identity.make("hosts").write(path)
    print(
        f"{path} is made. Copy it to every host and to the supervisor's, mode 0600; whoever has it may run anything there."
    )


async def _wait(identity: Identity, listen: str, port: int) -> None:
    from ...cluster.hosts.waiting import wait

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await wait(
            identity, listen or "", port, lambda at: print(f"waiting for supervisors at {at}", flush=True)
        )
    except OSError as e:
        raise RunError(f"nobody can be waited for at {listen or 'all addresses'}, port {port}: {e.strerror}",
                       hint="Another --port, or another --listen; is an agent waiting already?") from e  # fmt: skip
