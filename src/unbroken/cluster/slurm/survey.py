"""What the nodes of an allocation say of themselves before anything starts on them, and what is wrong with that."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import RunError, UnbrokenError
from ...version import __version__


@dataclass(frozen=True)
class NodeSurvey:
    """One node's answer. `missing` are libraries that unbroken needs and that are not there, `visible` the job's GPUs there as CUDA_VISIBLE_DEVICES names them (None where Slurm
    gave none), `srun` whether steps can be started from there."""

    node: str
    version: str
    gpus: int
    python: str
    boot: str = ""
    missing: str = ""
    srun: bool = False
    visible: str | None = None


def read_surveys(text: str) -> dict[str, NodeSurvey]:
    """The answers in what srun printed, among whatever set-up lines and images print beside them."""
    found = {}
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.pop("kind", None) == "survey":
            survey = NodeSurvey(**{k: v for k, v in said.items() if k in NodeSurvey.__dataclass_fields__})
            found[survey.node] = survey
    return found


def find_trouble(
    nodes: Sequence[str], surveys: Mapping[str, NodeSurvey], *, gpus: int | None, said: str, image: str
) -> UnbrokenError | None:
    """Why the run cannot start on these nodes, with what to do; None where nothing is wrong. `said` is what srun and the nodes
    printed as errors, `gpus` how many each node must have (None: as many as the others)."""
    silent = [n for n in nodes if n not in surveys]
    if silent:
        return _explain_silence(silent, said, image)
    answers = [surveys[n] for n in nodes]
    if broken := [s for s in answers if s.missing]:
        return RunError(
            f"{broken[0].missing} cannot be imported there", where=_names([s.node for s in broken]),
            hint=f"Install it for {broken[0].python}, or name another interpreter: --cluster slurm,python=PATH",
        )  # fmt: skip
    if others := [s for s in answers if s.version != __version__]:
        return RunError(
            f"unbroken {others[0].version} is installed there, and {__version__} here",
            where=_names([s.node for s in others]),
            hint=f"Install the same version for {others[0].python}",
        )
    return _find_odd_gpus(answers, gpus)


def _find_odd_gpus(answers: Sequence[NodeSurvey], wanted: int | None) -> UnbrokenError | None:
    if not answers:
        return None
    usual = wanted if wanted is not None else Counter(s.gpus for s in answers).most_common(1)[0][0]
    odd = [s for s in answers if s.gpus != usual]
    if not odd:
        return None
    what = "the run wants" if wanted is not None else "the others have"
    return RunError(
        f"nodes have {', '.join(f'{s.node} {s.gpus}' for s in odd[:8])} GPUs, {what} {usual}",
        where=_names([s.node for s in odd]),
        hint=f"Ask for the same on each (sbatch --gpus-per-node={usual}), or leave those out: sbatch --exclude="
        + ",".join(s.node for s in odd),
    )


def _explain_silence(silent: Sequence[str], said: str, image: str) -> UnbrokenError:
    where, text = _names(silent), " ".join(said.split())[-600:]
    if "No module named" in said and "unbroken" in said:
        place = f"the image {image}" if image else "the interpreter there"
        hint = (
            "Install it in the image, or mount a folder that has it and name its interpreter: "
            "--cluster slurm,image=...,mounts=/folder,python=/folder/bin/python"
            if image
            else "Install it where all nodes see it, or name the interpreter that has it: --cluster slurm,python=PATH"
        )
        return RunError(f"{place} does not have unbroken", where=where, hint=hint)
    if "container-image" in said and "unrecognized option" in said:
        return RunError(
            "srun knows no --container-image: Pyxis is not installed on this cluster", where=where,
            hint="Use --cluster slurm,image=...,runtime=apptainer, or leave the image out",
        )  # fmt: skip
    return RunError(
        f"nothing can be started there: {text or 'srun said nothing'}", where=where,
        hint="Try it by hand: srun --overlap -w NODE hostname",
    )  # fmt: skip


def _names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return ", ".join(nodes[:8]) + more
