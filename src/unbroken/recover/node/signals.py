"""Which signals an agent answers: none. Those of a terminal or a scheduler are the supervisor's to answer."""

from __future__ import annotations

import signal


def _pass_over(*_: object) -> None:
    """A signal to the whole group is the supervisor's to answer."""


def pass_over_signals() -> None:
    """Lets no signal end this process that could be meant for the run."""
    # Ctrl-C in the terminal is the supervisor's; agents are in sessions of their own anyway.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for sig in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, _pass_over)  # not SIG_IGN, which a rank would inherit
