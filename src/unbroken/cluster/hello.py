"""What a node is, as its agent says it: the supervisor never guesses it from its own host.

`Hello` travels in the agent's first message; `as_message` and `from_message` are its form there. What came over a
link is checked by field: whatever an agent cannot mean raises Malformed, and nothing else does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

from ..errors import InputError
from ..journal.codec import decode, encode
from ..link.bounds import Malformed, Message, number, text, whole
from .clocks import ClockOffset

_SECONDS = 1e12


def _at_most(count: int) -> Any:
    def check(value: Any, what: str) -> Any:
        if not isinstance(value, list) or len(value) > count:
            raise Malformed(f"'{what}' is no list of at most {count}")
        return value

    return check


def _offset(value: Any, what: str) -> Any:
    if not isinstance(value, dict):
        raise Malformed(f"'{what}' is no table")
    for name, low in (("offset_s", -_SECONDS), ("uncertainty_s", 0.0), ("measured", -_SECONDS)):
        number(value.get(name), name, low, _SECONDS)
    return value


Text = Annotated[str, text]
Name = Annotated[str, partial(text, empty=False)]
Short = Annotated[str, partial(text, most=64)]
Place = Annotated[str, partial(text, most=4096)]
Size = Annotated[int, partial(whole, low=0, high=(1 << 63) - 1)]


class NodeAddress(NamedTuple):
    """An address of the node on one of its interfaces, at which other nodes may reach it."""

    interface: Text
    address: Name


@dataclass(frozen=True)
class Gpu:
    """A GPU by its UUID, which stays the same whatever else is plugged in; `memory` in bytes, 0 where not known."""

    uuid: Name
    model: Text = ""
    memory: Size = 0


@dataclass(frozen=True)
class Hello:
    """A node. `memory` is what its processes may use and `memory_free` what of it is free, in bytes; `scratch` its own
    volatile folder, with `scratch_free` bytes left; `interpreter` the Python that runs the agent, and so the ranks.

    `visible` are the GPUs that its processes may use, as CUDA_VISIBLE_DEVICES names them.
    `boot_id` changes with each start of the host: nothing from before is left then. `clock` relates its monotonic clock
    to the supervisor's, `wall_clock` its time of day (which logs carry) to the supervisor's.
    """

    node: Name
    run_id: Name
    host: Text
    boot_id: Short
    interpreter: Place
    version: Short
    cpus: Annotated[int, partial(whole, low=1, high=1 << 20)]
    memory: Size
    memory_free: Size
    scratch: Place
    scratch_free: Size
    addresses: Annotated[tuple[NodeAddress, ...], _at_most(256)] = ()
    gpus: Annotated[tuple[Gpu, ...], _at_most(64)] = ()
    visible: Annotated[tuple[Text, ...], _at_most(64)] = ()
    clock: Annotated[ClockOffset, _offset] = field(default_factory=ClockOffset)
    wall_clock: Annotated[ClockOffset, _offset] = field(default_factory=ClockOffset)

    def as_message(self) -> Message:
        """Plain values for JSON, which has no infinity: an unknown offset is null."""
        value: Message = encode(self)
        for key, offset in (("clock", self.clock), ("wall_clock", self.wall_clock)):
            if math.isinf(offset.uncertainty_s):
                value[key] = None
        return value

    @classmethod
    def from_message(cls, m: Message) -> Hello:
        """The hello that was sent; keys of a newer version are passed over. Raises Malformed."""
        unknown = [k for k in ("clock", "wall_clock") if m.get(k) is None]
        try:
            return decode(cls, {k: v for k, v in m.items() if k not in unknown}, newer=True)
        except InputError as e:
            raise Malformed(e.message) from None

    def is_same_boot(self, before: Hello) -> bool:
        """Whether what ran there at an earlier hello may still run. Where a host tells no boot, it may."""
        return not (self.boot_id and before.boot_id) or self.boot_id == before.boot_id
