"""The coordinator's port: whoever speaks nonsense there loses its link, and nobody else anything."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.evaluate.contracts import PreparedTask, Report, Request, Suite, TaskPrior
from unbroken.evaluate.engines.live import WorkerLink
from unbroken.evaluate.engines.wire import VERSION
from unbroken.evaluate.plan import dispatch
from unbroken.evaluate.result.journal import events
from unbroken.evaluate.run.workers import server as module
from unbroken.evaluate.suite import received
from unbroken.evaluate.suite.staged import write_samples
from unbroken.journal import lines
from unbroken.link.address import Address
from unbroken.link.bounds import HELLO_BYTES, STRANGERS, Malformed
from unbroken.link.tls import Identity

from ..fuzzing import fuzz
from ..hostile import NESTED, bodies, closed_within, framed, frames, mutated, receive_frame, send
from .evaluating import coordinator, evaluate, fake_suite, fake_task, numbers

SUITE = fake_suite(fake_task("a", samples=24), fake_task("b", samples=9))


class Evaluation:
    """A coordinator that waits for workers, in a thread of this process."""

    def __init__(self, folder: Path, suite: Suite = SUITE) -> None:
        self.folder = folder
        self.coordinator = coordinator(folder, suite, workers=0, wait_for_workers_s=600.0)
        self.found: list[Report] = []
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        cluster = folder / "out" / "cluster.json"
        deadline = time.monotonic() + 60
        while not cluster.exists():
            assert time.monotonic() < deadline and self._thread.is_alive(), self.failed
            time.sleep(0.01)
        self.cluster = cluster
        where = json.loads(cluster.read_text())
        found = Address.parse(where["address"])
        self.address, self.token = (found.host, found.port), where["token"]
        self._identity = Identity.from_pem(where["identity"], str(cluster))
        self._names = 0

    def _run(self) -> None:
        try:
            self.found.append(self.coordinator.run())
        except BaseException as e:  # noqa: BLE001  the test looks at it
            self.failed.append(e)

    @property
    def lives(self) -> bool:
        return self._thread.is_alive() and self.coordinator.control.problem is None

    def raw(self) -> socket.socket:
        """A connection that has not shaken hands."""
        return socket.create_connection(("127.0.0.1", self.address[1]), timeout=10)

    def connect(self) -> socket.socket:
        return self._identity.context(server=False).wrap_socket(self.raw())

    def hello(self, **more: Any) -> dict[str, Any]:
        self._names += 1
        return {
            "op": "hello", "version": VERSION, "token": self.token, "name": f"x{self._names}", "node": "n", "gpus": [],
            "pid": 1, "now": time.time(), "sees": True, **more,
        }  # fmt: skip

    def join(self) -> socket.socket:
        """A link that has shown the token."""
        sock = self.connect()
        assert send(sock, frame(self.hello()))
        assert receive_frame(sock)["op"] == "welcome"
        return sock

    def work(self) -> tuple[socket.socket, dict[str, Any]]:
        """A link that was given blocks, and the message that gave them."""
        sock = self.join()
        send(sock, frame({"op": "ready", "fetch_s": 0.0, "load_s": 0.1}))
        while (m := receive_frame(sock))["op"] != "work":
            pass
        return sock, m

    def finish(self) -> Report:
        """A real worker does what is left."""
        worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "unbroken.evaluate.engines.worker.process",
                "--cluster",
                str(self.cluster),
                "--name",
                "real",
            ]
        )
        self._thread.join(120)
        assert not self.failed, self.failed
        assert worker.wait(20) == 0
        return self.found[0]

    def stop(self) -> None:
        self.coordinator.stop("the test ends")
        self._thread.join(20)


def frame(message: Any) -> bytes:
    return framed(json.dumps(message).encode())


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Evaluation]:
    found = Evaluation(tmp_path)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> object:
    return numbers(evaluate(tmp_path_factory.mktemp("right"), SUITE, workers=1))


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, right: object) -> Iterator[Evaluation]:
    """One evaluation for all fuzzers; in the end it has the right scores and took no more memory."""
    with pytest.MonkeyPatch.context() as patch:
        # Whoever leaves with a block has failed it once: sixty of them would give all of this small suite up.
        patch.setattr(dispatch, "TRIES", 10**6)
        yield from _attack(tmp_path_factory.mktemp("attacked"), right)


def _attack(folder: Path, right: object) -> Iterator[Evaluation]:
    found = Evaluation(folder)
    before = psutil.Process().memory_info().rss
    yield found
    assert found.lives, (found.coordinator.control.problem, found.failed)
    grown = psutil.Process().memory_info().rss - before
    assert grown < 500 << 20, f"it grew by {grown >> 20} MiB"
    first = found.finish()
    assert not first.errors
    again = evaluate(found.folder, SUITE, workers=1)  # blocks that were given up are asked again
    assert numbers(again) == right


# ------------------------------------------------------------------------------------------------ examples


@pytest.mark.parametrize(
    "body",
    [
        NESTED,
        pytest.param(b'{"op":' + NESTED, marks=pytest.mark.slow),
        pytest.param(b"[]", marks=pytest.mark.slow),
        b"\xff",
        pytest.param(b"{}", marks=pytest.mark.slow),
        b'{"op":"hello","token":[]}',
    ],
)
def test_one_frame_of_a_stranger_ends_its_link_only(running: Evaluation, right: object, body: bytes) -> None:
    with running.connect() as sock:
        send(sock, framed(body))
        assert closed_within(sock, 5)
    assert numbers(running.finish()) == right


def test_a_stranger_may_send_a_few_kib_and_no_more(running: Evaluation) -> None:
    before = psutil.Process().memory_info().rss
    flooding = []
    for _ in range(8):
        sock = running.connect()
        send(sock, framed(b"", (1 << 30) - 1))
        flooding.append(sock)
    assert all(closed_within(sock, 5) for sock in flooding)
    with running.connect() as sock:
        send(sock, frame(running.hello(padding="x" * HELLO_BYTES)))
        assert closed_within(sock, 5)
    with running.connect() as sock:
        send(sock, framed(b"", HELLO_BYTES))
        for _ in range(50):
            if not send(sock, b" " * (1 << 20)):
                break
        assert closed_within(sock, 5)
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert running.lives


def test_who_says_nothing_is_cut_off_and_keeps_nobody_out(
    running: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [running.raw() for _ in range(3 * STRANGERS)]
    began = time.monotonic()
    with running.join():
        assert time.monotonic() - began < 8
        open_here = psutil.Process().net_connections()
        accepted = [c for c in open_here if c.laddr.port == running.address[1] and c.raddr]
        assert 1 <= len(accepted) <= STRANGERS + 1, "the strangers, and the one that joined"
    for sock in silent:
        sock.close()
    monkeypatch.setattr(module, "HELLO_S", 0.3)
    with running.connect() as sock:
        send(sock, b"\0\0")
        assert closed_within(sock, 5)
    assert running.lives


def answer(prepared: PreparedTask, number: int, visit: int = 1, **more: Any) -> dict[str, Any]:
    """A right answer to a block."""
    ids = prepared.samples_of(number)
    hashes, requests = received.asked(prepared, ids)
    given = [
        {"sample": i, "hash": h, "outputs": [[-1.0, True] if r.kind == "loglikelihood" else "x" for r in rs]}
        for i, h, rs in zip(ids, hashes, requests, strict=True)
    ]
    return {
        "op": "block", "task": prepared.task.name, "block": number, "visit": visit, "started": time.time(), "ended": time.time(),
        "answers": given, "conditions": {"engine": "e", "device": "d", "dtype": "f", "batch_size": 1}, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedTask:
    """A task of 20 samples in blocks of 8, each with a likelihood and a text."""
    folder = tmp_path_factory.mktemp("task")
    asked = [
        [Request("loglikelihood", (f"q{i}", "a")), Request("generate_until", (f"q{i}", {}))]
        for i in range(20)
    ]
    staged = write_samples(folder, asked, block=8)
    return PreparedTask(fake_task("a"), "1", staged.samples, 8, str(folder), staged.prompt_hash)


WRONG = {
    "an unknown task": {"task": "nobody"},
    "a task that is no text": {"task": ["a"]},
    "an unknown block": {"block": 99},
    "a negative block": {"block": -1},
    "a block that is no number": {"block": "0"},
    "no answers": {"answers": []},
    "answers that are none": {"answers": "text"},
    "an answer that is none": {"answers": [None] * 8},
    "no conditions": {"conditions": None},
    "unknown conditions": {"conditions": {"engine": "e", "colour": "red"}},
    "conditions of another kind": {
        "conditions": {"engine": 1, "device": "d", "dtype": "f", "batch_size": "x"}
    },
    "times that are none": {"started": "now"},
    "a time that is not finite": {"started": float("nan")},
    "a visit that is none": {"visit": None},
}


HELD = [("a", 0), ("a", 2)]


@pytest.mark.parametrize("what", WRONG)
def test_a_block_of_another_shape_is_known(prepared: PreparedTask, what: str) -> None:
    right = received.block(answer(prepared, 0), HELD, {"a": prepared})
    assert (right.task, right.number, len(right.answers), right.problems) == ("a", 0, 8, ())
    with pytest.raises(Malformed):
        received.block(answer(prepared, 0, **WRONG[what]), HELD, {"a": prepared})


@pytest.mark.parametrize(
    "change",
    [{"hash": "0" * 32}, {"sample": 7}, {"sample": True}, {"outputs": None}, {"outputs": []}, {"outputs": ["x"] * 50},
     {"outputs": ["x", "x"]}, {"outputs": [[float("nan")], "x"]}, {"outputs": [[-1.0, True], 5]}, {"problem": 5},
     {"outputs": [[10**400, True], "x"]}],
)  # fmt: skip
def test_answers_of_another_shape_are_known(prepared: PreparedTask, change: dict[str, Any]) -> None:
    message = answer(prepared, 2)
    message["answers"][0] |= change
    with pytest.raises(received.BadAnswers, match="block 2 of a"):
        received.block(message, HELD, {"a": prepared})


def test_what_json_could_not_write_again_is_known() -> None:
    deep: Any = "x"
    for _ in range(60):
        deep = [deep]
    with pytest.raises(Malformed, match="no answer to a 'plain'"):
        received.answers(
            [{"sample": 0, "hash": "h", "outputs": [deep]}], range(1), ["h"], [[Request("plain", ("q",))]]
        )


def test_only_what_is_known_is_stored_and_reasons_can_be_shown(prepared: PreparedTask) -> None:
    message = answer(prepared, 2)
    message["answers"][0] |= {"extra": "x" * 100, "problem": "no\x1b[2J answer"}
    found = received.block(message, HELD, {"a": prepared})
    assert found.problems == ("no?[2J answer",)
    assert set(found.answers[0]) == {"sample", "hash", "outputs", "problem"}


def until_asked(sock: socket.socket, op: str) -> dict[str, Any]:
    """The next message of this kind."""
    while (m := receive_frame(sock))["op"] != op:
        pass
    return m


@pytest.fixture
def lone_task(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Evaluation]:
    """One task of so many blocks, and so many seconds as the suite states them."""
    blocks, seconds = request.param
    task = fake_task("a", samples=8 * blocks)
    found = Evaluation(
        tmp_path, Suite("s", (task,), priors={"a": TaskPrior(samples=8 * blocks, seconds=seconds)})
    )
    yield found
    found.stop()


@pytest.mark.parametrize("lone_task", [(2, 1000.0)], indirect=True)
def test_what_is_given_up_for_an_idle_worker_is_not_given_back(lone_task: Evaluation) -> None:
    """It would be asked for again at once, and so on, thousands of times a second, until the block in flight is answered."""
    victim, m = lone_task.work()
    held = [*m["blocks"]]
    while len(held) < 2:
        held += until_asked(victim, "work")["blocks"]
    with victim, lone_task.join() as thief:
        send(thief, frame({"op": "ready", "fetch_s": 0.0, "load_s": 0.1}))
        asked = until_asked(victim, "yield")["blocks"]
        assert asked == [["a", held[1]]]
        send(victim, frame({"op": "yielded", "blocks": asked}))
        assert until_asked(thief, "work")["blocks"] == [held[1]]
    steals = [e for e in events(lone_task.coordinator.job.folder.journal) if e["event"] == "steal"]
    assert len(steals) == 1
    assert not lone_task.finish().errors


@pytest.mark.parametrize("lone_task", [(6, 0.01)], indirect=True)
def test_an_idle_worker_gets_a_share_once_blocks_take_longer_than_expected(lone_task: Evaluation) -> None:
    """By the suite's own figure a block takes less than handing it over: nothing is shared until one was answered."""
    busy, m = lone_task.work()
    with busy, lone_task.join() as idle:
        send(idle, frame({"op": "ready", "fetch_s": 0.0, "load_s": 0.1}))
        while sum(bool(x.ready) for x in lone_task.coordinator.links.values()) < 2:
            time.sleep(0.01)
        time.sleep(0.3)  # what the block takes
        prepared = lone_task.coordinator.table.prepared["a"]
        message = answer(prepared, m["blocks"][0], m["visit"], started=time.time() - 0.3)
        send(busy, frame(message))
        asked = until_asked(busy, "yield")["blocks"]
        send(busy, frame({"op": "yielded", "blocks": asked}))
        assert [["a", b] for b in until_asked(idle, "work")["blocks"]] == asked


