"""What `trace anonymise` does with every text column of the schema: a text of somebody else's is never let through.

A column is either a pseudonym (the same value, the same pseudonym, by a secret key), or a word of a closed list, or a
shape that can hold no name (a version number), or removed. A test plants a secret in every column of every format, and
another holds this table against the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...samples.schema import METRICS, STATES, TYPES
from ..readers.staging import STATE_WORDS
from ..synthetic.model import failures

PSEUDONYMS: Mapping[str, str] = {
    "user": "u", "team": "t", "job_id": "j", "node": "n", "incident_id": "i", "cluster": "c", "partition": "p", "device": "d", "metric": "m",
}  # fmt: skip
"""Column -> the letter before its pseudonyms."""

REMOVED = ("name", "source")

REASONS = (
    *dict.fromkeys(f.reason for f in failures()), "Hang", "LossSpike", "Unknown", "NodeFailure", "Evicted", "Preempted", "None",
)  # fmt: skip
_RAW = (
    *(w for words in STATE_WORDS.values() for w in words), "UNKNOWN", "EVICTED", "OOMKILLED", "CONTAINERCANNOTRUN", "DEADLINEEXCEEDED", "NODELOST", "NODEAFFINITY",
    "UNEXPECTEDADMISSIONERROR", "CRASHLOOPBACKOFF", "IMAGEPULLBACKOFF", "ERRIMAGEPULL", "BACKOFFLIMITEXCEEDED", "STARTERROR", "TERMINATED", "SUSPENDED",
)  # fmt: skip


@dataclass(frozen=True)
class Reduced:
    """A column of which only some values may be seen: `words` (compared in upper case), or what fits `shape`.

    `first`: the first word of the value counts ("CANCELLED by 10077" is "CANCELLED"). Else the pseudonym of the
    column where it has one, or nothing.
    """

    words: tuple[str, ...] = ()
    shape: str = ""
    first: bool = False


_GPU = (
    r"(nvidia[ _-]|tesla[ _-]|amd[ _-]|instinct[ _-])?(v100|v100m16|v100m32|a100|a800|h100|h800|h20|h200|gh200|b100|b200|b300|gb200|gb300|l4|l40|l40s|a10|a30|a40|a2|t4|p4|p40|p100|k40|k80|m40|mi100|mi210|mi250x?|mi300[ax]?|mi325x|mi355x|misc|cpu|gpu)"
    r"([ _-](sxm[2-5]?|pcie|nvl|hbm2e?|hbm3e?|\d{1,3} ?gb|g[23]))*"
)

REDUCED: Mapping[str, Reduced] = {
    "type": Reduced(TYPES),
    "state": Reduced(STATES),
    "state_raw": Reduced(_RAW, first=True),
    "reason": Reduced(REASONS),
    "outcome": Reduced(("failed", "hung", "loss_spike", "completed", "cancelled", "time_limit", "preempted", "running", "unknown")),
    "category": Reduced(("Infrastructure", "Framework", "Script")),
    "action": Reduced(("restart", "restart_elsewhere", "rollback_skip", "stop", "none")),
    "gpu_model": Reduced(shape=_GPU),
    "partition": Reduced(shape=_GPU),
    "driver": Reduced(shape=r"\d{1,4}(\.\d{1,4}){0,3}"),
    "kernel": Reduced(shape=r"\d{1,3}(\.\d{1,4}){1,3}(-\d{1,4})?"),
    "metric": Reduced(tuple(METRICS)),
    "device": Reduced(shape=r"(mlx5_|ib|eth|bond|hsn|dm-|md|psu|gpu|cpu|nvlink|link|port)\d{1,2}|nvme\d{1,2}n\d{1,2}|sd[a-z]{1,2}|lo|rx|tx|all"),
}  # fmt: skip
"""Column -> what of it may be seen."""

KEPT = (
    "kept as they are: times (unless moved), counts, sizes, exit codes and signals, and of states, reasons, types, GPU models, versions, devices and metrics "
    "those words that everybody uses; every other text is a pseudonym or removed"
)


def expression(column: str, plain: str, *, keep_clusters: bool) -> str | None:
    """SQL of what is shown of a text column `plain` of the row `t`; None where the column holds no text of ours."""
    pseudonym = f"(SELECT shown FROM pseudonym p WHERE p.kind = '{column}' AND p.plain = {plain})"
    if column == "cluster" and keep_clusters:
        return plain
    other = pseudonym if column in PSEUDONYMS else "NULL"
    if column in REDUCED:
        rule = REDUCED[column]
        if rule.shape:
            test = f"regexp_full_match(lower({plain}), '{rule.shape}')"
            return f"CASE WHEN {test} THEN {plain} ELSE {other} END"
        words = ", ".join(f"'{w.upper()}'" for w in rule.words)
        value = f"regexp_extract({plain}, '^[A-Za-z_]+')" if rule.first else plain
        return f"CASE WHEN upper({value}) IN ({words}) THEN {value} ELSE {other} END"
    if column in PSEUDONYMS:
        return pseudonym
    return "NULL" if column in REMOVED else None
