"""Recovery without a person: the supervisor of a run, its agents, and the policy that they follow.

run_supervised      runs a spec to its end (what `unbroken run` does)
Supervisor          the flow of a run
decide, Decision    verdict -> action, pure
RunState            where a run stands, from its journal alone
"""

from .policy import Decision, PastIncident, decide
from .state import RunState

__all__ = ["Decision", "PastIncident", "RunState", "decide"]
