"""The record in an object store: numbered objects, each made only where there is none (a conditional create).

    terms/000002.json               who claimed term 2; `sealed` is the last number that it counts of each term before
    journal/000001/00000007.json    the seventh record of term 1
    journal/000001.jsonl            what counts of term 1, in one object, made by a successor: quicker to read
    run.toml                        what was asked, for a supervisor on another host

Who takes over closes the journal before it: it makes the next number itself, so that the one before, which may be only
stopped, can append no more and learns why. What it appended in that very moment counts, or was never appended. Where the claim
does not follow, the one before goes on; a successor that slept between the two sees so after its claim, and claims once more.

Everything is copied into the run directory as it is written, in the form that it has there, for whoever reads that: status,
report, diagnosis, and agents of this host.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ... import atomic
from ...checkpoint.storage.base import Storage
from ...errors import RunDirMismatch, RunInUse, StorageError
from ...journal.lines import Appender, decode, encode
from ...progress import JournalText, RunDir, Term
from ...progress.terms import term_number
from .base import Superseded

_log = logging.getLogger("unbroken.supervisor")
_AT_ONCE = 16
_CLOSED = "closed"
"""The kind of the object that ends a journal; it is no record of the run."""
_TRIES = 1000
_UNCOPIED_MAX = 10_000
CLAIM_S = 3.0
"""Who closes a journal claims the run in the next moment: so long its former owner does nothing."""


def _object(term: int, number: int) -> str:
    return f"journal/{term:06d}/{number:08d}.json"


class ObjectRecord:
    """A run's record at `storage`, copied into `run_dir`."""

    slow = True

    def __init__(self, storage: Storage, run_dir: RunDir) -> None:
        self._storage, self._run_dir = storage, run_dir
        self.where = storage.url

    def check(self) -> None:
        self._storage.check()

    def describe(self) -> str:
        return (
            f"its record lies at {self.where}: another host can take over, with this run's key files (token, identity.pem), "
            "which are never copied there"
        )

    # --- terms

    def newest(self) -> int:
        return max(self._numbers(), default=0)

    def terms(self) -> list[Term]:
        return [self._term(n) for n in self._numbers()]

    def _numbers(self) -> list[int]:
        return sorted(n for name in self._storage.list("terms") if (n := term_number(name)) is not None)

    def _term(self, number: int) -> Term:
        name = f"terms/{number:06d}.json"
        return Term.decode(self._storage.read(name), number, f"{self.where}/{name}")

    def claim(self, number: int, *, run_id: str, address: str, sealed: dict[str, int]) -> Term | None:
        term = Term.mine(number, run_id=run_id, address=address, sealed=sealed)
        if not self._storage.create(f"terms/{number:06d}.json", term.encode()):
            return None
        before = max(map(int, sealed), default=0)
        if before and self._went_on(before, sealed[str(before)]):
            # It had waited for this claim in vain. What it wrote counts: the next claim says so.
            fresh = {**sealed, str(before): self._close(before), str(number): 0}
            return self.claim(number + 1, run_id=run_id, address=address, sealed=fresh)
        self._copy(term)
        return term

    def _went_on(self, term: int, sealed: int) -> bool:
        """Whether a term's owner has appended records after the number that was to be its last."""
        for number in range(sealed + 1, self._last(term) + 1):
            record = decode(self._read_line(_object(term, number)))
            if record is None or record["kind"] != _CLOSED:
                return True
        return False

    def seal(self, terms: list[Term]) -> dict[str, int]:
        sealed = dict(terms[-1].sealed) if terms else {}
        for term in terms[-1:]:
            sealed[str(term.number)] = self._close(term.number)
        return sealed

    def _close(self, term: int) -> int:
        """Ends a term's journal; the last number that counts."""
        last = self._last(term)
        for _ in range(_TRIES):
            marker = encode({"kind": _CLOSED, "epoch": term, "by": os.urandom(8).hex()})
            if self._storage.create(_object(term, last + 1), marker):
                return last
            last += 1  # it has written that one just now, or somebody else has closed it
        raise RunInUse("its supervisor goes on writing faster than this one can take over", where=self.where)

    def _last(self, term: int) -> int:
        """The last of the numbers that follow each other from 1."""
        found = self._storage.list(f"journal/{term:06d}")
        numbers = {int(stem) for name in found if (stem := name.removesuffix(".json")).isdigit()}
        last = 0
        while last + 1 in numbers:
            last += 1
        return last

    # --- records

    def read(self) -> JournalText:
        records: list[dict[str, Any]] = []
        damaged = 0
        terms = self.terms()
        for term in terms:
            limit = terms[-1].sealed.get(str(term.number))
            for record in map(decode, self._lines(term.number, limit)):
                if record is None:
                    damaged += 1
                elif record["kind"] != _CLOSED:
                    records.append(record)
        return JournalText(records, damaged)

    def _lines(self, term: int, limit: int | None) -> list[bytes]:
        """The records of a term up to a number, to its end by default, each with its checksum."""
        if limit is not None:
            try:
                return self._storage.read(f"journal/{term:06d}.jsonl").splitlines(keepends=True)
            except FileNotFoundError:
                pass
        last = self._last(term) if limit is None else limit
        names = [_object(term, n) for n in range(1, last + 1)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self._read_line, names))

    def _read_line(self, name: str) -> bytes:
        try:
            data = self._storage.read(name)
            return data if decode(data) is not None else data.replace(b"\n", b" ") + b"\n"
        except FileNotFoundError:
            return b"missing\n"  # it counted, and is gone: damage, which is shown

    def open(self, term: Term, clock: Callable[[], float]) -> ObjectJournal:
        return ObjectJournal(self._storage, term.number, clock, self._run_dir, self.newest)

    # --- copies

    def _copy(self, mine: Term) -> None:
        """Puts what counts before this term into the run directory and, a term each, into one object. Best effort: it is
        read from its own objects otherwise."""
        try:
            self._run_dir.create()
            terms, sizes = self.terms(), dict[str, int]()
            for term in terms:
                copy = replace(term, sealed=dict(sizes))
                if term.number < mine.number:
                    limit = terms[-1].sealed.get(str(term.number))
                    data = b"".join(self._lines(term.number, limit))
                    self._storage.create(f"journal/{term.number:06d}.jsonl", data)
                    atomic.write_bytes(self._run_dir.journal(term.number), data)
                    sizes[str(term.number)] = len(data)
                atomic.write_bytes(self._run_dir.term(term.number), copy.encode())
        except (OSError, StorageError) as e:
            _log.warning("the record cannot be copied into %s: %s", self._run_dir.path, e)

    def fetch_spec(self) -> None:
        """Puts the record's run.toml into a run directory that has none, so that this host continues the same run."""
        if not self._run_dir.spec.exists() and (data := self._stored_spec()) is not None:
            self._run_dir.create()
            atomic.create_exclusive(self._run_dir.spec, data)

    def share_spec(self, run_id: str) -> None:
        if self._storage.create(self._run_dir.spec.name, self._run_dir.spec.read_bytes()):
            return
        try:
            theirs = tomllib.loads((self._stored_spec() or b"").decode()).get("run_id")
        except ValueError as e:
            raise RunDirMismatch(f"what lies there is no record of a run: {e}", where=self.where) from e
        if theirs != run_id:
            raise RunDirMismatch(
                "another run has its record there", where=f"{self.where}: run {theirs}, here run {run_id}",
                hint="Choose another --record; to continue that run give its command with a --run-dir that is empty",
            )  # fmt: skip

    def keep_spec(self) -> None:
        self._storage.put(self._run_dir.spec.name, self._run_dir.spec.read_bytes())

    def _stored_spec(self) -> bytes | None:
        try:
            return self._storage.read(self._run_dir.spec.name)
        except FileNotFoundError:
            return None


