"""Recovery without a person: the supervisor of a run, its agents, and the policy that they follow.

run_supervised      runs a spec to its end (what `unbroken run` does)
Supervisor          the flow of a run
decide, Decision    verdict -> action, pure
RunState            where a run stands, from its journal alone
"""

from ..progress.records.decision import Decision, PastIncident
from ..progress.records.state import RunState
from .decide.policy import decide

__all__ = ["Decision", "PastIncident", "RunState", "decide"]