@pytest.mark.parametrize("wrong", [{"block": 99}, {"task": "nobody"}, {"answers": []}])
def test_a_block_that_makes_no_sense_drops_its_link_and_poisons_nothing(
    running: Evaluation, right: object, wrong: dict[str, Any]
) -> None:
    sock, m = running.work()
    with sock:
        send(
            sock,
            frame(answer(running.coordinator.table.prepared[m["task"]], m["blocks"][0], m["visit"], **wrong)),
        )
        assert closed_within(sock, 5)
    report = running.finish()
    assert not report.errors
    assert numbers(report) == right
    gone = [e["why"] for e in events(running.coordinator.job.folder.journal) if e["event"] == "gone"]
    assert any("makes no sense" in why for why in gone)


def test_a_block_that_was_given_to_another_is_refused(running: Evaluation, right: object) -> None:
    sock, m = running.work()
    with sock, running.join() as thief:
        for op in ("block", "failed", "yielded"):
            mine = running.coordinator.table.prepared[m["task"]], m["blocks"][0]
            message = answer(*mine, why="w", blocks=[[m["task"], m["blocks"][0]]], op=op)
            send(thief, frame(message))
            if closed_within(thief, 5):
                break
        else:
            raise AssertionError("it was taken from one who does not hold it")
    assert numbers(running.finish()) == right


