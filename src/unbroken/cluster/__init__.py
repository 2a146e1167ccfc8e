"""Where processes run: one contract, and the backends that keep it.

Backend         allocation, launch, watcher, cordon
NodeState       what the watcher knows of a node
LocalBackend    virtual nodes on this machine
Ownership       which processes are a run's own, and the proof that none is left: cgroup, parent or marks
"""

from .base import Allocation, Backend, NodeHandle, NodeState
from .holding.ownership import Ended, Kind, Ownership
from .local import LocalBackend

__all__ = ["Allocation", "Backend", "Ended", "Kind", "LocalBackend", "NodeHandle", "NodeState", "Ownership"]
