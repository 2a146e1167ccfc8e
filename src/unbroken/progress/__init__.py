"""What a trainer says and an agent reads, and the run directory with its terms and journal.

RunDir                  every path of a run
RunSpec                 what was asked (run.toml)
Epoch, claim            who supervises
JournalWriter, read_journal
attach, Run             the trainer's side of the progress page
holding_up              what a checkpoint says while the training waits for it
places, newest_place    where its checkpoints lie
PageReader, Progress    the agent's side
"""

from .attach import Run, attach, holding_up
from .journal import JournalText, JournalWriter, read_journal
from .page import PageReader, Phase, Progress, StepRecord
from .places import newest_place, places
from .rundir import RunDir
from .spec import (
    Budgets,
    ClusterChoice,
    Policy,
    RunSpec,
    Timeouts,
    check_same,
    read_policy,
    read_spec,
    write_spec,
)
from .terms import Term, claim, newest_term, read_terms

__all__ = [
    "Budgets",
    "ClusterChoice",
    "JournalText",
    "JournalWriter",
    "PageReader",
    "Phase",
    "Policy",
    "Progress",
    "Run",
    "RunDir",
    "RunSpec",
    "StepRecord",
    "Term",
    "Timeouts",
    "attach",
    "check_same",
    "claim",
    "holding_up",
    "newest_place",
    "newest_term",
    "places",
    "read_journal",
    "read_policy",
    "read_spec",
    "read_terms",
    "write_spec",
]