@pytest.mark.parametrize(
    "started, ended, now", [(0.0, 9e10, None), (9e10, 9e10, None), (0.0, 1.0, 0.0), (1.0, 9e9, 9e10)]
)
def test_a_clock_that_lies_teaches_no_runtime_estimate(
    running: Evaluation, started: float, ended: float, now: float | None
) -> None:
    began = time.time()
    with running.connect() as sock:
        send(sock, frame(running.hello(**({} if now is None else {"now": now}))))
        assert receive_frame(sock)["op"] == "welcome"
        send(sock, frame({"op": "ready", "fetch_s": 1e8, "load_s": 1e8}))
        while (m := receive_frame(sock))["op"] != "work":
            pass
        prepared = running.coordinator.table.prepared[m["task"]]
        send(
            sock,
            frame(answer(prepared, m["blocks"][0], m["visit"], task=m["task"], started=started, ended=ended)),
        )
        deadline = time.monotonic() + 10
        while not running.coordinator.observed.blocks:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        link = next(iter(running.coordinator.links.values()))
        passed = time.time() - began
        assert 0 <= running.coordinator.observed.blocks[0].seconds <= passed
        assert 0 <= link.fetch_s <= passed and 0 <= link.load_s <= passed


@pytest.mark.parametrize(
    "messages",
    [[{"op": "ready", "fetch_s": 0, "load_s": 0}] * 2, [{"op": "dance"}], [{"op": "ready"}], [{"op": "beat", "task": 5, "block": 0}],
     [{"op": "unfit"}], [{"op": "yielded", "blocks": 5}]],
)  # fmt: skip
def test_what_no_worker_says_drops_the_link(attacked: Evaluation, messages: list[Any]) -> None:
    with attacked.join() as sock:
        for message in messages:
            send(sock, frame(message))
        assert closed_within(sock, 5)
    assert attacked.lives


