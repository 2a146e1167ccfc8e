"""Which checkpoints stay: the last few, every n-th, those that somebody holds a pin on or a hold over (holds.py), and
always one that verifies.

`decide` is a pure function of what lies in the folder; `apply` carries it out and never raises: what could not be
removed is reported and tried again next time. A removal takes the commit marker first, so one that is cut short
leaves a folder that is no checkpoint.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import NoCheckpoint, StorageError, UnbrokenError, UsageError
from ...journal.checksummed import decode_checked, encode_checked
from ..format.manifest import COMMITTED
from ..storage.base import Storage
from .contents import Found, listing, verify_in
from .holds import held_by, holds

GRACE_S = 900.0
"""An unfinished folder that was written to less long ago may still be under way."""
SKEW_S = 60.0
"""By how much the clocks of two nodes may differ before a pin is misread."""
_PIN = re.compile(r"lease-([A-Za-z0-9._-]{1,100})\.json")


@dataclass(frozen=True)
class Retention:
    """What to keep.

    keep_last: the newest that are committed, at least 1. keep_every: also every checkpoint whose step is a
    multiple of this (0: none).
    """

    keep_last: int = 3
    keep_every: int = 0
    spare_below: int = 0
    """Checkpoints of attempts below this number are not this run's, and never removed."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise UsageError(f"keep_last is {self.keep_last}", hint="Keep at least the last checkpoint")
        if self.keep_every < 0:
            raise UsageError(f"keep_every is {self.keep_every}", hint="Give a number of steps, or 0 for none")


@dataclass(frozen=True)
class Pin:
    """Somebody (an evaluation, say) still reads this checkpoint; over at `until` (Unix seconds)."""

    holder: str
    until: float
    why: str = ""


@dataclass(frozen=True)
class RetentionDecision:
    """{name: reason}, for each folder: kept, or removed."""

    keep: Mapping[str, str]
    remove: Mapping[str, str]


@dataclass(frozen=True)
class RetentionResult:
    """What `apply` did. `errors` {name: what went wrong}; "" is the folder itself."""

    kept: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    freed_bytes: int = 0
    errors: Mapping[str, str] = field(default_factory=dict)


def pin_checkpoint(
    storage: Storage, name: str, holder: str, seconds: float, why: str = "", *, now: float | None = None
) -> Pin:
    """Keeps checkpoint `name` from removal for `seconds`; again by the same holder: prolongs it.

    Raises NoCheckpoint if it is not there (any more), UsageError for a holder that cannot stand in a file name.
    """
    taken = Pin(holder, (time.time() if now is None else now) + seconds, why)
    body = {"holder": holder, "until": taken.until, "why": why}
    if not storage.list(name):
        raise NoCheckpoint("there is no such checkpoint", where=f"{storage.url}/{name}")
    storage.put(f"{name}/{_pin_name(holder)}", encode_checked("unbroken.checkpoint.lease", body))
    # Looked at after the pin is there: `apply` looks for pins after the marker is gone. One of us sees the other.
    try:
        storage.size(f"{name}/{COMMITTED}")
    except FileNotFoundError:
        storage.delete(f"{name}/{_pin_name(holder)}")
        raise NoCheckpoint(
            "it is not committed, or was just removed", where=f"{storage.url}/{name}"
        ) from None
    return taken


def unpin_checkpoint(storage: Storage, name: str, holder: str) -> None:
    """Gives the pin back; no error if it is not there."""
    storage.delete(f"{name}/{_pin_name(holder)}")


def read_pins(storage: Storage, name: str, *, now: float | None = None) -> list[Pin]:
    """The pins on a checkpoint that are not over. One that cannot be read counts: better kept than lost."""
    now = time.time() if now is None else now
    found = []
    for file in storage.list(name):
        if not (m := _PIN.fullmatch(file)):
            continue
        try:
            f = decode_checked(storage.read(f"{name}/{file}"), "unbroken.checkpoint.lease", where=file)
            pin = Pin(f.text("holder"), f.number("until"), f.text("why"))
        except FileNotFoundError:
            continue
        except UnbrokenError:
            pin = Pin(m[1], float("inf"), "its pin cannot be read")
        if pin.until + SKEW_S > now:
            found.append(pin)
    return found


