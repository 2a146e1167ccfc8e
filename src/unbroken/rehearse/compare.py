"""Two trainings step by step: the first thing that differs, and what it means. No torch.

What *decides* are the batches, the losses and gradients, and the state of the training. Generators and variables of
the script that differ are causes where something that decides differs too, and notes where nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .trace import Batch, TracedStep


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of a training from the undisturbed one."""

    step: int
    """From 1: the first step that is not made as it was."""
    rank: int
    kind: str
    """One word for each sort: position, set_epoch, accumulation, order, content, generator, settings, scheduler, copy,
    optimizer, parameter, buffer, scaler, forward; step for one that the script reported."""
    piece: str
    """What differs, by name."""
    text: str
    """What happened, in a sentence."""
    hint: str
    """What to write."""
    also: tuple[str, ...] = ()
    """Other pieces that differ at that step."""


@dataclass(frozen=True)
class Comparison:
    """Of one process with the undisturbed training."""

    resumed_at: int
    """Steps that the training had made where the process took it up."""
    finding: FirstDifference | None
    notes: tuple[str, ...] = ()
    compared: int = 0
    """Steps that were compared."""


@dataclass
class _Difference:
    batches: bool = False
    generators: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    losses: bool = False
    variables: list[str] = field(default_factory=list)

    @property
    def decides(self) -> bool:
        return bool(self.batches or self.settings or self.state or self.gradients or self.losses)


def align(undisturbed: Sequence[TracedStep], first: TracedStep, limit: int) -> int:
    """Which step of the undisturbed training this process begins with: the one before which the weights were the same.

    Where no weights are the same: the one with the most of its state in common.
    """
    near = [s for s in undisturbed[: limit + 1] if s.optimizer == first.optimizer]
    same = [s for s in near if s.weights == first.weights]

    def common(s: TracedStep) -> tuple[int, int]:
        return sum(s.state.get(k) == v for k, v in first.state.items()), s.number

    return max(same or near, key=common).number if near else 0


def compare(
    undisturbed: Sequence[TracedStep], other: Sequence[TracedStep], rank: int, *, limit: int | None = None
) -> Comparison:
    """The steps of a process beside those of the undisturbed training, of which it had made at most `limit`."""
    if not other:
        return Comparison(0, None)
    start = align(undisturbed, other[0], limit if limit is not None else 0) if limit is not None else 0
    pairs = list(zip(undisturbed[start:], other, strict=False))
    pairs = [(a, b if i else _without_skipped(a, b)) for i, (a, b) in enumerate(pairs)]
    differences = [_differ(a, b) for a, b in pairs]
    at = next((i for i, d in enumerate(differences) if d.decides), None)
    if at is None:
        return Comparison(start, None, _notes(differences), len(pairs))
    finding = _explain(undisturbed, pairs, differences, at, start, rank)
    return Comparison(start, finding, (), len(pairs))


def _without_skipped(a: TracedStep, b: TracedStep) -> TracedStep:
    """A process's first step without the batches that it took from the loader only to come to its place.

    Whoever resumes with `islice(loader, n, None)` or `if i < n: continue` takes them all; none of them is trained on, which
    the number of losses tells.
    """
    each, rest = divmod(len(a.losses), max(len(a.batches), 1))
    used = len(b.losses) // each if each and not rest else 0
    return replace(b, batches=b.batches[-used:]) if 0 < used < len(b.batches) else b


def _differ(a: TracedStep, b: TracedStep) -> _Difference:
    def keys(x: dict[str, str], y: dict[str, str]) -> list[str]:
        return [k for k in {**x, **y} if x.get(k) != y.get(k)]

    return _Difference(
        [(x.indices, x.content) for x in a.batches] != [(x.indices, x.content) for x in b.batches],
        keys(a.generators, b.generators), keys(a.settings, b.settings), keys(a.state, b.state),
        keys(a.gradients, b.gradients), a.losses != b.losses, keys(a.variables, b.variables),
    )  # fmt: skip