class ObjectJournal:
    """One term's journal; `append` is called by one thread at a time."""

    slow = True

    def __init__(
        self,
        storage: Storage,
        term: int,
        clock: Callable[[], float],
        run_dir: RunDir,
        newest: Callable[[], int],
    ) -> None:
        self.term = term
        self._storage, self._clock, self._newest = storage, clock, newest
        self._number = 0
        self._uncertain = set[bytes]()
        """Appends of the next number that failed, and may have arrived all the same."""
        self._closed = False
        """A successor has closed this journal and not claimed the run: nothing has been appended since."""
        self._guard = threading.Lock()
        self._copy = run_dir.journal(term)
        self._uncopied: list[dict[str, Any]] = []
        """What the run directory refused (a full disk): copied with the next one."""

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        with self._guard:
            try:
                record = self._create(kind, fields)
            except StorageError as e:
                raise OSError(errno.EIO, e.message, e.where) from e
            self._uncopied.append(record)
            self._copy_kept()
        return record

    def _copy_kept(self) -> None:
        """Copies what is not copied yet. Best effort: the objects are the record."""
        try:
            self._copy.parent.mkdir(
                exist_ok=True
            )  # not the run directory: one that was deleted must not come back
            with contextlib.closing(Appender(self._copy)) as copy:
                while self._uncopied:
                    copy.append(self._uncopied[0])
                    self._uncopied.pop(0)
        except OSError as e:
            del self._uncopied[:-_UNCOPIED_MAX]
            _log.warning("records cannot be copied to %s yet: %s", self._copy, e.strerror)

    def _create(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        while True:
            number = self._number + 1
            record = {
                "kind": kind, "t": round(self._clock(), 6), "n": number, "epoch": self.term, **fields,
            }  # fmt: skip
            line = encode(record)
            try:
                created = self._storage.create(_object(self.term, number), line)
            except StorageError:
                self._uncertain.add(line)
                raise
            if created:
                self._check_owner(line)
                self._number, self._uncertain = number, set()
                return record
            found = self._storage.read(_object(self.term, number))
            if found in self._uncertain and (arrived := decode(found)) is not None:
                self._check_owner(found)
                self._number, self._uncertain = number, set()
                if encode({**arrived, "t": 0}) == encode({**record, "t": 0}):
                    return arrived  # it was only the answer that was lost: written once, told once
            else:
                self._wait_for_successor()
                self._number, self._closed = number, True

    def _check_owner(self, line: bytes) -> None:
        """Of the first record after a closing that no claim followed: a claim that came before it does not count it, one that
        comes later sees it. Raises Superseded, StorageError."""
        if not self._closed:
            return
        self._uncertain.add(line)
        if self._newest() > self.term:
            raise self._superseded()
        self._closed = False

    def _wait_for_successor(self) -> None:
        """Somebody has closed this journal. Raises Superseded once the run is claimed; returns where that does not come:
        who closed it is gone."""
        deadline = time.monotonic() + CLAIM_S
        while True:
            if self._newest() > self.term:
                raise self._superseded()
            if time.monotonic() > deadline:
                return
            time.sleep(min(0.2, CLAIM_S))

    def _superseded(self) -> Superseded:
        return Superseded(
            "another supervisor took over this run while this one did not run", where=self._storage.url
        )

    def close(self) -> None:
        """Copies what is not copied yet."""
        with self._guard:
            if self._uncopied:
                self._copy_kept()
