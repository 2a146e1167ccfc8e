"""Ranks, nodes, GPUs and worlds out of the lines that name them: NCCL's start, job headers, torchrun's summary."""

from __future__ import annotations

import re

from ..read.prefixes import Line
from .events import Topology

_NCCL_INIT = re.compile(r"\brank (\d+) nranks (\d+) cudaDev (\d+)(?: nvmlDev (\d+))?(?: busId ([0-9a-f]+))?")
_NODES = re.compile(
    r"(?:nodelist|NODELIST|nodes|hosts|NodeList)[=:] ?([A-Za-z][\w.\-]*(?:\[[\d,\-]+\])?(?:,[A-Za-z][\w.\-]*(?:\[[\d,\-]+\])?)*)"
)
_PER_NODE = re.compile(
    r"(?:gpus[_-]per[_-]node|nproc[_-]per[_-]node|GPUS_PER_NODE|ntasks-per-node)[= :]+(\d{1,2})\b"
)
_WORLD = re.compile(r"\b(?:world[ _]size|WORLD_SIZE)['\"]?\s*[:=]\s*(\d+)")
_SUMMARY = re.compile(r"^\s+(time|host|rank|exitcode|pid)\s+:\s+(.*)$")
_PAIR = re.compile(r"(-?\d+)(?: \((?:local_rank|pid): (\d+)\))?")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_HOST = re.compile(
    r"(?i:\b(?:host(?:name)?|node(?:name)?|machine|running on|launch(?:ing|ed)? on|started on)\b)[:= ]+(?:is )?([A-Za-z][A-Za-z0-9.\-]*\d[A-Za-z0-9.\-]*)(?:[,;\s]|$)"
)
_BOOTSTRAP = re.compile(r"NCCL INFO Bootstrap ?: Using [\w.\-]+:([\d.]+|<ip-\d+>)<")


class TopologyReader:
    """Collects what lines say about the machine into one `Topology`, over all logs of a job."""

    def __init__(self) -> None:
        self.topology = Topology()
        self._block: dict[str, str] = {}
        self._first = False
        self.hosts: set[str] = set()

    def see(self, line: Line, text: str, rank: int | None = None) -> bool:
        """Takes in one line; true where it was one of torchrun's summary lines, which mean nothing else.

        `rank` is whose log it is, where the path says so."""
        t = self.topology
        if line.gpu is not None and line.node:
            self._nccl_prefix(line, line.rank if line.rank is not None else rank)
        if "nranks" in text:
            m = _NCCL_INIT.search(line.body)
            if m and line.node:
                rank, size, dev = int(m.group(1)), int(m.group(2)), int(m.group(4) or m.group(3))
                if size >= (t.world or 0):  # sub-communicators number their ranks again
                    t.world = size
                    place = t.place(rank)
                    place.node, place.gpu, place.pid, place.bus = line.node, dev, line.pid, m.group(5)
                    if line.node not in t.nodes:
                        t.nodes.append(line.node)
                return True
        if not t.addresses.get(line.node or "") and "Bootstrap" in text and line.node:
            m = _BOOTSTRAP.search(line.body)
            if m:
                t.addresses[m.group(1)] = line.node
        m = _SUMMARY.match(text) if text[:2] == "  " else None
        if m:
            self._summary(m.group(1), m.group(2))
            return True
        if "Root Cause (first" in text:
            self._first = True
        elif "ist" in text or "nodes" in text or "NODELIST" in text or "hosts" in text:
            m = _NODES.search(text)
            if m:
                for node in expand_hosts(m.group(1)):
                    if node not in t.nodes:
                        t.nodes.append(node)
        if t.gpus_per_node is None and ("per" in text or "PER" in text):
            m = _PER_NODE.search(text)
            t.gpus_per_node = int(m.group(1)) if m else None
        if t.world is None and ("orld" in text or "WORLD" in text):
            m = _WORLD.search(text)
            t.world = int(m.group(1)) if m else None
        m = _FAILED.search(text) if "exitcode" in text else None
        if m:
            t.reported.append((line.node, None, int(m.group(2)), int(m.group(1)), int(m.group(3))))
        return False

    def meet(self, text: str) -> None:
        """Takes in one of a log's first lines: the host that a launcher says it runs on."""
        m = _HOST.search(text)
        if m:
            self.hosts.add(m.group(1))

    def settle(self) -> None:
        """Puts all ranks without a node on the only host that the logs named, where there is but one."""
        t = self.topology
        if len(self.hosts) == 1 and not t.nodes and len({p.node for p in t.places.values() if p.node}) <= 1:
            t.only = next(iter(self.hosts))

    def _nccl_prefix(self, line: Line, rank: int | None) -> None:
        """Learns a rank's place from `host:pid:tid [gpu]`. The job's list of nodes stays as it is: these lines name
        only the hosts that had something to say, and whoever is missing in that list counts as another job's."""
        if rank is None:
            return
        place = self.topology.place(rank)
        if place.node is None:
            place.node, place.gpu, place.pid = line.node, line.gpu, line.pid

    def _summary(self, key: str, value: str) -> None:
        if key == "time":
            self._block = {}
        self._block[key] = value.strip()
        if key != "exitcode":
            return
        host, t = self._block.get("host"), self.topology
        rank = _PAIR.match(self._block.get("rank", ""))
        code = _PAIR.match(value.strip())
        if rank and code:
            number, local = int(rank.group(1)), int(rank.group(2)) if rank.group(2) else None
            pid = int(code.group(2)) if code.group(2) else None
            entry = (host, number, local, int(code.group(1)), pid)
            if self._first:
                t.reported.insert(0, entry)
            else:
                t.reported.append(entry)
            place = t.place(number)
            place.node, place.pid = place.node or host, place.pid or pid
            if place.gpu is None:
                place.gpu = local
        self._first = False


def expand_hosts(text: str) -> list[str]:
    """The hosts of a Slurm host list: `node-[001-003,7],login1` gives five names; at most 100,000."""
    hosts: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?[^,\[\]]*", text):
        m = re.match(r"([^\[]+)\[([\d,\-]+)\](.*)", part)
        if not m:
            hosts.append(part)
            continue
        for piece in m.group(2).split(","):
            low, _, high = piece.partition("-")
            if not low or (high and int(high) - int(low) > 100_000):
                continue
            hosts += [
                f"{m.group(1)}{n:0{len(low)}d}{m.group(3)}" for n in range(int(low), int(high or low) + 1)
            ]
    return hosts[:100_000]


def same_bus(raw: str | None, bus: int) -> bool:
    """Whether NCCL's `busId` (hexadecimal, bus in bits 12-19, or bits 8-15 in short form) names PCI bus `bus`."""
    if not raw:
        return False
    value = int(raw, 16)
    return bus in ((value >> 12) & 0xFF, (value >> 8) & 0xFF)
