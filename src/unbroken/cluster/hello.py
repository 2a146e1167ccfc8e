"""What a node is, as its agent says it: the supervisor never guesses it from its own host.

`Hello` travels in the agent's first message; `as_message` and `from_message` are its form there. What came over a
link is checked by field: whatever an agent cannot mean raises Malformed, and nothing else does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from ..link.bounds import Malformed, Message, number, text, whole
from .clocks import ClockOffset

_MOST = (1 << 63) - 1
_ADDRESSES, _GPUS = 256, 64
_PATH = 4096
_SECONDS = 1e12
T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """An address of the node on one of its interfaces, at which other nodes may reach it."""

    interface: str
    address: str


@dataclass(frozen=True)
class Gpu:
    """A GPU by its UUID, which stays the same whatever else is plugged in; `memory` in bytes, 0 where not known."""

    uuid: str
    model: str = ""
    memory: int = 0


@dataclass(frozen=True)
class Hello:
    """A node. `memory` is what its processes may use and `memory_free` what of it is free, in bytes; `scratch` its own
    volatile folder, with `scratch_free` bytes left; `interpreter` the Python that runs the agent, and so the ranks.

    `boot_id` changes when the host starts anew: nothing from before is left then. `clock` relates its monotonic clock
    to the supervisor's, `wall_clock` its time of day (which logs carry) to the supervisor's.
    """

    node: str
    run_id: str
    host: str
    boot_id: str
    interpreter: str
    version: str
    cpus: int
    memory: int
    memory_free: int
    scratch: str
    scratch_free: int
    addresses: tuple[Address, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    clock: ClockOffset = field(default_factory=ClockOffset)
    wall_clock: ClockOffset = field(default_factory=ClockOffset)

    def as_message(self) -> Message:
        """Plain values for JSON, which has no infinity: an unknown offset is null."""
        value = asdict(self)
        for key, offset in (("clock", self.clock), ("wall_clock", self.wall_clock)):
            value[key] = None if math.isinf(offset.uncertainty_s) else asdict(offset)
        value["addresses"] = [[a.interface, a.address] for a in self.addresses]
        value["gpus"] = [asdict(g) for g in self.gpus]
        return value

    @classmethod
    def from_message(cls, m: Message) -> Hello:
        """The hello that was sent; keys of a newer version are passed over. Raises Malformed."""
        return cls(
            node=text(m.get("node"), "node", empty=False),
            run_id=text(m.get("run_id"), "run_id", empty=False),
            host=text(m.get("host"), "host"),
            boot_id=text(m.get("boot_id"), "boot_id", most=64),
            interpreter=text(m.get("interpreter"), "interpreter", most=_PATH),
            version=text(m.get("version"), "version", most=64),
            cpus=whole(m.get("cpus"), "cpus", 1, 1 << 20),
            memory=whole(m.get("memory"), "memory", 0, _MOST),
            memory_free=whole(m.get("memory_free"), "memory_free", 0, _MOST),
            scratch=text(m.get("scratch"), "scratch", most=_PATH),
            scratch_free=whole(m.get("scratch_free"), "scratch_free", 0, _MOST),
            addresses=_list(m.get("addresses"), "addresses", _ADDRESSES, _address),
            gpus=_list(m.get("gpus"), "gpus", _GPUS, _gpu),
            clock=_offset(m.get("clock"), "clock"),
            wall_clock=_offset(m.get("wall_clock"), "wall_clock"),
        )

    def is_same_boot(self, before: Hello) -> bool:
        """Whether what ran there at an earlier hello may still run. Where a host tells no boot, it may."""
        return not (self.boot_id and before.boot_id) or self.boot_id == before.boot_id


def _list(value: Any, what: str, most: int, read: Callable[[Any], T]) -> tuple[T, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise Malformed(f"'{what}' is no list of at most {most}")
    return tuple(read(v) for v in value)


def _address(value: Any) -> Address:
    if not isinstance(value, list) or len(value) != 2:
        raise Malformed("an address is no list of an interface and an address")
    return Address(text(value[0], "interface"), text(value[1], "address", empty=False))


def _gpu(value: Any) -> Gpu:
    if not isinstance(value, dict):
        raise Malformed("a GPU is no table")
    return Gpu(
        text(value.get("uuid"), "uuid", empty=False),
        text(value.get("model", ""), "model"),
        whole(value.get("memory", 0), "memory", 0, _MOST),
    )


def _offset(value: Any, what: str) -> ClockOffset:
    if value is None:
        return ClockOffset()
    if not isinstance(value, dict):
        raise Malformed(f"'{what}' is no table")
    return ClockOffset(
        number(value.get("offset_s"), "offset_s", -_SECONDS, _SECONDS),
        number(value.get("uncertainty_s"), "uncertainty_s", 0.0, _SECONDS),
        number(value.get("measured"), "measured", -_SECONDS, _SECONDS),
    )
