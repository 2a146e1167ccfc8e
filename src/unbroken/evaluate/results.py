"""Scores for people: the result table, and whether two evaluations differ by more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..units import Duration
from .contracts import Metric, Report, Score

MANY = 500
"""Modules without bytecode from which on they are a matter of seconds."""

ALPHA = 0.01
"""Family-wise error rate: with it, one comparison in a hundred of equal models flags anything."""


@dataclass(frozen=True)
class Difference:
    """One task's headline metric in two evaluations."""

    task: str
    metric: str
    before: float
    after: float
    stderr: float | None
    """Of the difference; None where neither side has one."""
    p: float | None
    """Two-sided; None where no standard error is known."""
    paired: bool
    """The same samples were compared one by one: much sharper than two means."""
    verdict: str = "same"
    """'same', 'better', 'worse', or 'unknown' (no standard error)."""
    better_is_higher: bool = True

    @property
    def gain(self) -> float:
        """Positive where `after` is better."""
        return (self.after - self.before) * (1 if self.better_is_higher else -1)


def compare(before: Sequence[Score], after: Sequence[Score], *, alpha: float = ALPHA) -> list[Difference]:
    """The differences of all tasks that both have; verdicts with Holm's correction for the number of tasks.

    Paired (McNemar's test is the special case of 0 and 1) where both keep the samples' own scores and were asked the
    same prompts, else two independent means. Normal approximation.
    """
    olds = {s.task: s for s in before}
    found = [
        _difference(olds[s.task], s) for s in after if s.task in olds and s.metrics and olds[s.task].metrics
    ]
    tested = sorted((d for d in found if d.p is not None), key=lambda d: (d.p, d.task))
    verdicts: dict[str, str] = {}
    for i, d in enumerate(tested):
        assert d.p is not None  # filtered above
        if d.p * (len(tested) - i) > alpha:
            break  # Holm: the first that fails ends it
        verdicts[d.task] = "better" if d.gain > 0 else "worse"
    out = []
    for d in found:
        verdict = "unknown" if d.p is None and d.before != d.after else verdicts.get(d.task, "same")
        out.append(
            Difference(
                d.task, d.metric, d.before, d.after, d.stderr, d.p, d.paired, verdict, d.better_is_higher
            )
        )
    return out


def _difference(old: Score, new: Score) -> Difference:
    name = new.metrics[0].name
    a = next((m for m in old.metrics if m.name == name), old.metrics[0])
    b = new.metrics[0]
    pairs = list(zip(old.per_sample, new.per_sample, strict=False))
    same_prompts = old.prompt_hash == new.prompt_hash and len(old.per_sample) == len(new.per_sample)
    values = [y - x for x, y in pairs if x is not None and y is not None]
    if same_prompts and len(values) > 1:
        mean = math.fsum(values) / len(values)
        spread = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
        stderr = math.sqrt(spread / len(values))
        return Difference(
            new.task,
            b.name,
            a.value,
            b.value,
            stderr,
            p_value(mean, stderr),
            True,
            better_is_higher=b.higher_is_better,
        )
    both = [m.stderr for m in (a, b) if m.stderr is not None]
    if len(both) < 2:
        return Difference(
            new.task, b.name, a.value, b.value, None, None, False, better_is_higher=b.higher_is_better
        )
    stderr = math.hypot(*both)
    return Difference(
        new.task,
        b.name,
        a.value,
        b.value,
        stderr,
        p_value(b.value - a.value, stderr),
        False,
        better_is_higher=b.higher_is_better,
    )


def p_value(difference: float, stderr: float) -> float:
    """Two-sided p of a difference with this standard error, normal approximation."""
    if stderr == 0:
        return 1.0 if difference == 0 else 0.0
    return math.erfc(abs(difference / stderr) / math.sqrt(2))


def number(m: Metric) -> str:
    """A metric with its standard error."""
    return f"{m.value:.4f}" + (f" ± {m.stderr:.4f}" if m.stderr is not None else "")


def table(report: Report) -> str:
    """The result table as plain text."""
    rows = [("task", "metric", "value", "scored")]
    for s in (*report.scores, *report.groups):
        for i, m in enumerate(s.metrics or (Metric("-", float("nan")),)):
            rows.append(
                (s.task if i == 0 else "", m.name, number(m), f"{s.scored}/{s.samples}" if i == 0 else "")
            )
    lines = [f"{report.suite} of {report.model} ({report.checkpoint[:12]})", "", *columns(rows)]
    for s in report.scores:
        if s.notes:
            kinds = {
                k: sum(1 for n in s.notes if n.status == k) for k in ("unanswered", "unscored", "crashed")
            }
            what = ", ".join(f"{n} {k}" for k, n in kinds.items() if n)
            lines.append(f"{s.task}: {what}; sample {s.notes[0].sample}: {s.notes[0].why}")
    lines += [f"{task}: no score: {why}" for task, why in report.errors.items()]
    lines += ["", summary(report), *uncompiled(report)]
    return "\n".join(lines) + "\n"


def summary(report: Report) -> str:
    """One sentence on the time that it took."""
    if not report.trials:
        return "Every answer was there already; no GPU was taken."
    bound = report.lower_bound_s
    text = f"{Duration(report.makespan_s)} from the first worker's start to the last score, {report.busy_fraction:.0%} of worker time busy with inference"
    if report.reused:
        text = f"{report.reused:,} answers were there before; for the others " + text
    if bound:
        text += f"; {report.makespan_s / bound:.2f} times the lower bound of {Duration(bound)}"
    if report.naive_s:
        text += f"; one trial per dataset would have taken {Duration(report.naive_s)} ({report.naive_s / report.makespan_s:.1f}x)"
    return text + "."


def differences(found: Sequence[Difference]) -> str:
    """The comparison as plain text."""
    rows = [("task", "metric", "before", "after", "change", "p", "verdict")]
    for d in found:
        p = "-" if d.p is None else f"{d.p:.2g}" + ("" if d.paired else " (unpaired)")
        rows.append(
            (
                d.task,
                d.metric,
                f"{d.before:.4f}",
                f"{d.after:.4f}",
                f"{d.after - d.before:+.4f}",
                p,
                d.verdict,
            )
        )
    return "\n".join(columns(rows)) + "\n"


def uncompiled(report: Report) -> list[str]:
    """A line where workers compiled what they imported anew, which container images are often built to do: seconds of each start."""
    slow = {w.node: w for w in report.workers if w.uncompiled >= MANY}
    if not slow:
        return []
    w = next(iter(slow.values()))
    return [
        f"Starts on {', '.join(sorted(slow))} are slower than need be: {w.uncompiled:,} modules that {w.name} imported have no compiled "
        "bytecode. Once there: python -m compileall -q -j 0 FOLDER, with the site-packages of that Python"
    ]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines, the first row underlined."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]
