"""What a record promises, in each of its places: a shared folder, an object store, the supervisor's own disk."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.checkpoint.storage.s3 import S3Storage
from unbroken.errors import RunDirMismatch, RunInUse, StorageError, UsageError
from unbroken.journal.lines import encode
from unbroken.link.tls import Identity
from unbroken.private import write_secret
from unbroken.progress import RunDir, RunSpec, Term, read_journal, read_terms, write_spec
from unbroken.recover import start
from unbroken.recover.record import objects
from unbroken.recover.record.base import Record, RunJournal, Superseded
from unbroken.recover.record.choice import open_record
from unbroken.recover.record.folder import FolderRecord, is_shared
from unbroken.recover.record.objects import ObjectRecord

from ...fuzzing import fuzz


def memory_store() -> Any:
    return pytest.importorskip("obstore").store.MemoryStore()


@dataclass
class Place:
    """One place for a record; `host` gives the record as another host, or another process, has it."""

    kind: str
    folder: Path
    store: Any = None

    def host(self, name: str = "a") -> Record:
        if self.kind == "objects":
            run_dir = RunDir(self.folder / name)
            run_dir.create()
            return ObjectRecord(S3Storage(self.store, "memory://run"), run_dir)
        run_dir = RunDir(self.folder / "run")
        run_dir.create()
        return FolderRecord(run_dir, shared=self.kind == "shared")


@pytest.fixture(params=["shared", "objects", "own-disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path, memory_store() if request.param == "objects" else None)


def begin(record: Record, clock: Callable[[], float] = lambda: 5.0) -> tuple[Term, RunJournal]:
    """The next supervisor."""
    terms = record.terms()
    term = record.claim(len(terms) + 1, run_id="r", address="unix:/x", sealed=record.seal(terms))
    assert term is not None
    return term, record.open(term, clock)


def kinds(record: Record) -> list[str]:
    return [r["kind"] for r in record.read().records]


def test_an_empty_record_says_so(place: Place) -> None:
    record = place.host()
    record.check()
    assert (record.newest(), record.terms(), record.read().records) == (0, [], [])
    assert record.where and record.describe()


def test_what_is_appended_is_read_in_order_over_all_terms(place: Place) -> None:
    for n in range(1, 4):
        record = place.host(f"host-{n}")
        term, journal = begin(record)
        assert term.number == n == record.newest()
        for i in range(12):
            told = journal.append(f"k{n}.{i}", value=i)
            assert (told["n"], told["epoch"], told["t"], told["value"]) == (i + 1, n, 5.0, i)
        journal.close()
        assert kinds(record) == [f"k{a}.{i}" for a in range(1, n + 1) for i in range(12)]
    assert record.read().damaged == 0
    assert [t.number for t in place.host("another").terms()] == [1, 2, 3]


def test_of_many_that_race_for_a_term_one_has_it(place: Place) -> None:
    begin(place.host("first"))
    racers = [place.host(f"host-{i}") for i in range(8)]
    barrier, won = threading.Barrier(len(racers)), list[Term]()

    def race(record: Record) -> None:
        terms = record.terms()
        sealed = record.seal(terms)
        barrier.wait(20)
        if (term := record.claim(2, run_id="r", address="unix:/x", sealed=sealed)) is not None:
            won.append(term)

    threads = [threading.Thread(target=race, args=(r,)) for r in racers]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert len(won) == 1
    (_, second) = place.host("x").terms()
    assert second == won[0]


def test_what_a_superseded_supervisor_adds_later_never_counts(place: Place) -> None:
    old = place.host("old")
    _, journal = begin(old)
    journal.append("before")
    new = place.host("new")
    _, successor = begin(new)
    for _ in range(3):
        try:
            journal.append("late")
        except Superseded:
            assert place.kind == "objects"
    successor.append("after")
    assert kinds(new) == kinds(old) == kinds(place.host("third")) == ["before", "after"]
    _, third = begin(place.host("third"))
    third.append("third")
    assert kinds(place.host("fourth")) == ["before", "after", "third"]


def test_one_whose_successor_died_before_it_had_claimed_the_run_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "CLAIM_S", 0.05)
    record = place.host("old")
    _, journal = begin(record)
    journal.append("a")
    other = place.host("other")
    other.seal(other.terms())  # and is killed
    other.seal(other.terms())  # as is another one
    journal.append("b")
    journal.append("c")
    assert kinds(record) == ["a", "b", "c"]
    _, successor = begin(place.host("next"))
    successor.append("d")
    assert kinds(place.host("x")) == ["a", "b", "c", "d"]


def test_damage_is_counted_and_hides_nothing_else(place: Place) -> None:
    record = place.host()
    _, journal = begin(record)
    for i in range(4):
        journal.append(f"k{i}")
    if place.kind == "objects":
        name = "journal/000001/00000002.json"
        whole = record._storage.read(name)  # type: ignore[attr-defined]
        record._storage.put(name, whole[: len(whole) // 2])  # type: ignore[attr-defined]
    else:
        path = RunDir(place.folder / "run").journal(1)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([lines[0], lines[1][:20] + b"\n", *lines[2:]]))
    for _ in range(3):
        found = place.host("reader").read()
        assert [r["kind"] for r in found.records][:3] == ["k0", "k2", "k3"] and found.damaged == 1
        begin(place.host("reader"))[1].append("more")


def test_what_each_place_means_is_said(tmp_path: Path) -> None:
    shared, own = (FolderRecord(RunDir(tmp_path), shared=s).describe() for s in (True, False))
    assert "another host can take over" in shared
    assert "losing this host ends the run" in own and "own disk" in own
    stored = ObjectRecord(S3Storage(memory_store(), "s3://b/r"), RunDir(tmp_path)).describe()
    assert "s3://b/r" in stored and "another host can take over" in stored and "key files" in stored


# --- an object store


class Flaky:
    """A store whose answers are lost now and then, after it has done what was asked or before."""

    def __init__(self, storage: S3Storage, plan: list[str]) -> None:
        self._storage, self.plan = storage, plan
        self.url = storage.url

    def create(self, name: str, data: bytes) -> bool:
        fault = self.plan.pop(0) if self.plan else "none"
        if fault == "before":
            raise StorageError("no answer")
        made = self._storage.create(name, data)
        if fault == "after":
            raise StorageError("no answer")
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


@fuzz(25)
@given(plan=st.lists(st.sampled_from(["none", "before", "after"]), max_size=30), count=st.integers(1, 8))
def test_an_append_that_is_tried_until_it_succeeds_is_there_once(plan: list[str], count: int) -> None:
    run_dir = RunDir("/dev/null/copies/are/best/effort")  # nobody can write there, not even root
    record = ObjectRecord(S3Storage(memory_store(), "memory://run"), run_dir)
    begin(record)
    now = iter(range(1000))
    flaky = Flaky(record._storage, list(plan))  # type: ignore[arg-type]
    journal = ObjectRecord(flaky, run_dir).open(record.terms()[-1], lambda: next(now))  # type: ignore[arg-type]
    for i in range(count):
        while True:
            try:
                told = journal.append("k", value=(i,))
                break
            except OSError:
                continue
        assert list(told["value"]) == [i]
    found = record.read()
    assert [r["value"] for r in found.records] == [[i] for i in range(count)] and not found.damaged
    assert [r["n"] for r in found.records] == list(range(1, count + 1))


def test_the_copies_in_the_run_directory_say_the_same(tmp_path: Path) -> None:
    store = memory_store()
    for n in (1, 2, 3):
        run_dir = RunDir(tmp_path / f"host-{n}")
        record = ObjectRecord(S3Storage(store, "memory://run"), run_dir)
        _, journal = begin(record)
        for i in range(3):
            journal.append(f"k{n}.{i}")
        assert read_journal(run_dir).records == record.read().records
        assert [t.number for t in read_terms(run_dir)] == list(range(1, n + 1))
    # A directory of before is brought up to what counts.
    first = RunDir(tmp_path / "host-1")
    _, journal = begin(ObjectRecord(S3Storage(store, "memory://run"), first))
    journal.append("last")
    assert [r["kind"] for r in read_journal(first).records] == [
        *(f"k{n}.{i}" for n in (1, 2, 3) for i in range(3)),
        "last",
    ]
    shutil.rmtree(first.path)
    journal.append("still")
    assert ObjectRecord(S3Storage(store, "memory://run"), first).read().records[-1]["kind"] == "still"


def test_what_the_run_directory_refused_is_copied_when_it_takes_it_again(tmp_path: Path) -> None:
    place = Place("objects", tmp_path, memory_store())
    record = place.host()
    _, journal = begin(record)
    journal.append("a")
    run_dir = RunDir(tmp_path / "a")
    aside = run_dir.journals.rename(tmp_path / "aside")
    run_dir.journals.write_text("no folder")
    journal.append("b")
    journal.append("c")
    run_dir.journals.unlink()
    aside.rename(run_dir.journals)
    assert [r["kind"] for r in read_journal(run_dir).records] == ["a"]
    journal.close()
    assert [r["kind"] for r in read_journal(run_dir).records] == ["a", "b", "c"] == kinds(record)


def test_a_run_directory_that_was_deleted_does_not_come_back_with_the_copies(tmp_path: Path) -> None:
    record = Place("objects", tmp_path, memory_store()).host()
    _, journal = begin(record)
    shutil.rmtree(tmp_path / "a")
    journal.append("a")
    assert not (tmp_path / "a").exists() and kinds(record) == ["a"]


def test_a_number_that_counted_and_is_gone_is_damage(tmp_path: Path) -> None:
    store = memory_store()
    record = ObjectRecord(S3Storage(store, "memory://run"), RunDir(tmp_path / "a"))
    _, journal = begin(record)
    for i in range(3):
        journal.append(f"k{i}")
    terms = record.terms()
    sealed = record.seal(terms)
    record._storage.delete("journal/000001/00000002.json")
    assert record.claim(2, run_id="r", address="unix:/x", sealed=sealed)
    found = record.read()
    assert [r["kind"] for r in found.records] == ["k0", "k2"] and found.damaged == 1


def test_it_works_on_whatever_the_storage_layer_offers(tmp_path: Path) -> None:
    record = ObjectRecord(PosixStorage(tmp_path / "store"), RunDir(tmp_path / "a"))
    record.check()
    for n in (1, 2):
        _, journal = begin(record)
        journal.append(f"k{n}")
    assert kinds(ObjectRecord(PosixStorage(tmp_path / "store"), RunDir(tmp_path / "b"))) == ["k1", "k2"]


def test_run_toml_travels_with_the_record_and_two_runs_never_share_one(tmp_path: Path) -> None:
    store = memory_store()

    def host(name: str, run_id: str = "") -> tuple[RunDir, ObjectRecord]:
        run_dir = RunDir(tmp_path / name)
        run_dir.create()
        if run_id:
            write_spec(run_dir, RunSpec(("train.py",), run_id), first=True)
        return run_dir, ObjectRecord(S3Storage(store, "memory://run"), run_dir)

    a, record = host("a", "one")
    record.fetch_spec()
    record.share_spec("one")
    b, elsewhere = host("b")
    elsewhere.fetch_spec()
    assert b.spec.read_bytes() == a.spec.read_bytes()
    elsewhere.share_spec("one")
    write_spec(b, RunSpec(("train.py",), "one", spares=3))
    elsewhere.keep_spec()
    c, third = host("c")
    third.fetch_spec()
    assert c.spec.read_bytes() == b.spec.read_bytes() != a.spec.read_bytes()
    _, stranger = host("d", "two")
    with pytest.raises(RunDirMismatch, match="another run"):
        stranger.share_spec("two")
    for name in ("token", "identity.pem"):
        with pytest.raises(FileNotFoundError):
            record._storage.read(name)


def test_who_has_not_the_keys_of_a_run_that_may_go_on_does_not_take_it_over(tmp_path: Path) -> None:
    """With a token of its own it would believe that nobody supervises, and the agents would follow nobody."""
    place = Place("objects", tmp_path, memory_store())
    record = place.host("first")
    elsewhere = RunDir(tmp_path / "elsewhere")
    start._check_keys(elsewhere, record)  # nobody was there before
    term = record.claim(1, run_id="r", address="tls:elsewhere:7", sealed={})
    assert term is not None
    journal = record.open(term, lambda: 5.0)
    journal.append("epoch")
    with pytest.raises(RunInUse, match="key files") as error:
        start._check_keys(elsewhere, place.host("elsewhere"))
    assert "token" in str(error.value.hint)
    write_secret(elsewhere.token, b"0" * 32)
    with pytest.raises(RunInUse, match=r"identity\.pem is not here") as error:
        start._check_keys(elsewhere, record)  # its agents come over TLS, and take no other certificate
    command = str(error.value.hint).rpartition("make your own: ")[2]
    subprocess.run(["sh", "-c", command], cwd=elsewhere.path, check=True, capture_output=True)
    Identity.read(elsewhere.identity).context(server=True)
    start._check_keys(elsewhere, record)
    elsewhere.token.unlink()
    journal.append("status", status="interrupted")
    start._check_keys(elsewhere, record)  # it has ended: there is nobody to ask


def test_what_is_appended_between_a_seal_and_its_claim_is_not_acted_on(tmp_path: Path) -> None:
    store = memory_store()
    old, new = (ObjectRecord(S3Storage(store, "memory://run"), RunDir(tmp_path / n)) for n in "ab")
    _, journal = begin(old)
    journal.append("before", slots=("n0",))
    terms = new.terms()
    sealed = new.seal(terms)
    claiming = threading.Timer(0.3, lambda: new.claim(2, run_id="r", address="unix:/x", sealed=sealed))
    claiming.start()
    with pytest.raises(Superseded):
        journal.append("between")
    claiming.join()
    assert kinds(new) == ["before"]


def test_a_successor_that_sleeps_between_seal_and_claim_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before waited for the claim, and went on: all that it was told to be written counts."""
    monkeypatch.setattr(objects, "CLAIM_S", 0.05)
    store = memory_store()
    old, new = (ObjectRecord(S3Storage(store, "memory://run"), RunDir(tmp_path / n)) for n in "ab")
    _, journal = begin(old)
    journal.append("a")
    sealed = new.seal(new.terms())
    journal.append("b")
    journal.append("c")
    term = new.claim(2, run_id="r", address="unix:/x", sealed=sealed)
    assert term is not None and term.number == 3, "the claim that did not count them is not the last one"
    with pytest.raises(Superseded):
        journal.append("late")
    new.open(term, lambda: 5.0).append("d")
    third = ObjectRecord(S3Storage(store, "memory://run"), RunDir(tmp_path / "c"))
    assert kinds(new) == kinds(old) == kinds(third) == ["a", "b", "c", "d"]
    copied = [r["kind"] for r in read_journal(RunDir(tmp_path / "b")).records]
    assert [k for k in copied if k != "closed"] == ["a", "b", "c", "d"]


