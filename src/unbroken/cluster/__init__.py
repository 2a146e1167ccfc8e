"""Where processes run: one contract, and the clusters that keep it.

contract        what a cluster offers a run; `registry` has those that there are
LocalCluster    virtual nodes on this machine (local_events)
Ownership       which processes are a run's own, and the proof that none is left: cgroup, parent or marks
"""

from .holding.ownership import EndedProcesses, Kind, Ownership, Process

__all__ = ["EndedProcesses", "Kind", "Ownership", "Process"]
