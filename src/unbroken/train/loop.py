"""The training itself: restore, then forward, backward, reduce, update, report, save, until done or asked to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from ..errors import Exit
from ..progress import RunDir, attach
from .callbacks import Callback, by_name
from .config import TrainConfig
from .corpus.batches import GlobalBatches
from .saving import Saving, open_saving
from .step_digests import StepDigestWriter, digest, step_digest_path
from .training import OpenCorpus, OpenTraining, Training, check_sizes, open_corpus, open_training
from .world import start_world, stop_world

if TYPE_CHECKING:
    from ..data.journal import Journal


def train(
    config: TrainConfig,
    *,
    open_data: OpenCorpus = open_corpus,
    open_trainer: OpenTraining = open_training,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Runs a training to its end, or to a stop on request; returns the exit code.

    `open_data` gives what is trained on, `open_trainer` makes the trainer of a rank, with parts of your own in it; `callbacks`
    are saved with it.
    """
    run = attach(total_steps=config.run.steps)
    check_sizes(config, run.world_sizes)
    with run.phase("starting"), _stop_signals() as stop_flag:
        tokens = open_data(config)
        world = start_world(config.run)
        trainer = open_trainer(config, world, run, tokens)
        saving, resumed = open_saving(config.run, run, trainer, by_name(callbacks))
        callbacks = [*callbacks, *_profile(trainer)]
        if world.rank == 0:
            _say(_banner(trainer))
            if resumed:
                _say(resumed)
        for callback in callbacks:
            callback.on_start(trainer)
        stopped = _steps(trainer, saving, stop_flag, callbacks)
        stop_world(world)
    return Exit.RANK_STOPPED_ON_REQUEST if stopped else Exit.OK


def _steps(t: Training, saving: Saving, stop_flag: list[int], callbacks: Sequence[Callback]) -> bool:
    """Trains until the last step; True if it ended before on request."""
    c, run, world = t.config.run, t.run, t.world
    writer = (
        StepDigestWriter(step_digest_path(c.trace, world.rank, world.size), world.rank, run.attempt)
        if c.trace
        else None
    )
    batches = GlobalBatches(t.order, t.samples, t.config.data.global_batch)
    journal = _journal(t)
    tokens_per_step = t.config.data.global_batch * t.config.data.seq
    asked = False
    before = time.perf_counter()
    # Until the first step is complete this is the phase "starting", with its long deadline: step() ends it.
    while t.step < c.steps and not asked:
        asked = bool(stop_flag) or run.should_stop(t.step + 1)
        position = t.position
        loss, norm, asked, batch = t.train_step(saving.wait_for_copies, asked)
        if writer:
            writer.step(t.step, loss, batch)
        run.step(t.step, loss=loss, norm=float(norm), busy=t.busy, tokens=tokens_per_step)
        if journal is not None:
            journal(batches.record(t.step, position))
        for callback in callbacks:
            callback.on_step(t, loss, norm)
        now = time.perf_counter()
        if world.rank == 0 and (t.step % c.log_every == 0 or t.step in (1, c.steps)):
            rate = tokens_per_step / (now - before)
            _say(
                f"step {t.step} loss {loss:.4f} grad {float(norm):.3f} {1e3 * (now - before):.0f} ms {rate:,.0f} tokens/s"
            )
        before = now
        if c.eval_every and t.step % c.eval_every == 0:
            with run.phase("evaluating"):
                held_out = t.evaluate()
            if world.rank == 0:
                _say(f"eval step {t.step} loss {held_out:.4f}")
            for callback in callbacks:
                callback.on_evaluation(t, held_out)
        if not asked and t.step < c.steps and saving.due():
            saving.save()  # holds nothing up: a rank that hangs in it is found by the step's deadline
    stopped = asked and t.step < c.steps
    run.phase("stopping")
    if stopped:
        _say(f"stopping after step {t.step}, as asked")
    else:
        parameters, optimizer = (digest(tensors) for tensors in t.final_tensors())
        _say(f"final step {t.step} parameters {parameters} optimizer {optimizer}")
        if writer:
            writer.final(t.step, parameters, optimizer)
    saving.last()
    if writer:
        writer.close()
    return stopped


def _journal(t: Training) -> Journal | None:
    """Where rank 0 of a run writes what each step was given."""
    if t.world.rank != 0 or t.run.run_dir is None:
        return None
    from ..data.journal import Journal

    return Journal()


def _profile(t: Training) -> list[Callback]:
    """What measures a plan's steps for the run's report; nothing outside a run, and of the reference trainer."""
    if t.run.run_dir is None or not t.config.run.profile or not t.config.wants_plan:
        return []
    from .profiling.measure import ProfileRun

    return [ProfileRun(RunDir(t.run.run_dir).profile(t.run.attempt))]


def _banner(t: Training) -> str:
    w, c = t.world, t.config
    ranks = f"{w.size} ranks over {w.backend}" if w.size > 1 else "one rank"
    return (
        f"training {t.parameter_count:,} parameters on {t.tokens.count:,} tokens of {t.tokens.source} "
        f"(sha256 {t.tokens.fingerprint[:12]}), {ranks} on {w.device.type}, from step {t.step} to {c.run.steps}"
    )


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals that ask to stop, in a list that grows; a second Ctrl-C interrupts at once."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number in seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    old = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield seen
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)


def _say(text: str) -> None:
    # A full disk under the log is no reason to end a training.
    with contextlib.suppress(OSError):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
