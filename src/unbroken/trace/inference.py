"""Workload types of jobs that have none: rules as data, shown in the report, overridable."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..errors import InputError, UsageError
from ..samples.schema import JOBS, TYPES
from ..samples.tables import Note
from .settings import ReportSettings
from .store import Store, literal, name


@dataclass(frozen=True)
class InferenceRule:
    """One rule: a regular expression over a field, or a range of GPUs."""

    type: str
    field: str = ""
    match: str = ""
    gpus_from: float = 0.0
    gpus_to: float = float("inf")
    example: str = ""

    def sql(self) -> str:
        """The rule as a predicate over jobs."""
        if self.field:
            return f"regexp_matches(coalesce({name(self.field)}, ''), {literal('(?i)' + self.match)})"
        upper = f" AND gpu_num <= {self.gpus_to}" if self.gpus_to != float("inf") else ""
        return f"gpu_num >= {self.gpus_from}{upper}"

    def words(self) -> str:
        """The rule in words."""
        if self.field:
            return f"{self.type}: {self.field} matches {self.match}"
        upper = f" to {self.gpus_to:g}" if self.gpus_to != float("inf") else " or more"
        return f"{self.type}: {self.gpus_from:g}{upper} GPUs"


@functools.cache
def shipped_rules() -> tuple[InferenceRule, ...]:
    """The rules of rules/types.toml, in their order."""
    text = resources.files("unbroken.trace.rules").joinpath("types.toml").read_text("utf-8")
    return parse_rules(text, "types.toml")


def parse_rules(text: str, where: str) -> tuple[InferenceRule, ...]:
    """Rules from TOML; raises InputError for what is no rule."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise InputError(
            f"the rules are not TOML: {e}", where=where, hint="See docs/trace.md for an example"
        ) from e
    fields = {c.name for c in JOBS.columns if c.type == "VARCHAR"}
    out = []
    for r in data.get("rule", []):
        if r.get("type") not in TYPES:
            raise InputError(
                f"a rule's type is {r.get('type')!r}", where=where, hint=f"One of: {', '.join(TYPES)}"
            )
        if "field" in r and r["field"] not in fields:
            raise InputError(
                f"a rule's field is {r['field']!r}", where=where, hint=f"One of: {', '.join(sorted(fields))}"
            )
        out.append(
            InferenceRule(
                str(r["type"]),
                str(r.get("field", "")),
                str(r.get("match", "")),
                float(r.get("gpus_from", 0)),
                float(r.get("gpus_to", float("inf"))),
                str(r.get("example", "")),
            )
        )
    if not out:
        raise InputError(
            "no rule is in the file", where=where, hint="Write [[rule]] tables, see docs/trace.md"
        )
    return tuple(out)


def rules_from(path: Path) -> tuple[InferenceRule, ...]:
    """The user's rules; raises InputError."""
    try:
        return parse_rules(path.read_text("utf-8"), str(path))
    except OSError as e:
        raise InputError(f"cannot read the rules: {e}", where=str(path), hint="Check the path") from e


def build_work(store: Store, settings: ReportSettings, rules: Sequence[InferenceRule] | None = None) -> None:
    """(Re)creates the view `work`: jobs with a type for each, a size class, and GPU time; and says what was inferred.

    `kind`: the type (CPU where no GPU is held). `size`: the power of two at or above the number of GPUs (0.5 for a
    part of one, 0 for none, -1 where it is not known). `gpu_s`: GPUs times duration, seconds.
    """
    import duckdb

    rules = tuple(rules) if rules is not None else shipped_rules()
    without = int(store.one("SELECT count(*) FROM jobs WHERE type IS NULL AND coalesce(gpu_num, 1) > 0")[0])
    inferred = f"CASE {' '.join(f'WHEN {r.sql()} THEN {literal(r.type)}' for r in rules)} ELSE 'Other' END"
    if settings.retype:
        kind = inferred
    elif without:
        kind = f"CASE WHEN type IS NOT NULL THEN type ELSE {inferred} END"
    else:
        kind = "type"
    try:
        store.con.execute(
            f"""CREATE OR REPLACE VIEW work AS SELECT *,
                CASE WHEN gpu_num = 0 THEN 'CPU' ELSE {kind} END AS kind,
                CASE WHEN gpu_num IS NULL THEN -1.0 WHEN gpu_num = 0 THEN 0.0 WHEN gpu_num < 1 THEN 0.5
                     ELSE pow(2, ceil(log2(gpu_num) - 1e-9)) END AS size,
                coalesce(gpu_num * duration_s, 0.0) AS gpu_s
            FROM jobs"""
        )
        if without or settings.retype:
            store.one("SELECT count(kind) FROM work")
    except (duckdb.InvalidInputException, duckdb.BinderException) as e:
        raise UsageError(
            f"a type rule's regular expression is wrong: {str(e).splitlines()[0]}", hint="Use RE2 syntax"
        ) from e
    if without or settings.retype:
        total = int(store.one("SELECT count(*) FROM jobs")[0])
        store.note(
            Note(
                "assumption",
                "workload types inferred, because the trace has none for these jobs; the first rule that fits decides",
                total if settings.retype else without,
                total,
                "",
                tuple(r.words() for r in rules),
            )
        )