def decide(
    found: Iterable[Found],
    rule: Retention,
    *,
    held: Mapping[str, str] | None = None,
    good: Collection[str] = (),
    bad: Collection[str] = (),
    now: float,
) -> RetentionDecision:
    """What stays and what goes.

    `found` as from `catalogue.listing`, in any order. `held` {name: why} are never removed (pins). `good` were
    verified; `bad` are committed but do not verify. Nothing goes before a newer checkpoint is known to verify, and
    an unfinished folder only if something newer was committed and nobody wrote to it for `GRACE_S`.
    """
    ordered = sorted(found, key=lambda f: (f.attempt, f.step), reverse=True)
    keep: dict[str, str] = {}
    remove: dict[str, str] = {}
    counted, proven = 0, False
    newer_committed = False
    for f in ordered:
        sound = f.committed and f.name not in bad
        if held and f.name in held:
            keep[f.name] = held[f.name]
        elif f.attempt < rule.spare_below:
            keep[f.name] = "it was there before this run"
        elif f.status == "too_new":
            keep[f.name] = "written by a newer version"
        elif f.status == "unreadable":
            keep[f.name] = "the storage could not read it just now"
        elif f.status == "incomplete":
            if newer_committed and now - f.time > GRACE_S:
                remove[f.name] = "never committed, and something newer was"
            else:
                keep[f.name] = "not committed yet"
        elif not sound:
            if proven and counted >= rule.keep_last:
                remove[f.name] = "damaged, and older than what is kept"
            else:
                keep[f.name] = "damaged, kept until enough newer ones verify"
        elif counted < rule.keep_last:
            keep[f.name] = f"one of the last {rule.keep_last}"
        elif rule.keep_every and f.step % rule.keep_every == 0:
            keep[f.name] = f"its step is a multiple of {rule.keep_every}"
        elif not proven:
            keep[f.name] = "nothing newer is known to verify"
        else:
            remove[f.name] = f"older than the last {rule.keep_last}"
        newer_committed |= sound
        counted += sound
        proven |= sound and f.name in good
    return RetentionDecision(keep, remove)


def apply(
    storage: Storage,
    rule: Retention,
    *,
    verified: Iterable[str] = (),
    protect: Mapping[str, str] | None = None,
    dry_run: bool = False,
    now: float | None = None,
) -> RetentionResult:
    """Removes what the rule does not keep. Never raises: a training must not end because cleaning up failed.

    `verified` are checkpoints that the caller wrote and checked itself; if the newest that is kept is not among
    them, it is read and verified before anything older goes. `protect` {name: why} are never removed.
    """
    now = time.time() if now is None else now
    good, bad = set(verified), set[str]()
    try:
        found = listing(storage, quick=True)
        errors = {f.name: f.why for f in found if f.status == "unreadable"}
        held = _held(storage, found, now) | dict(protect or {})
        hoped = decide(found, rule, held=held, good={f.name for f in found}, now=now)
        if hoped.remove:
            _prove_one(storage, found, good, bad, errors)
        decision = decide(found, rule, held=held, good=good, bad=bad, now=now)
    except (UnbrokenError, OSError) as e:
        return RetentionResult(errors={"": str(e)})
    kept, removed, freed = dict(decision.keep), {}, 0
    sizes = {f.name: f.bytes for f in found}
    for name, why in sorted(decision.remove.items()):  # the oldest first: what is cut short loses the least
        try:
            if not dry_run and (pin := _remove(storage, name, now)):
                kept[name] = pin
                continue
            removed[name] = why
            freed += sizes[name]
        except (UnbrokenError, OSError) as e:
            errors[name] = str(e)
    return RetentionResult(kept, removed, freed, errors)


def _remove(storage: Storage, name: str, now: float) -> str | None:
    """Removes a checkpoint; or, if a pin was taken meanwhile, puts its marker back and says who holds it."""
    try:
        marker = storage.read(f"{name}/{COMMITTED}")
    except FileNotFoundError:
        marker = None
    storage.delete(f"{name}/{COMMITTED}")
    if marker is not None and (taken := read_pins(storage, name, now=now)):
        if not storage.create(f"{name}/{COMMITTED}", marker):
            raise StorageError("its marker could not be put back", where=f"{storage.url}/{name}")
        return _why_held(taken)
    storage.delete_folder(name)
    return None


def _held(storage: Storage, found: Sequence[Found], now: float) -> dict[str, str]:
    held = held_by(found, holds(storage, now=now))
    for f in found:
        if taken := read_pins(storage, f.name, now=now):
            held[f.name] = _why_held(taken)
    return held


def _why_held(taken: list[Pin]) -> str:
    first = max(taken, key=lambda lease: lease.until)
    return f"held by {first.holder}" + (f" ({first.why})" if first.why else "")


def _prove_one(
    storage: Storage, found: Iterable[Found], good: set[str], bad: set[str], errors: dict[str, str]
) -> None:
    """Finds the newest checkpoint that is known to verify, verifying those that are not known; fills good and bad."""
    for f in sorted(found, key=lambda f: (f.attempt, f.step), reverse=True):
        if not f.committed:
            continue
        if f.name in good:
            return
        result = verify_in(storage, f.name, deep=True)
        if result.ok:
            good.add(f.name)
            return
        bad.add(f.name)
        errors[f.name] = str(result.problems[0])


def _pin_name(holder: str) -> str:
    name = f"lease-{holder}.json"
    if not _PIN.fullmatch(name):
        raise UsageError(
            f"'{holder}' cannot hold a pin", hint="Use up to 100 letters, digits, '.', '_' or '-'"
        )
    return name
