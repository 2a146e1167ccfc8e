"""The report of a rehearsal in words. No torch."""

from __future__ import annotations

from ..units import Bytes, Duration, plural
from .compare import FirstDifference
from .rehearsal import RehearsalReport, mean_lost


def lines(report: RehearsalReport) -> list[str]:
    """What a user reads, the verdict first."""
    found = [_verdict(report)]
    if report.finding is not None:
        found += _finding(report.finding)
    found.append("")
    for k in report.kills:
        what = "exact" if k.finding is None else f"differs from step {k.finding.step} on: {k.finding.piece}"
        again = f"{k.lost} step{'' if k.lost == 1 else 's'} made again"
        found.append(
            f"  killed before step {k.before_step} (rank {k.rank}, epoch {k.epoch}), "
            f"went on from step {k.resumed_at}, {again}: {what}"
        )
    found.append("")
    if report.save_every is not None:
        found += [
            f"  a failure loses {mean_lost(report):.3g} steps on average here, {report.save_every} at most "
            f"(a save every {plural(report.save_every, 'step')}, by {report.saved_by})",
            f"  a save holds the training up for {Duration(round(report.stall_s, 4))}",
            f"  {'snapshots take' if report.saved_by == 'unbroken' else 'a checkpoint has'} {Bytes(report.snapshot_bytes)}"
            + (" of the node's memory" if report.saved_by == "unbroken" else ""),
        ]
    for title, texts in (("will be warned of", report.warnings), ("to know", report.notes)):
        if texts:
            found.append(f"  {title}:")
            found += [f"    - {text}" for text in texts]
    return found


def _verdict(report: RehearsalReport) -> str:
    ranks = f" on {report.ranks} ranks" if report.ranks > 1 else ""
    if report.exact:
        return f"exact: {plural(report.steps, 'step')}{ranks}, killed and resumed {plural(len(report.kills), 'time')}, every bit as undisturbed"
    f = report.finding
    if f is None:
        return "nothing was killed"
    if report.deterministic is not None:
        return f"not exact: the training is another one each time, with no failure at all, from step {f.step} on (rank {f.rank})"
    return f"not exact: after a failure step {f.step} is another one (rank {f.rank})"


def _finding(f: FirstDifference) -> list[str]:
    found = [f"  {f.piece}: {f.text}", f"  {f.hint}"]
    if f.also:
        found.append(f"  differs too: {', '.join(f.also)}")
    return found
