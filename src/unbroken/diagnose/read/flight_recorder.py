"""PyTorch's NCCL flight-recorder dumps: read without executing anything, and who was missing from a collective.

A dump is a pickle of plain values, one per rank. Of each rank the oldest collective that it entered and that never
finished says whom it waits for: the members of the group that have not entered it. Following these waits from rank
to rank ends at ranks that wait for nobody: they are the suspects.
Source: https://pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ...errors import InputError

MOST_BYTES = 512 << 20


@dataclass(frozen=True)
class Waiting:
    """One rank's oldest unfinished collective: group, its members, sequence number, operation."""

    rank: int
    group: str
    members: tuple[int, ...]
    seq: int
    op: str


@dataclass(frozen=True)
class Flight:
    """What the dumps of one job say. `suspects` are the ranks that others wait for and that wait for nobody;
    `waits` maps each waiting rank to what it waits in; `notes` what could not be used."""

    ranks: tuple[int, ...]
    suspects: tuple[int, ...]
    waits: tuple[Waiting, ...]
    notes: tuple[str, ...] = ()
    last: dict[tuple[str, int], int] = field(default_factory=dict)


class _NoGlobals(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the dump asks for {module}.{name}; only plain values are read")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("the dump refers to something outside itself")


def read_dump(stream: IO[bytes], name: str) -> dict[str, Any]:
    """The dump's dictionary. Raises InputError where it is none, is damaged, or asks for any global."""
    data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InputError("a flight-recorder dump above 512 MB is not read", where=name)
    try:
        value = json.loads(data) if data[:1] == b"{" else _NoGlobals(_Bytes(data)).load()
    except Exception as e:  # noqa: BLE001  unpickling damaged bytes raises anything; nothing has been executed
        raise InputError(
            f"not a flight-recorder dump: {type(e).__name__}: {str(e)[:120]}", where=name
        ) from None
    if not isinstance(value, dict) or not isinstance(value.get("entries"), list):
        raise InputError("not a flight-recorder dump: it has no entries", where=name)
    return value


class _Bytes:
    """A reader over bytes that never hands out more than there is."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, n: int = -1) -> bytes:
        end = len(self._data) if n < 0 else min(len(self._data), self._at + n)
        out, self._at = self._data[self._at : end], end
        return out

    def readline(self) -> bytes:
        end = self._data.find(b"\n", self._at) + 1 or len(self._data)
        out, self._at = self._data[self._at : end], end
        return out


def analyse(files: Sequence[Path]) -> Flight:
    """Who is missing, from the dumps of as many ranks as there are."""
    dumps: dict[int, dict[str, Any]] = {}
    notes: list[str] = []
    for file in files:
        try:
            with file.open("rb") as f:
                dump = read_dump(f, file.name)
        except (InputError, OSError) as e:
            notes.append(str(e))
            continue
        rank = _rank_of(file, dump)
        if rank is None:
            notes.append(f"{file.name}: the dump does not say its rank")
        else:
            dumps[rank] = dump
    return analyse_dumps(dumps, notes)


def analyse_dumps(dumps: dict[int, dict[str, Any]], notes: Sequence[str] = ()) -> Flight:
    """As `analyse`, on dumps that were read already, by rank."""
    last: dict[tuple[str, int], int] = {}
    waits: list[Waiting] = []
    first_open: dict[tuple[str, int], int] = {}
    for rank, dump in dumps.items():
        groups = _groups(dump)
        open_: list[tuple[int, Waiting]] = []
        for entry in dump["entries"]:
            if not isinstance(entry, dict) or entry.get("is_p2p"):
                continue
            group, seq = _group_name(entry), entry.get("collective_seq_id")
            if group is None or not isinstance(seq, int):
                continue
            last[group, rank] = max(last.get((group, rank), -1), seq)
            if entry.get("state") != "completed" and entry.get("retired") is not True:
                first_open[group, rank] = min(first_open.get((group, rank), seq), seq)
                op = str(entry.get("profiling_name", "")).removeprefix("nccl:")
                record = entry.get("record_id")
                open_.append(
                    (
                        record if isinstance(record, int) else 0,
                        Waiting(rank, group, groups.get(group.split("|")[0], ()), seq, op),
                    )
                )
        if open_:
            waits.append(min(open_, key=lambda x: x[0])[1])
    waiting = {w.rank: w for w in waits}
    blocked: dict[int, set[int]] = {}
    for w in waits:
        blocked[w.rank] = {m for m in w.members if m != w.rank and last.get((w.group, m), -1) < w.seq}
    wanted = set().union(*blocked.values()) if blocked else set()
    suspects = {r for r in wanted if r not in waiting or not blocked.get(r)}
    for w in waits:
        if any(first_open.get((w.group, m), w.seq) > w.seq for m in w.members if m != w.rank):
            suspects.add(w.rank)
    if not suspects and wanted:
        # A cycle: those that are behind in the most groups.
        suspects = {min(wanted, key=lambda r: (sum(v for (_, q), v in last.items() if q == r), r))}
    return Flight(
        tuple(sorted(dumps)),
        tuple(sorted(suspects)),
        tuple(sorted(waits, key=lambda w: w.rank)),
        tuple(notes),
        last,
    )


def _group_name(entry: dict[str, Any]) -> str | None:
    group = entry.get("process_group")
    if isinstance(group, (tuple, list)) and group:
        return f"{group[0]}|{group[1] if len(group) > 1 else ''}"
    pg = entry.get("pg_id")
    return f"{pg}|" if pg is not None else None


def _groups(dump: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    config = dump.get("pg_config")
    for name, entry in config.items() if isinstance(config, dict) else ():
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if isinstance(ranks, str):
            ranks = [int(x) for x in re.findall(r"\d+", ranks)]
        if isinstance(ranks, (list, tuple)):
            out[str(name)] = tuple(int(x) for x in ranks if isinstance(x, int))
    return out


def _rank_of(file: Path, dump: dict[str, Any]) -> int | None:
    if isinstance(dump.get("rank"), int):
        return int(dump["rank"])
    m = re.search(r"(\d+)(?:\.\w+)?$", file.name)
    return int(m.group(1)) if m else None
