"""A cluster of thousands of nodes in one process: simulated time, virtual agents, faults on command.

hardware = Hardware(loop, nodes=1200)           in `run_simulated(main)`, whose argument is the loop
cluster = FakeCluster("run-1", hardware)        what a supervisor is given as its cluster
hardware.network.listen(serve)                  where its agents connect, in place of `listener.Listener`
Faults(cluster).lose("node-00007")
"""

from .agent import FakeNode, VirtualAgent
from .clock import SimulatedLoop, Stuck, run_simulated
from .cluster import FakeCluster, FakeHardware
from .faults import Faults
from .journal import MemoryJournal
from .network import Network, NetworkTraffic
from .training import Script

__all__ = [
    "FakeCluster",
    "FakeHardware",
    "FakeNode",
    "Faults",
    "MemoryJournal",
    "Network",
    "NetworkTraffic",
    "Script",
    "SimulatedLoop",
    "Stuck",
    "VirtualAgent",
    "run_simulated",
]  # fmt: skip