def _notes(differences: list[_Difference]) -> tuple[str, ...]:
    if not differences:
        return ()
    first = differences[0]
    return tuple(
        f"{_GENERATORS.get(g, g)} was not where it had been, and nothing drew from it"
        for g in first.generators
    )


_GENERATORS = {
    "python": "Python's generator (random)",
    "numpy": "numpy's generator (numpy.random)",
    "torch": "torch's generator on the CPU",
}


def _explain(
    undisturbed: Sequence[TracedStep],
    pairs: list[tuple[TracedStep, TracedStep]],
    differences: list[_Difference],
    at: int,
    start: int,
    rank: int,
) -> FirstDifference:
    a, b = pairs[at]
    d = differences[at]
    number = start + at + 1
    pieces = [*(["order of the data"] if d.batches else []), *(f"setting {s}" for s in d.settings), *d.state]

    def found(kind: str, piece: str, text: str, hint: str) -> FirstDifference:
        return FirstDifference(
            number, rank, kind, piece, text, hint, tuple(p for p in pieces if p != piece)[:12]
        )

    # State that was not restored is seen before the first step; later it is a consequence.
    lost = [p for p in d.state if at == 0]
    if d.batches:
        return _explain_batches(undisturbed, a, b, found, at, differences)
    if a.reported or b.reported:
        piece = "loss" if d.losses else next(iter(pieces), "state")
        return found(
            "step", piece,
            f"after this step the {piece} is another one; its batch and the step before were the same" if at
            else f"after the first step that was made again the {piece} is another one, its batch was the same",
            "Something that the step uses is not in the state that is saved, or kernels are not deterministic",
        )  # fmt: skip
    if d.settings:
        s = d.settings[0]
        text = (
            f"the module's {s} is {b.settings.get(s, 'not there')}, it was {a.settings.get(s, 'not there')}"
        )
        return found("settings", s, text, "Save it with the state, or compute it from the step")
    for kind, words, hint in _STATES:
        of = [p for p in (lost or d.state) if p.startswith(kind)]
        if of and (lost or kind != "parameter" or len(of) == len(d.state)):
            return found(kind, of[0], words.format(piece=of[0], of=_values(a, b, of[0])), hint)
    moved = next((x.generators for x in differences[: at + 1] if x.generators), [])
    if moved:
        g = moved[0]
        name = _GENERATORS.get(g, f"the generator of {g}")
        return found(
            "generator", name, f"{name} is not where it was: what is drawn from it, dropout for one, is other",
            "Let Checkpointer save the generators, and restore them after the first batch of the resumed epoch is there "
            "(or use unbroken.data.wrap, whose iterator draws nothing)",
        )  # fmt: skip
    variables = [
        f"`{v}` is {b.variables.get(v)}, it was {a.variables.get(v)}" for v in d.variables if v in a.variables
    ]
    return found(
        "forward", "loss" if d.losses else "gradients",
        "the same weights, batch and generators gave another loss or other gradients"
        + (f"; variables of the script that differ: {', '.join(variables[:5])}" if variables else ""),
        "Something that the forward pass uses is not in the state: a schedule, a dropout of its own, an average"
        if variables or at == 0
        else "Kernels that are not deterministic: torch.use_deterministic_algorithms(True)",
    )  # fmt: skip


_STATES = (
    ("scheduler", "the scheduler was not restored: {piece} is {of}", 'Put it into the state: {"scheduler": scheduler}'),
    ("scaler", "the gradient scaler was not restored: {piece}", 'Put it into the state: {"scaler": scaler}'),
    ("copy", "a copy of the weights, such as an average of them (EMA), was not restored: {piece}",
     'Put it into the state: {"ema": ema}'),
    ("optimizer", "the optimizer was not restored: {piece} is {of}", 'Put it into the state: {"optimizer": optimizer}'),
    ("buffer", "a buffer of the model was not restored: {piece}", "Save model.state_dict(); a buffer with persistent=False is not in it"),
    ("parameter", "the weights are not those of any step: {piece}", 'Put the model into the state: {"model": model}'),
)  # fmt: skip


