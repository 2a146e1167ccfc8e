"""What a report is compared with: another trace's findings, or the published study's (study.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ...samples.tables import Findings


@dataclass(frozen=True)
class Reference:
    """A name for the legend, and findings with the columns of `statistics`; `fitted`: curves are fits, not the data."""

    label: str
    findings: Findings
    fitted: bool = False