def test_bad_stored_lines_are_passed_over_and_said(
    tmp_path: Path, right: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert numbers(evaluate(tmp_path, SUITE, workers=1)) == right
    (stored,) = (tmp_path / "out" / "answers").glob("*/a/*.jsonl")
    whole = list(lines.records(stored))
    good = whole[0]
    bad: list[Any] = [
        {"block": None}, {"block": 0}, {**good, "block": "0"}, {**good, "answers": None}, {**good, "answers": [5]},
        {**good, "conditions": {"engine": 5}}, {k: v for k, v in good.items() if k != "conditions"},
        {**good, "answers": [{**a, "outputs": []} for a in good["answers"]]},
        {**good, "answers": [{**a, "outputs": None} for a in good["answers"]]},
        {**good, "version": ["x"]}, {**good, "block": 1 << 80},
    ]  # fmt: skip
    stored.write_bytes(b"rubbish\n[]\n" + b"".join(lines.encode(line) for line in [*bad, *whole[1:]]))
    for path in (tmp_path / "out" / "scores").rglob("*.json"):
        path.unlink()
    report = evaluate(tmp_path, SUITE, workers=1)
    assert not report.errors
    assert numbers(report) == right
    said = [e for e in events(tmp_path / "out" / "journal.jsonl") if e["event"] == "passed_over"]
    assert len(said) >= len(bad) - 2  # one of another version, or beyond the last block, is no damage
    assert "passed over" in caplog.text


def test_a_token_file_made_beforehand_is_not_used(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    planted = [out / "cluster.new", out / "cluster.json"]
    for path in planted:
        path.write_text("planted")
        path.chmod(0o666)
    held = [open(path) for path in planted]  # noqa: SIM115  as whoever planted them would
    for path in planted:
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
    running = Evaluation(tmp_path)
    try:
        assert not running.cluster.is_symlink()
        assert running.cluster.stat().st_mode & 0o777 == 0o600
        assert not (tmp_path / "elsewhere").exists()
        assert all(running.token not in f.read() for f in held)
        sock, _ = running.work()  # it has looked at its own file by then, and hands out blocks
        sock.close()
        running.cluster.chmod(0o644)
        found = subprocess.run(
            [sys.executable, "-m", "unbroken.evaluate.engines.worker.process", "--cluster", str(running.cluster), "--name", "w"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert found.returncode == 5 and "chmod 600" in found.stderr, (found.stderr, running.failed)
    finally:
        running.stop()
        for f in held:
            f.close()


# ------------------------------------------------------------------------------------------------- fuzzers

# Blocks that nobody has: who holds one may fail it three times, and then it is given up.
SAID = [
    {"op": "ready", "fetch_s": 0.0, "load_s": 0.0, "uncompiled": 0},
    {"op": "block", "task": "a", "block": 77, "visit": 1, "started": 1.0, "ended": 2.0, "answers": [],
     "conditions": {"engine": "e", "device": "d", "dtype": "f", "batch_size": 1}},
    {"op": "failed", "task": "a", "block": 77, "visit": 1, "kind": "E", "why": "w"},
    {"op": "yielded", "blocks": [["a", 77]]},
    {"op": "beat", "task": "a", "block": 0, "since": 1.0},
    {"op": "bye", "why": "enough"},
]  # fmt: skip


@fuzz(40)
@given(sent=st.lists(frames, min_size=1, max_size=3))
def test_strangers(attacked: Evaluation, sent: list[bytes]) -> None:
    with attacked.connect() as sock:
        for data in sent:
            send(sock, data)
    assert attacked.lives


@fuzz(40)
@given(data=st.data())
def test_strangers_who_nearly_know_how_to_say_hello(attacked: Evaluation, data: st.DataObject) -> None:
    message = data.draw(mutated([attacked.hello(), attacked.hello(token="0" * 32)]))
    with attacked.connect() as sock:
        send(sock, frame({**message, "op": "hello"}))
        send(sock, framed(data.draw(bodies)))
    assert attacked.lives


@fuzz(60)
@given(
    sent=st.lists(st.one_of(mutated(SAID).map(frame), frames), min_size=1, max_size=4), works=st.booleans()
)
def test_workers_with_the_token(attacked: Evaluation, sent: list[bytes], works: bool) -> None:
    with attacked.join() as sock:
        if works:
            send(sock, frame(SAID[0]))
        for data in sent:
            if not send(sock, data):
                break
    assert attacked.lives


@fuzz(50)
@given(data=st.data())
def test_blocks(prepared: PreparedTask, data: st.DataObject) -> None:
    message = data.draw(mutated([answer(prepared, 0), answer(prepared, 2)]))
    if data.draw(st.booleans()) and isinstance(message.get("answers"), list) and message["answers"]:
        message["answers"] = [
            data.draw(mutated([a])) if isinstance(a, dict) else a for a in message["answers"]
        ]
    try:
        found = received.block(json.loads(json.dumps(message)), HELD, {"a": prepared})
    except Malformed:
        return
    assert [a["sample"] for a in found.answers] == list(prepared.samples_of(found.number))
    json.dumps(found.answers)


def test_a_block_keeps_its_length_where_the_first_message_was_long_under_way() -> None:
    """The offset is then too large, and each block seems to end in the future; run times were learnt as zero."""
    now = time.time()
    link = WorkerLink("w", "n", (), 1, None, 5.0, True, now - 60.0)  # type: ignore[arg-type]
    started, ended = link.believable(now - 0.5, now - 0.1)
    assert ended - started == pytest.approx(0.4) and ended == pytest.approx(now, abs=5.0)
    assert link.believable(0.0, now)[0] == link.started, "a clock that jumped: within the link's life"
    started, ended = link.believable(now, now - 40.0)
    assert link.started <= started == ended
    early = link.believable(now - 300.0, now - 200.0)
    assert early == (link.started, link.started)
