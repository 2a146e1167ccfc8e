"""Whether the nodes of a run are alike: ranks of other versions, or without a GPU, fail where nobody looks for the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ....units import plural

_SHOWN = 6


@dataclass(frozen=True)
class Odd:
    """Nodes that are not as the others. `what` says how, `hint` what to do."""

    nodes: tuple[str, ...]
    what: str
    hint: str


def find_odd(versions: Mapping[str, Mapping[str, str]], gpus: Mapping[str, int]) -> Odd | None:
    """The nodes that differ from most others, by the first thing in which they do: a package's version, the number of GPUs that
    ranks may use. A node of which something is not known is passed over for that."""
    for name in dict.fromkeys(k for said in versions.values() for k in said):
        values = {n: said[name] for n, said in versions.items() if name in said}
        if odd := _differ(values):
            usual = next(v for n, v in values.items() if n not in odd)
            what = f"{name} is {values[odd[0]]} there, and {usual} on the others"
            return Odd(odd, what, f"Install {name} {usual} on {_list(odd)}, or leave those nodes out")
    if odd := _differ(gpus):
        most = next(count for n, count in gpus.items() if n not in odd)
        what = f"ranks may use {plural(gpus[odd[0]], 'GPU')} there, and {most} on the others"
        return Odd(
            odd,
            what,
            "See nvidia-smi and CUDA_VISIBLE_DEVICES there; leave those nodes out, or give all the same GPUs",
        )
    return None


def _differ(values: Mapping[str, object]) -> tuple[str, ...]:
    """Whoever has not what most have; of a tie, whoever comes later."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return ()
    usual = counts.most_common(1)[0][0]
    return tuple(n for n, v in values.items() if v != usual)


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