def _values(a: TracedStep, b: TracedStep, piece: str) -> str:
    was, now = a.state.get(piece, "not there"), b.state.get(piece, "not there")
    return (
        f"{now}, it was {was}" if len(was) < 40 and len(now) < 40 and not _is_digest(was) else "another one"
    )


def _is_digest(text: str) -> bool:
    return len(text) == 16 and all(c in "0123456789abcdef" for c in text)


def _explain_batches(
    undisturbed: Sequence[TracedStep],
    a: TracedStep,
    b: TracedStep,
    make: Callable[[str, str, str, str], FirstDifference],
    at: int,
    differences: list[_Difference],
) -> FirstDifference:
    asked, given = [x.content for x in a.batches], [x.content for x in b.batches]
    if given and len(given) < len(asked) and asked[-len(given) :] == given:
        n = len(asked) - len(given)
        return make(
            "accumulation", "accumulated gradients",
            f"{n} of the {len(asked)} batches of the step were before the failure: their gradients are in no checkpoint",
            "Save only after an optimizer's step: `if loader.step_ends and checkpoints.due(loader.step)`",
        )  # fmt: skip
    first = next((i for i, (x, y) in enumerate(zip(asked, given, strict=False)) if x != y), 0)
    here = b.batches[first] if first < len(b.batches) else None
    there = a.batches[first] if first < len(a.batches) else None
    if here is None or there is None:
        return make(
            "order", "order of the data", f"the step has {len(given)} batches, it had {len(asked)}",
            "Use unbroken.data.wrap, which knows the position in the data",
        )  # fmt: skip
    same_samples = here.indices and here.indices == there.indices
    if same_samples:
        moved = next((d.generators for d in differences[: at + 1] if d.generators), [])
        names = ", ".join(_GENERATORS.get(g, g) for g in moved)
        return make(
            "content", "content of the samples",
            "the samples are the right ones, their content is another"
            + (f": the dataset draws random numbers, and {names} is not where it was" if moved and at == 0
               else ": the dataset draws random numbers, or depends on the process"),
            "Use unbroken.data.wrap, which seeds Python, numpy and torch for each sample",
        )  # fmt: skip
    other = _look_up(undisturbed, here)
    if other is None:
        return make(
            "order", "order of the data", "the batch is one that the undisturbed training never had: another order",
            "Use unbroken.data.wrap, whose order is a function of the seed and the epoch",
        )  # fmt: skip
    step, batch = other
    if batch.iteration != there.iteration and batch.place == there.place and there.place > 0:
        return make(
            "set_epoch", "epoch of the order",
            f"the batch is that of step {step + 1}: the same place in epoch {batch.iteration} instead of epoch {there.iteration}",
            "Call set_epoch with the epoch that the training is in after a resume, or use unbroken.data.wrap",
        )  # fmt: skip
    where = "the beginning of the epoch" if batch.place == 0 else f"step {step + 1}"
    return make(
        "position", "position in the data",
        f"the batch is that of step {step + 1}: the training began again at {where}, its position in the data was forgotten",
        'loader = unbroken.data.wrap(loader), and put it into the state: {"loader": loader}',
    )  # fmt: skip


def _look_up(undisturbed: Sequence[TracedStep], batch: Batch) -> tuple[int, Batch] | None:
    """(the step, the batch) of the undisturbed training that had these bytes."""
    for s in undisturbed:
        for b in s.batches:
            if b.content == batch.content:
                return s.number, b
    for s in undisturbed:
        for b in s.batches:
            if batch.indices and b.indices == batch.indices:
                return s.number, b
    return None
