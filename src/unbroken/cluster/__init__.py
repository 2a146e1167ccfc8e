"""Where processes run: one contract, and the backends that keep it.

Backend         allocation, launch, watcher, cordon
NodeState       what the watcher knows of a node
LocalBackend    virtual nodes on this machine
"""

from .base import Allocation, Backend, NodeHandle, NodeState
from .local import LocalBackend

__all__ = ["Allocation", "Backend", "LocalBackend", "NodeHandle", "NodeState"]
