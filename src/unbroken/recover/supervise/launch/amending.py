"""What a run's processes are started with: as it was asked for at first, until somebody amends it.

A live supervisor is asked over its link; it stops the attempt at a step boundary and starts the next one with the new
command. Where none lives, whoever gives the amended command supervises with it. Either way the journal gets an `amended`
record with the difference before an attempt runs with it, so that nobody has to remember what changed when. An amendment
that another one replaces before that has an `amend_replaced` record; one that a live run goes back from, a second `amended`
record, with `back` and `why`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ....errors import RunDirMismatch, RunError
from ....progress import RunDir, RunSpec, read_spec, write_spec
from ....progress.records.amendment import describe_difference
from ....progress.records.state import RunState
from ....units import plural
from ...record.base import Record
from ...wire import Message
from ..nodes.fleet import Fleet
from ..record.recorder import Recorder

RESIZED = (
    "tensors are resharded as the script restores them, and samples go on in their order where it takes them from "
    "unbroken.data; sums are grouped otherwise, so the loss agrees to rounding and not bit for bit, and what each rank keeps "
    "for itself (its random numbers) does not go on"
)
"""What is exact and what is not with another number of ranks."""


class Amending:
    """`command` is what the next attempt runs."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        cwd: str,
        fleet: Fleet,
        record: Record,
        recorder: Recorder,
        say: Callable[[str], None],
        changed: asyncio.Event,
    ) -> None:
        self._run_dir, self._spec, self._cwd, self._fleet = run_dir, spec, cwd, fleet
        self._record, self._recorder, self._say, self._changed = record, recorder, say, changed
        self.command = spec.command
        self._request = ""
        """Which amendment of a live run the command is from, for whoever asked for it; "" where it is none."""

    @property
    def _state(self) -> RunState:
        return self._recorder.state

    @property
    def is_due(self) -> bool:
        """Whether the newest attempt runs another command than the next one will."""
        return self._state.command not in ((), self.command)

    def why(self) -> str:
        """What changes, in words."""
        return f"the run is amended: {describe_difference(self._state.command, self.command)}"

    async def take(self, message: Message) -> Message:
        """Answers somebody who asks a live supervisor for other arguments. Raises RunError where a node cannot run them: the
        run goes on as it is."""
        words = message.get("command")
        if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
            raise RunError("the amended command makes no sense: it must be a list of words")
        size = (message.get("nodes"), message.get("nproc"))
        if size != (self._spec.nodes, self._spec.nproc):
            raise RunError(
                f"a run that goes on keeps its {plural(self._spec.nodes, 'node')} x {plural(self._spec.nproc, 'rank')}",
                hint="Stop it first (Ctrl-C, or kill -TERM its supervisor), then give the amended command again",
            )
        command = tuple(words)
        if command == self.command:
            return self._answer()
        answers = await self._fleet.ask_all(self._fleet.up(), "check", command=words, cwd=self._cwd)
        for name, answer in answers.items():
            if refused := answer.get("refused"):
                raise RunError(
                    f"the run goes on as it is: {refused}", where=f"node {name}, in {self._cwd}",
                    hint=answer.get("hint"),
                )  # fmt: skip
        # Whoever asked for the one before waits until a step is made with it.
        replaced = self._request if self.is_due or not self._state.stepped else ""
        was, self.command = self.command, command
        self._request = secrets.token_hex(4) if self.is_due else ""
        self._changed.set()
        answer = self._answer()
        if replaced:
            self._say(f"another --amend replaces the one before: {describe_difference(was, command)}")
            await self._recorder.record_soft(
                "amend_replaced", request=replaced, command=list(was), by=list(command)
            )
        return answer

    def _answer(self) -> Message:
        """What is said to whoever asked: no changes where the newest attempt runs the command already."""
        difference = describe_difference(self._state.command, self.command)
        return {"attempt": self._state.attempt, "request": self._request, "changes": difference}

    async def settle(self) -> None:
        """Writes down what the next attempt runs with, where that differs from the one before."""
        if self.is_due:
            live = {"live": True, "request": self._request} if self._request else {}
            await self._note(command=list(self.command), was=list(self._state.command), **live)

    def describe_way_back(self) -> str:
        """What becomes of a run whose amended command failed before any step, in words."""
        failed = "the amended command failed before its first step"
        if self.is_due:
            return f"{failed}, and the one that was asked for since comes next"
        return f"{failed}, and the run goes back to the command before"

    async def go_back(self, why: str) -> None:
        """Writes down that the next attempt runs the command that was amended last, for the new one has failed before any step;
        where another amendment is asked for meanwhile, the next attempt runs that."""
        state, proven = self._state, self._state.proven_command
        if self.is_due or not proven:
            return
        self.command, self._request = proven, ""
        await self._note(command=list(proven), was=list(state.command), back=True, why=why)

    async def settle_size(self) -> None:
        """Writes down that the run goes on with other nodes or ranks. Raises RunDirMismatch where an attempt of the old size
        is not sealed yet."""
        state, spec = self._state, self._spec
        before, now = (state.nodes, state.nproc), (spec.nodes, spec.nproc)
        if before in ((0, 0), now):
            return
        if state.attempt_open or (state.attempt and state.attempt not in state.seals):
            raise RunDirMismatch(
                f"attempt {state.attempt} with {plural(before[0], 'node')} x {plural(before[1], 'rank')} was not ended properly",
                where=str(self._run_dir.path),
                hint=f"Give the command with --nodes {before[0]} --nproc {before[1]} once more and stop it with Ctrl-C: what is "
                "in memory is saved then; after that it can go on with others",
            )
        self._say(
            f"from {plural(before[0], 'node')} x {plural(before[1], 'rank')} to {now[0]} x {now[1]}, from its newest checkpoint on disk: {RESIZED}"
        )
        command = list(self.command)
        await self._note(
            command=command, was=list(state.command), nodes=now[0], nproc=now[1], had=list(before)
        )

    async def _note(self, **fields: Any) -> None:
        if fields["command"] != fields["was"]:
            self._say(
                f"from attempt {self._state.attempt + 1} on: {describe_difference(self._state.command, self.command)}"
            )
        await self._recorder.record(
            "amended", before=self._state.attempt + 1, step=self._state.step, **fields
        )
        # The journal is the truth; run.toml follows it, and a call that finds it behind fixes it.
        with contextlib.suppress(OSError):  # such as a full disk
            write_spec(self._run_dir, replace(read_spec(self._run_dir.spec), command=self.command, nodes=self._spec.nodes, nproc=self._spec.nproc))  # fmt: skip
            await asyncio.to_thread(self._record.keep_spec)