def test_a_claim_in_the_moment_in_which_the_one_before_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first record after the wait is either counted by the claim, or never acknowledged."""
    monkeypatch.setattr(objects, "CLAIM_S", 0.05)
    store = memory_store()
    old, new = (ObjectRecord(S3Storage(store, "memory://run"), RunDir(tmp_path / n)) for n in "ab")
    _, journal = begin(old)
    journal.append("a")
    sealed = new.seal(new.terms())
    create = S3Storage.create

    def claim_first(self: S3Storage, name: str, data: Any) -> bool:
        if name == "journal/000001/00000003.json":
            monkeypatch.setattr(S3Storage, "create", create)
            assert new.claim(2, run_id="r", address="unix:/x", sealed=sealed) is not None
        return create(self, name, data)

    monkeypatch.setattr(S3Storage, "create", claim_first)
    with pytest.raises(Superseded):
        journal.append("b")
    assert kinds(new) == ["a"]


# --- which


def test_which_record_a_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    for text, shared in (("shared", True), ("own-disk", False), ("auto", False)):
        record = open_record(run_dir, text)
        assert (
            isinstance(record, FolderRecord)
            and (record.shared or (text == "auto" and is_shared(tmp_path))) == shared
        )
    found = open_record(run_dir, "s3://bucket/run")
    assert isinstance(found, ObjectRecord) and found.where == "s3://bucket/run"
    for wrong in ("", "ftp://x", "elsewhere", "S3://b"):
        with pytest.raises(UsageError, match="no place for the record"):
            open_record(run_dir, wrong)


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/home/u/run", False),
        ("/data/x", True),
        ("/data/local/x", False),
        ("/scratch dir/x", True),
        ("/fuse/x", True),
        ("/", False),
    ],
)
def test_whether_a_folder_is_shared_is_seen_by_its_file_system(
    tmp_path: Path, path: str, shared: bool
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw 0 0\nnas:/d /data nfs4 rw 0 0\n/dev/sdb /data/local xfs rw 0 0\n"
        "l:/x /scratch\\040dir lustre rw 0 0\njuice /fuse fuse.juicefs rw 0 0\nbroken line\n"
    )
    assert is_shared(Path(path), mounts) is shared
    assert is_shared(Path(path), tmp_path / "missing") is False


def test_the_line_of_an_object_is_the_journals_own(tmp_path: Path) -> None:
    """So that whoever looks into a store by hand, or mends it, needs nothing else."""
    store = memory_store()
    record = ObjectRecord(S3Storage(store, "memory://run"), RunDir(tmp_path))
    _, journal = begin(record)
    told = journal.append("status", status="completed")
    assert record._storage.read("journal/000001/00000001.json") == encode(told)
