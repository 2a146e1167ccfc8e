"""An endpoint that is slow, full, broken or gone costs time, or single answers; never a wrong score."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.errors import EvaluationError, ModelDoesNotLoad, UnknownKey, UsageError
from unbroken.evaluate.contracts import ModelSpec, Request, Suite, Task
from unbroken.evaluate.harness.openai import OpenAIBackend, OpenAIModel, OpenAIOptions
from unbroken.evaluate.harness.plain import PlainHarness
from unbroken.evaluate.scoring.judge import Judge, Rate, Unscored, read_choice, read_grade
from unbroken.evaluate.suite import staged
from unbroken.link.openai import Endpoint, EndpointRefused
from unbroken.testing.fake_endpoint import FakeEndpoint, Misbehaviour, broken, garbage, overloaded
from unbroken.testing.fake_models import respond

SAY = Request("generate_until", ("Repeat: amber birch", {"until": ["\n"], "max_gen_toks": 16}))


@pytest.fixture
def server() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as s:
        yield s


def model(
    server: FakeEndpoint, *, chat: bool = False, calls: int = 4, **options: object
) -> tuple[OpenAIModel, list[float]]:
    """A loaded model whose pauses are noted instead of slept."""
    spec = ModelSpec(server.url, backend="openai", batch_size=calls, chat_template=chat, options=options)
    loaded = OpenAIBackend().load(spec, None, ())
    pauses: list[float] = []
    loaded.retry.sleep = pauses.append
    return loaded, pauses


@pytest.mark.parametrize("reply", [[], {}, None, "ok", {"data": None}, {"data": ["llama"]}])
def test_another_servers_json_is_no_list_of_models(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, reply: object
) -> None:
    monkeypatch.setattr(Endpoint, "_call", lambda *_: reply)
    with pytest.raises(ModelDoesNotLoad, match="a reply without models"):
        model(server)


def test_texts_are_continued_in_order_and_at_once(server: FakeEndpoint) -> None:
    server.delay_s = 0.05
    loaded, _ = model(server)
    asked = [Request("generate_until", (f"Repeat: amber birch {i}", {"max_gen_toks": 9})) for i in range(12)]
    assert loaded.respond(asked) == [respond(Request("generate_until", (r.arguments[0], {}))) for r in asked]
    assert server.most_at_once == 4
    body = server.bodies[0]
    assert (body["max_tokens"], body["temperature"], body["model"]) == (9, 0.0, "fake")
    assert loaded.conditions.engine == "openai endpoint, model fake"


def test_messages_go_to_the_chat_endpoint_as_they_are(server: FakeEndpoint) -> None:
    loaded, _ = model(server, chat=True)
    messages = [{"role": "user", "content": "2 + 3 ="}]
    (text,) = loaded.respond([Request("generate_until", (messages, {"until": ["x"]}))])
    assert server.calls["/chat/completions"] == 1
    assert server.bodies[0]["messages"] == messages
    assert text == respond(Request("generate_until", (messages, {})))


def test_repeats_are_drawn_with_seeds_of_their_own(server: FakeEndpoint) -> None:
    loaded, _ = model(server, calls=1)
    again = Request("generate_until", ("Repeat: amber birch cedar", {"do_sample": True, "temperature": 0.8}))
    first = loaded.respond([again, again, SAY, again])
    assert [b["seed"] for b in server.bodies] == [1234, 1235, 1234, 1236]
    assert loaded.respond([again, again, SAY, again]) == first


def test_log_probabilities_are_those_of_the_continuation(server: FakeEndpoint) -> None:
    loaded, _ = model(server)
    whole, tail, first = loaded.respond(
        [
            Request("loglikelihood", ("amber birch", " cedar delta")),
            Request("loglikelihood", ("amber birch cedar", " delta")),
            Request("loglikelihood", ("amber birch", " cedar")),
        ]
    )
    assert whole[0] == pytest.approx(tail[0] + first[0], rel=1e-12)
    assert whole[1] == (tail[1] and first[1])
    spaced = loaded.respond([Request("loglikelihood", ("amber birch ", "cedar delta"))])
    assert spaced == [whole], "a space at the end of the context belongs to the next word"
    (rolling,) = loaded.respond([Request("loglikelihood_rolling", ("amber birch cedar",))])
    rest = loaded.respond([Request("loglikelihood", ("amber", " birch cedar"))])
    assert rolling == pytest.approx(rest[0][0], rel=1e-12)


def test_long_texts_are_read_in_windows(server: FakeEndpoint) -> None:
    loaded, _ = model(server, context=20)
    (value,) = loaded.respond([Request("loglikelihood_rolling", (" ".join(["amber"] * 60),))])
    sent = [b["prompt"] for b in server.bodies]
    assert len(sent) == 6
    assert max(map(len, sent)) <= 61
    assert value < 0


@pytest.mark.parametrize(
    "wrong",
    [
        overloaded(2),
        broken(2, 503),
        garbage(2),
        Misbehaviour(2, drop=True),
        Misbehaviour(2, 200, {}, b'{"choices": []}'),
    ],
)
def test_what_may_pass_is_tried_again(server: FakeEndpoint, wrong: Misbehaviour) -> None:
    loaded, pauses = model(server)
    server.misbehave(wrong)
    assert loaded.respond([SAY]) == [respond(Request("generate_until", (SAY.arguments[0], {})))]
    assert 1 <= len(pauses) <= 2


def test_retry_after_is_obeyed(server: FakeEndpoint) -> None:
    loaded, pauses = model(server)
    server.misbehave(overloaded(1, "17"))
    loaded.respond([SAY])
    assert pauses == [17.0]


def test_a_call_that_hangs_is_given_up_and_tried_again(server: FakeEndpoint) -> None:
    loaded, pauses = model(server, timeout_s=0.3)
    server.misbehave(Misbehaviour(1, hang_s=2.0))
    assert isinstance(loaded.respond([SAY])[0], str)
    assert len(pauses) == 1


def test_what_fails_for_good_is_unanswered_not_wrong(server: FakeEndpoint, tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(f'{{"a": {i}}}\n' for i in range(6)))
    (folder / "infer.py").write_text("def prompt(row):\n    return f\"{row['a']} + 1 =\"\n")
    (folder / "score.py").write_text("def score(row, output):\n    return 1.0\n")
    spec = ModelSpec(server.url, backend="openai", batch_size=1, block=6, options={"attempts": 3})
    suite = Suite("s", (Task("sums", harness="plain"),), folder=str(tmp_path))
    harness = PlainHarness()
    prepared = harness.prepare(suite.tasks[0], suite, spec, None, tmp_path / "p")
    loaded, _ = model(server, calls=1, attempts=3)
    server.misbehave(broken(3, 503), Misbehaviour(1, 400, {}, b'{"error": {"message": "content policy"}}'))
    answers = harness.run(loaded, prepared, staged.read_block(prepared, 0))
    assert [bool(a.problem) for a in answers] == [True, True, False, False, False, False]
    assert answers[0].problem == "HTTP 503: not today (attempt 3 of 3)"
    assert answers[1].problem == "HTTP 400: content policy (attempt 1 of 3)"
    score = harness.score(prepared, answers)
    assert [(n.sample, n.status) for n in score.notes] == [(0, "unanswered"), (1, "unanswered")]
    assert score.metrics[0].value == 1.0
    # The same through infer(model, rows): the rows that got an answer keep it.
    (folder / "infer.py").write_text(
        "def infer(model, rows):\n    return model.generate([str(r['a']) for r in rows])\n"
    )
    harness = PlainHarness()
    prepared = harness.prepare(suite.tasks[0], suite, spec, None, tmp_path / "q")
    server.refuse = "4"
    answers = harness.run(loaded, prepared, staged.read_block(prepared, 0))
    assert [bool(a.problem) for a in answers] == [False, False, False, False, True, False]


def test_endpoints_that_cannot_be_used_are_told_before_a_run(server: FakeEndpoint) -> None:
    backend = OpenAIBackend()
    with pytest.raises(ModelDoesNotLoad, match="serves no model 'gpt', but: fake"):
        backend.load(ModelSpec(server.url, name="gpt"), None, ())
    server.key = "sesame"
    with FakeEndpoint(key="sesame") as locked:
        locked_spec = ModelSpec(locked.url)
        with pytest.raises(ModelDoesNotLoad, match="no such key") as e:
            backend.load(locked_spec, None, ())
        assert "OPENAI_API_KEY" in str(e.value)
        url = locked.url
    with pytest.raises(ModelDoesNotLoad, match="cannot reach"):
        backend.fingerprint(ModelSpec(url))
    with pytest.raises(ModelDoesNotLoad, match="there is no host"):
        backend.fingerprint(ModelSpec("http://no-such-host.invalid/v1"))
    with pytest.raises(UsageError, match="no http address"):
        Endpoint("ftp://x", "m")
    with pytest.raises(UnknownKey, match="attempts"):
        OpenAIOptions.read(ModelSpec(server.url, options={"attemps": 3}))


def test_the_key_is_sent_and_never_shown(server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "sesame"
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    loaded, _ = model(server)
    assert isinstance(loaded.respond([SAY])[0], str)
    assert "sesame" not in repr(loaded.conditions)


def test_the_fingerprint_follows_what_is_served(server: FakeEndpoint) -> None:
    backend = OpenAIBackend()
    first = backend.fingerprint(ModelSpec(server.url))
    assert first == backend.fingerprint(ModelSpec(server.url, name="fake"))
    server.model = "fake-2"
    assert backend.fingerprint(ModelSpec(server.url)) != first


def test_a_chat_endpoint_is_not_asked_for_log_probabilities(server: FakeEndpoint, tmp_path: Path) -> None:
    folder = tmp_path / "yes"
    folder.mkdir()
    (folder / "data.jsonl").write_text('{"q": "amber?"}\n')
    (folder / "infer.py").write_text(
        "def prompt(row):\n    return {'context': row['q'], 'choices': ['yes', 'no']}\n"
    )
    (folder / "score.py").write_text("def score(row, output):\n    return 1.0\n")
    suite = Suite("s", (Task("yes", harness="plain"),), folder=str(tmp_path))
    spec = ModelSpec(server.url, backend="openai", chat_template=True)
    with pytest.raises(EvaluationError, match="asks for loglikelihood, which this model cannot answer"):
        PlainHarness().prepare(suite.tasks[0], suite, spec, None, tmp_path / "p")
    assert not server.calls


def test_connections_are_kept_and_a_closed_one_is_no_failure(server: FakeEndpoint) -> None:
    endpoint = Endpoint(server.url, "fake")
    assert endpoint.complete("amber birch", max_tokens=4)
    server.misbehave(Misbehaviour(1, drop=True))
    assert endpoint.complete("amber birch", max_tokens=4), (
        "the server closed a kept connection: once more, on a new one"
    )
    endpoint.close()
    server.misbehave(Misbehaviour(1, drop=True))
    with pytest.raises(EndpointRefused) as e:
        endpoint.complete("amber birch", max_tokens=4)
    assert e.value.again


# ---------------------------------------------------------------------------------------------- judges


def judge(server: FakeEndpoint, **more: int) -> tuple[Judge, list[float]]:
    pauses: list[float] = []
    return Judge(server.url, "fake", per_minute=1e9, sleep=pauses.append, **more), pauses


def test_a_hostile_judge_is_asked_again_and_then_unscored(server: FakeEndpoint) -> None:
    replies = iter(["It is hard to say.", "Both yes and no.", "", "Thinking...\nVerdict: **No**"])
    server.reply = lambda messages: next(replies)
    asked, _ = judge(server)
    assert asked.verdict("Right?", {"yes": 1.0, "no": 0.0}) == 0.0
    assert [b["temperature"] for b in server.bodies] == [0.0, 0.7, 0.7, 0.7]
    server.reply = lambda messages: "What a lovely day."
    with pytest.raises(Unscored, match=r"names none of yes, no: 'What a lovely day.' \(attempt 6 of 6\)"):
        asked.verdict("Right?", {"yes": 1.0, "no": 0.0})
    server.reply = lambda messages: None
    with pytest.raises(Unscored, match="an empty message"):
        asked.verdict("Right?", {"yes": 1.0, "no": 0.0})


def test_a_judge_that_is_full_or_gone_is_unscored(server: FakeEndpoint) -> None:
    server.reply = lambda messages: "yes"
    asked, pauses = judge(server, attempts=3)
    server.misbehave(overloaded(2, "9"))
    assert asked.verdict("Right?", {"yes": 1.0, "no": 0.0}) == 1.0
    assert pauses == [9.0, 9.0]
    server.misbehave(overloaded(3, "9"))
    with pytest.raises(Unscored, match=r"HTTP 429: too many requests \(attempt 3 of 3\)"):
        asked.verdict("Right?", {"yes": 1.0, "no": 0.0})
    server.misbehave(
        Misbehaviour(1, 429, {}, b'{"error": {"message": "no credit", "code": "insufficient_quota"}}')
    )
    with pytest.raises(Unscored, match=r"no credit \(attempt 1 of 3\)"):
        asked.verdict("Right?", {"yes": 1.0, "no": 0.0})


def test_verdicts_are_read_not_guessed() -> None:
    choices = ["A", "B", "tie"]
    assert read_choice("I compared both.\n[[B]]", choices) == "B"
    assert read_choice("A is long, B is right. Verdict: b", choices) == "B"
    assert read_choice("It is a tie.", ["win", "tie"]) == "tie"
    assert read_choice("yes", ["yes", "no"]) == "yes"
    for reply in ("A or B?", "", "Neither.", "I know nothing"):
        with pytest.raises(ValueError, match="names"):
            read_choice(reply, choices)
    with pytest.raises(ValueError, match="names none"):
        read_choice("I cannot know", ["yes", "no"])
    assert read_grade("Good work. [[7]]", 1, 10) == 7
    assert read_grade("I give it 8/10", 1, 10) == 8
    assert read_grade("First 3 points, then 2: Score: 4.5", 0, 5) == 4.5
    with pytest.raises(ValueError, match="not between"):
        read_grade("[[11]]", 1, 10)
    with pytest.raises(ValueError, match="no number"):
        read_grade("excellent", 1, 10)


def test_calls_are_held_to_a_rate_over_all_threads() -> None:
    now = [0.0]
    waits: list[float] = []
    rate = Rate(120.0, now=lambda: now[0], sleep=waits.append)
    for _ in range(4):
        rate.wait()
    assert waits == [0.5, 1.0, 1.5]
    now[0] = 60.0
    rate.wait()
    assert len(waits) == 3
    threads = [threading.Thread(target=rate.wait) for _ in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(waits[3:]) == [0.5, 1.0, 1.5, 2.0, 2.5]
