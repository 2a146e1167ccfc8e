"""What a run does with signals: the page says it, and nothing that a terminal or a scheduler sends ends it unsaved."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from unbroken.recover.start import STOP_SIGNALS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "signals.md"


def test_the_page_lists_the_signals_that_stop_a_run() -> None:
    (row,) = [line for line in PAGE.read_text().splitlines() if "asks the ranks to save" in line]
    assert set(re.findall(r"SIG[A-Z0-9]+", row.split("|")[1])) == {s.name for s in STOP_SIGNALS}


def test_no_signal_of_a_terminal_or_a_scheduler_is_left_out() -> None:
    sent = {"SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU"}
    assert sent <= {s.name for s in STOP_SIGNALS}
    assert signal.SIGKILL not in STOP_SIGNALS
