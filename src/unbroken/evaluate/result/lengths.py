"""How long a task's answers were when another checkpoint gave them: what was long then is begun first now.

The tail of an evaluation of long answers is its few longest ones, and which they are is much the same from checkpoint to checkpoint.
The answers of all models under one `--out` lie side by side (landed/KEY/TASK.jsonl), so nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..contracts import Answer, PreparedTask
from ..suite.staged import read_answers, read_hashes

UNKNOWN_SHARE = 1.0
"""A sample of which nothing is known counts as so many times the mean."""
BASE = 0.2
"""What a block costs beside its texts: reading the prompts, as a share of the mean."""


def learnt_lengths(answers: Path, key: str, prepared: PreparedTask) -> tuple[float, ...] | None:
    """Characters of each sample's answer when the newest other model gave it, the mean where the prompt was another one; None
    where no other model has answered, or no texts are generated. `answers`: the folder of all models' landed answers."""
    if not prepared.output_tokens:
        return None
    found = [p for p in answers.glob(f"*/{prepared.task.name}.jsonl") if p.parent.name != key]
    for path in sorted(found, key=_written, reverse=True):
        try:
            known = _by_hash(read_answers(path))
            hashes = read_hashes(Path(prepared.folder))
        except (OSError, ValueError, LookupError):
            continue
        lengths = [known.get(h) for h in hashes]
        real = [x for x in lengths if x is not None]
        if len(real) * 2 >= len(lengths) and sum(real) > 0:
            mean = sum(real) / len(real)
            return tuple(UNKNOWN_SHARE * mean if x is None else x for x in lengths)
    return None


def block_weights(prepared: PreparedTask, lengths: Sequence[float]) -> tuple[float, ...]:
    """Relative cost of each block: its texts, and a base for each sample."""
    mean = sum(lengths) / max(1, len(lengths))
    return tuple(
        sum(lengths[i] + BASE * mean for i in prepared.samples_of(b)) for b in range(prepared.blocks)
    )


def _by_hash(answers: Sequence[Answer]) -> dict[str, float]:
    return {
        a.prompt_hash: float(sum(len(o) for o in a.outputs if isinstance(o, str)))
        for a in answers
        if not a.problem
    }


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
