"""Scores for people: the result table, and whether two evaluations differ by more than chance."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...units import Duration
from ..contracts import Json, Metric, Report, Score
from .significance import constant_p, p_value, paired_p

MANY = 500
"""Modules without bytecode from which on they are a matter of seconds."""

ALPHA = 0.01
"""Family-wise error rate: with it, one comparison in a hundred of equal models flags anything."""


NOT_COMPARABLE = "not comparable"
OTHER = "other prompts"


@dataclass(frozen=True)
class Difference:
    """One metric of a task in two evaluations."""

    task: str
    metric: str
    before: float
    after: float
    stderr: float | None
    """Of the difference; None where one side has none."""
    p: float | None
    """Two-sided; None where no standard error is known, and where the two cannot be compared."""
    paired: bool
    """The same samples were compared one by one: much sharper than two means."""
    verdict: str = "same"
    """'same', 'better', 'worse', 'unknown' (no standard error), or 'not comparable'."""
    better_is_higher: bool = True
    why: str = ""
    """Why the two cannot be compared."""

    @property
    def gain(self) -> float:
        """Positive where `after` is better."""
        return (self.after - self.before) * (1 if self.better_is_higher else -1)


def compare(
    before: Sequence[Score],
    after: Sequence[Score],
    *,
    alpha: float = ALPHA,
    every_metric: bool = False,
    metrics: Collection[str] = (),
) -> list[Difference]:
    """The differences of all tasks that both have: of the headline metric, or of every metric with the headline first, or
    of those `metrics` ('acc' is also 'acc,none').

    Holm's correction is for the number of comparisons that can be flagged. Paired (McNemar's exact test where samples are
    0 or 1) where both keep the samples' own numbers, else two independent means, normal approximation. Where the two were
    asked different things there is no verdict but 'not comparable'.
    """
    olds = {s.task: s for s in before if s.metrics}
    both = [(olds[s.task], s) for s in after if s.metrics and s.task in olds]
    reasons = _incomparable(both)
    found = []
    for old, new in both:
        names = [m.name for m in new.metrics]
        shared = [n for n in names if n in {m.name for m in old.metrics}]
        if metrics:
            wanted = [n for n in shared if {n, n.partition(",")[0]} & set(metrics)]
        else:
            wanted = shared if every_metric else [n for n in shared if n == names[0]]
        for name in wanted:
            found.append(_difference(old, new, name, reasons.get(new.task, "")))
    tested = sorted(
        ((d.p, i) for i, d in enumerate(found) if d.p is not None),
        key=lambda t: (t[0], found[t[1]].task, t[1]),
    )
    flagged: set[int] = set()
    for rank, (p, i) in enumerate(tested):
        if p * (len(tested) - rank) > alpha:
            break  # Holm: the first that fails ends it
        flagged.add(i)
    return [
        replace(d, verdict="better" if d.gain > 0 else "worse") if i in flagged else d
        for i, d in enumerate(found)
    ]


def left_out(before: Sequence[Score], after: Sequence[Score]) -> list[str]:
    """What only one of the two has, in words: tasks, and metrics of tasks that both have."""
    lines = []
    for mine, other, side in ((before, after, "before"), (after, before, "after")):
        theirs = {s.task: {m.name for m in s.metrics} for s in other if s.metrics}
        alone = [s.task for s in mine if s.metrics and s.task not in theirs]
        alone += [
            f"{s.task} ({m.name})"
            for s in mine
            for m in s.metrics
            if s.task in theirs and m.name not in theirs[s.task]
        ]
        if alone:
            more = f" and {len(alone) - 8} more" if len(alone) > 8 else ""
            lines.append(f"only {side}: {', '.join(alone[:8])}{more}")
    return lines


def _incomparable(both: Sequence[tuple[Score, Score]]) -> dict[str, str]:
    """{task: why the two were not asked, or not judged, the same}."""
    found = {new.task: why for old, new in both if (why := _why_not(old, new))}
    asked = [new.task for _, new in both if new.prompt_hash]
    for _, new in both:
        # A group's score names neither its prompts nor its tasks; the names of these begin with its own.
        inside = [t for t in asked if t.startswith(new.task)] or asked
        if not new.prompt_hash and new.task not in found and any(OTHER in found.get(t, "") for t in inside):
            found[new.task] = f"a task in it may have {OTHER}"
    return found


def _why_not(old: Score, new: Score) -> str:
    reasons = []
    if old.samples != new.samples:  # then the prompts differ too, and that says nothing more
        reasons.append(f"{old.samples:,} against {new.samples:,} samples")
    elif old.prompt_hash and new.prompt_hash and old.prompt_hash != new.prompt_hash:
        reasons.append(OTHER)
    elif old.documents and new.documents and old.documents != new.documents:
        reasons.append("other documents behind the same prompts")
    if old.version and new.version and old.version != new.version:
        reasons.append("another task version")
    return ", ".join(reasons)


def _difference(old: Score, new: Score, name: str, why: str) -> Difference:
    a = next(m for m in old.metrics if m.name == name)
    b = next(m for m in new.metrics if m.name == name)
    plain = Difference(new.task, name, a.value, b.value, None, None, False, "same", b.higher_is_better, why)
    if why:
        return replace(plain, verdict=NOT_COMPARABLE)
    if not (math.isfinite(a.value) and math.isfinite(b.value)):
        return replace(plain, verdict="unknown")
    pairs = list(zip(old.of(name), new.of(name), strict=False))
    same_prompts = old.prompt_hash == new.prompt_hash and len(old.of(name)) == len(new.of(name))
    values = [y - x for x, y in pairs if x is not None and y is not None]
    if same_prompts and len(values) > 1:
        mean = math.fsum(values) / len(values)
        spread = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
        # Of the metric, which for a perplexity is another unit than that of the values.
        unit = abs((b.value - a.value) / mean) if mean and b.value != a.value else 1.0
        return replace(plain, stderr=math.sqrt(spread / len(values)) * unit, p=paired_p(values), paired=True)
    if a.stderr is None or b.stderr is None or not math.isfinite(a.stderr + b.stderr):
        return plain if a.value == b.value else replace(plain, verdict="unknown")
    stderr = math.hypot(a.stderr, b.stderr)
    if not stderr and a.value != b.value:  # all samples of each side are alike
        return replace(plain, stderr=stderr, p=constant_p(old.scored, new.scored))
    return replace(plain, stderr=stderr, p=p_value(b.value - a.value, stderr))


def number(m: Metric) -> str:
    """A metric with its standard error."""
    if math.isnan(m.value):
        return "-"  # no sample has a verdict
    return f"{m.value:.4f}" + (
        f" ± {m.stderr:.4f}" if m.stderr is not None and not math.isnan(m.stderr) else ""
    )


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
        if s.partial:
            lines.append(
                f"{s.task}: {len(s.partial)} answers were cut short (their time was over), and count as they are"
            )
    lines += [f"{task}: no score: {why}" for task, why in report.errors.items()]
    if report.checks:
        lines += ["", *checked(report)]
    lines += ["", summary(report), *uncompiled(report)]
    return "\n".join(lines) + "\n"


def checked(report: Report) -> list[str]:
    """What the comparison came to, as lines; empty where there was none."""
    both = [c for c in report.checks if c.samples]
    if not report.checks:
        return []
    differ = [c for c in both if c.differ and not c.drawn]
    asked = sum(c.samples for c in both)
    text = f"Asked the fast way. {asked:,} samples of {len(both)} task{'s' * (len(both) != 1)} were asked in the harness's own batches too: "
    if differ:
        some = ", ".join(f"{c.task} {len(c.differ)} of {c.samples}" for c in differ[:5])
        more = f" and {len(differ) - 5} more tasks" if len(differ) > 5 else ""
        text += f"{sum(len(c.differ) for c in differ)} answers differ ({some}{more})"
    else:
        text += "the answers are the same"
    if drawn := [c.task for c in both if c.differ and c.drawn]:
        more = f" and {len(drawn) - 5} more tasks" if len(drawn) > 5 else ""
        text += f"; texts that are drawn at random differ either way ({', '.join(drawn[:5])}{more})"
    lines = [text + "."]
    for c in both:
        if c.beyond_chance:
            lines.append(
                f"{c.task} differs more than chance: {c.metric} {c.fast:.4f} against {c.exact:.4f} in the harness's own batches "
                f"(standard error of the difference {c.stderr:.4f}). Evaluate it with --exact, in another --out"
            )
    if missing := [c for c in report.checks if not c.samples]:
        lines.append(f"Not compared: {', '.join(c.task for c in missing[:5])}: {missing[0].why}")
    return lines


def summary(report: Report) -> str:
    """One sentence on the time that it took."""
    if not report.trials:
        if (report.errors or report.scores) and not any(s.scored for s in report.scores):
            return "No answer was given, so there is no score and no time to tell; the reasons are above."
        return "Every answer was there already; no GPU was taken."
    bound = report.lower_bound_s
    text = f"{Duration(report.makespan_s)} from the first worker's start to the last score, {report.busy_fraction:.0%} of worker time busy with inference"
    if report.reused:
        text = f"{report.reused:,} answers were there before; for the others " + text
    if bound:
        text += f"; {report.makespan_s / bound:.2f} times the lower bound of {Duration(bound)}"
    if (found := against_naive(report)) is not None:
        text += (
            f"; one job per dataset would have taken {Duration(report.naive_s)}: this was {' '.join(found)}"
        )
    return text + "."


def against_naive(report: Report) -> tuple[str, str] | None:
    """How much faster, or slower, than one job per dataset, as ('1.70 x', 'faster than that'); None where that is unknown."""
    if report.naive_s <= 0 or report.makespan_s <= 0:
        return None
    ratio = report.naive_s / report.makespan_s
    figure = f"{max(ratio, 1 / ratio):.2f}"
    if figure == "1.00":
        return f"{figure} ×", "as fast"
    return f"{figure} ×", "faster" if ratio > 1 else "slower"


def side(report: Report) -> dict[str, str]:
    """What one side of a comparison is."""
    return {"suite": report.suite, "model": report.model, "checkpoint": report.checkpoint[:12]}


def finite(value: Json) -> Json:
    """The same with null for what is no number: JSON has no NaN."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def comparison(before: Report, after: Report, found: Sequence[Difference], alone: Sequence[str] = ()) -> str:
    """The comparison as plain text: what the two are, what differs, and what only one of them has."""
    lines = [
        f"{name:6}  {r.suite} of {r.model} ({r.checkpoint[:12]})"
        for name, r in (("before", before), ("after", after))
    ]
    return "\n".join([*lines, "", differences(found), *alone]).rstrip("\n") + "\n"


def differences(found: Sequence[Difference]) -> str:
    """The differences as plain text."""
    rows = [("task", "metric", "before", "after", "change", "p", "verdict")]
    task = None
    for d in found:
        p = "-" if d.p is None else f"{d.p:.2g}" + ("" if d.paired else " (unpaired)")
        rows.append(
            (
                d.task if d.task != task else "",
                d.metric,
                _value(d.before),
                _value(d.after),
                _value(d.after - d.before, "+.4f") if not d.why else "-",
                p,
                d.verdict + (f": {d.why}" if d.why else ""),
            )
        )
        task = d.task
    lines = columns(rows)
    if any(d.p is not None and not d.paired for d in found):
        lines += [
            "",
            "(unpaired): the two means were compared, not the answers one by one, so only larger changes show.",
        ]
    return "\n".join(lines) + "\n"


def _value(v: float, form: str = ".4f") -> str:
    return "-" if math.isnan(v) else format(v, form)


def uncompiled(report: Report) -> list[str]:
    """A line where workers compiled again what they imported, which container images are often built to do: seconds of each start."""
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
