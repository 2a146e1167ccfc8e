"""Whether this supervisor still has the run: another one may have claimed a higher term while this one did not run."""

from __future__ import annotations

from ....errors import RunInUse
from ....progress import RunDir, newest_term
from .clock import Clock

_EVERY_S = 1.0


class Superseded(RunInUse):
    """Another supervisor claimed a higher term, while this one did not run."""


class TermWatch:
    """Looks for a higher term than this supervisor's `number`."""

    def __init__(self, run_dir: RunDir, number: int, clock: Clock) -> None:
        self._run_dir, self.number, self._clock = run_dir, number, clock
        self._polled = 0.0

    @property
    def is_over(self) -> bool:
        """Whether another supervisor has the run by now."""
        return newest_term(self._run_dir) > self.number

    def check(self, *, at_once: bool = False) -> None:
        """Raises Superseded where another supervisor has the run by now; looks once a second, or `at_once`."""
        now = self._clock.monotonic()
        if at_once or now - self._polled > _EVERY_S:
            self._polled = now
            if self.is_over:
                raise Superseded(
                    "another supervisor took over this run while this one did not run", where=str(self._run_dir.path),
                    hint=f"Watch it with `unbroken status {self._run_dir.path}`",
                )  # fmt: skip
