"""The parts of a supervisor, made whole and in order once it has claimed its term: each is given what it works with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from ...detect import HangDetector
from ...progress import RunDir, RunSpec
from ..telling.teller import Teller
from .accept.accepting import Accepting
from .accept.placing import CheckpointPlace
from .attempt.attempt import Attempt
from .attempt.following import Following
from .attempt.loss import LossFollower, read_losses
from .attempt.own_checkpoints import OwnCheckpoints
from .fence.fencing import Fencing
from .fence.finishing import Finishing
from .fence.stopping import Stopping
from .incident.recovering import Diagnose, Recovering
from .launch.amending import Amending
from .launch.launching import Launching
from .launch.preserving import Preserving
from .launch.replacing import Replacing
from .launch.resizing import Resizing
from .launch.room import RoomWait
from .launch.taking_over import TakingOver
from .launch.warm_starts import WarmStarts
from .nodes.desk import Inbox
from .nodes.fleet import Fleet
from .nodes.keepers import Keepers
from .record.background import Background
from .record.clock import Clock
from .record.recorder import Recorder
from .record.stop_request import StopRequest
from .record.term import TermWatch
from .screen.view import View
from .suspects.suspects import Suspects
from .watch.corruption import CorruptionJudge
from .watch.loss import LossJudge
from .watch.news import News
from .watch.slow import SlowJudge
from .watch.watching import Watching

_EARLIER = 5
"""Of so many attempts before it is read what loss was usual."""


@dataclass(frozen=True)
class Parts:
    """What the loop calls, one after another."""

    fleet: Fleet
    recorder: Recorder
    term: TermWatch
    place: CheckpointPlace
    launching: Launching
    room_wait: RoomWait
    warm_starts: WarmStarts
    taking_over: TakingOver
    watching: Watching
    recovering: Recovering
    stopping: Stopping
    finishing: Finishing
    suspects: Suspects
    resizing: Resizing


def assemble(
    run_dir: RunDir,
    spec: RunSpec,
    cwd: Path,
    fleet: Fleet,
    inbox: Inbox,
    recorder: Recorder,
    term: TermWatch,
    stop: StopRequest,
    background: Background,
    diagnose: Diagnose,
    view: View,
    clock: Clock,
    changed: asyncio.Event,
    elsewhere: str,
    amending: Amending,
    teller: Teller,
) -> Parts:
    """Makes them all; nothing happens by that."""

    def make_attempt(number: int, slots: tuple[str, ...]) -> Attempt:
        detector = HangDetector(spec.timeouts)
        attempt = Attempt.make(number, slots, spec.nproc, detector, recorder.state.step, run_dir, clock)
        earlier = [run_dir.steps(n) for n in range(number - 1, max(0, number - 1 - _EARLIER), -1)]
        attempt.loss = LossFollower(lambda step: read_losses(earlier, step))
        return attempt

    async def settle_place(attempt: Attempt, url: str) -> None:
        await launching.settle_place(attempt, url, news.is_current)
        changed.set()

    keepers = Keepers(fleet, background)
    place = CheckpointPlace(
        run_dir,
        spec.run_id,
        lambda: recorder.state,
        recorder.record,
        view.say,
        lambda: bool(stop),
        recorder.note_wait,
    )
    accepting = Accepting(spec, fleet, keepers, recorder, place, view.say, elsewhere)
    fencing = Fencing(run_dir, fleet, recorder, term, stop, view.say, clock)
    stopping = Stopping(
        spec, fleet, keepers, accepting, fencing, recorder, term, stop, view, clock, elsewhere
    )
    suspects = Suspects(fleet, fencing, recorder, stop, view.say, clock, spec.policy, spec.timeouts)
    own = OwnCheckpoints(run_dir, spec, str(cwd), recorder)
    recovering = Recovering(
        run_dir,
        spec,
        fleet,
        fencing,
        stopping,
        diagnose,
        amending,
        recorder,
        term,
        background,
        stop,
        view,
        clock,
        teller,
        suspects,
        own,
    )
    news = News(
        keepers, recorder, background, view, changed, on_step=recovering.note_steps,
        on_place=lambda attempt, url: background.start(settle_place(attempt, url)),
    )  # fmt: skip
    warm_starts = WarmStarts(spec, fleet, recorder, background, view.say, news.is_current)
    replacing = Replacing(fleet, fencing, suspects, recorder, term, stop, clock, view.say, amending, str(cwd))
    resizing = Resizing(spec, fleet, replacing, recorder, clock, view.say)
    preserving = Preserving(fleet, keepers, accepting, recorder, term, stop, clock, view.say, replacing)
    launching = Launching(
        run_dir, spec, str(cwd), fleet, keepers, place, accepting, fencing, recorder, term, stop, view, clock,
        amending, warm_starts, suspects, replacing, resizing, preserving, own, make_attempt=make_attempt, follow=news.follow,
        note_schedule=recovering.note_schedule,
    )  # fmt: skip
    taking_over = TakingOver(
        run_dir, fleet, keepers, inbox, recorder, view.say, make_attempt=make_attempt,
        follow=lambda attempt: news.follow(attempt, start_seen=False), read=news.read,
        note_takeover=recovering.note_takeover,
    )  # fmt: skip
    watching = Watching(
        run_dir, fleet, keepers, place, stopping, Following(lambda: amending.command, cwd, spec.timeouts.idle),
        LossJudge(accepting, place, recorder, view.say, spec.on_divergence),
        SlowJudge(fleet, fencing, recorder, view.say, clock, spec.policy, float(spec.timeouts.pairs)),
        CorruptionJudge(accepting, recorder, view.say, spec.policy),
        float(spec.timeouts.suspect), recorder, background,
        term, stop, view, clock, changed, amending, resizing, replacing,
    )  # fmt: skip
    finishing = Finishing(run_dir, stopping, accepting, place, recorder, view, elsewhere, teller, own)
    return Parts(
        fleet,
        recorder,
        term,
        place,
        launching,
        RoomWait(fleet, fencing, recorder, term, stop, view.say),
        warm_starts,
        taking_over,
        watching,
        recovering,
        stopping,
        finishing,
        suspects,
        resizing,
    )
