"""SGLang as a backend, with a stand-in for its engine (`sglang.Engine` of 0.5.23: `async_generate` with stream, `tokenizer_manager`, `loop`,
`shutdown`): SGLang itself runs on GPUs only, and has not been run with this."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.evaluate.test_vllm import Letters
from unbroken.errors import EvaluationError, ModelDoesNotLoad
from unbroken.evaluate.contracts import FedModel, Json, ModelSpec, Request
from unbroken.evaluate.harness import sglang as backend
from unbroken.evaluate.harness import vllm
from unbroken.evaluate.harness.sglang import AskedOfEngine, SglangBackend, SglangModel


class Engine:
    """The log-probability of token t is -t / 100; the likeliest of a prompt is 'z'; a text is 'abc>later', a token at a time."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.loop = asyncio.new_event_loop()
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.shut = False
        self.tokenizer_manager = SimpleNamespace(
            model_config=SimpleNamespace(dtype="torch.bfloat16", context_len=40),
            abort_request=lambda rid: self.aborted.append(rid),
        )

    def shutdown(self) -> None:
        self.shut = True

    async def async_generate(self, **asked: Any) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(asked)
        if asked["sampling_params"]["max_new_tokens"] == 13:
            raise RuntimeError("out of pages")
        return self._parts(asked)

    async def _parts(self, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        tokens, limit = asked["input_ids"], asked["sampling_params"]["max_new_tokens"]
        meta: dict[str, Any] = {"id": asked["rid"], "finish_reason": {"type": "length"}}
        if asked["return_logprob"]:
            start = asked["logprob_start_len"]
            meta["input_token_logprobs"] = [
                (None if i == start else -t / 100, t, None) for i, t in enumerate(tokens)
            ][start:]
            meta["input_top_logprobs"] = [
                None if i == start else [(0.0, 122, None)] for i in range(len(tokens))
            ][start:]
            ids = asked["token_ids_logprob"]
            meta["output_token_ids_logprobs"] = [[(-t / 100, t, None) for t in ids]] if ids else None
            meta["output_top_logprobs"] = [[(-0.97, 97, None)]]
        if limit == 39:  # it never ends
            for n in range(1, 1000):
                await asyncio.sleep(0.005)
                yield {"text": "x" * n, "output_ids": [120] * n, "meta_info": {**meta, "finish_reason": None}}
        yield {"text": "ab", "output_ids": [97, 98], "meta_info": {**meta, "finish_reason": None}}
        yield {"text": "abc>later", "output_ids": [97, 98, 99], "meta_info": meta}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    made: list[Engine] = []

    def start(**settings: Any) -> Engine:
        made.append(Engine(**settings))
        return made[-1]

    monkeypatch.setattr(backend, "_sglang", lambda: SimpleNamespace(__version__="0", Engine=start))
    monkeypatch.setattr(vllm, "_tokenizer", lambda spec, place: Letters())
    return made


def model(**options: Json) -> SglangModel:
    return SglangModel(ModelSpec("m", "sglang", exact=False, options=options), "m", (0, 1))


def text(prompt: str, **settings: Json) -> Request:
    return Request("generate_until", (prompt, {"until": [], "max_gen_toks": 8, **settings}))


def test_its_engine_gets_the_folder_the_gpus_and_what_was_said(engine: list[Engine]) -> None:
    found = model(model_args={"mem_fraction_static": 0.7})
    assert isinstance(found, FedModel)
    assert (
        engine[0].settings | {"model_path": "m", "tp_size": 2, "mem_fraction_static": 0.7}
        == engine[0].settings
    )
    assert found.conditions.engine == "sglang 0" and found.conditions.dtype == "bfloat16"
    found.close()
    assert engine[0].shut


def test_likelihoods_are_sums_over_the_continuation(engine: list[Engine]) -> None:
    found = model().respond([
        Request("loglikelihood", ("ab", "cd")), Request("loglikelihood", ("ab", "zz")), Request("loglikelihood", ("q", "a")),
        Request("loglikelihood", ("q", "b")), Request("loglikelihood_rolling", ("hi",)),
    ])  # fmt: skip
    assert found[0] == [pytest.approx(-(99 + 100) / 100), False]
    assert found[1] == [pytest.approx(-2 * 1.22), True]
    assert found[2] == [pytest.approx(-0.97), True] and found[3] == [pytest.approx(-0.98), False]
    assert found[4] == pytest.approx(-(1 + 104 + 105) / 100)  # its first token is predicted too
    whole = next(a for a in engine[0].asked if len(a["input_ids"]) == 5)
    # Behind the first token before the continuation: what comes earlier may be read from the cache.
    assert whole["logprob_start_len"] == 2 and whole["top_logprobs_num"] == 1
    choices = [a for a in engine[0].asked if a["token_ids_logprob"]]
    assert len(choices) == 1 and choices[0]["token_ids_logprob"] == [97, 98]


def test_texts_end_at_their_stop_and_settings_go_through(engine: list[Engine]) -> None:
    own = model()
    assert own.respond([text("p", until=["c"]), text("p", temperature=0.5, top_p=0.9)]) == ["ab", "abc"]
    greedy, drawn = (a["sampling_params"] for a in engine[0].asked)
    assert greedy["temperature"] == 0.0 and greedy["stop"] == ["c", ">"]
    assert drawn["temperature"] == 0.5 and drawn["top_p"] == 0.9 and "sampling_seed" in drawn
    problem = own.respond([text("p", beams=3)])[0]
    assert isinstance(problem, dict) and "beams" in str(problem["problem"])
    assert own.tokens_made == 6


def test_a_text_ends_with_its_time(engine: list[Engine]) -> None:
    own = model(sample_seconds=0.05)
    cut = own.respond([text("p", max_gen_toks=39)])[0]
    assert (
        isinstance(cut, dict) and set(str(cut["text"])) == {"x"} and "0.05 s were over" in str(cut["partial"])
    )
    assert engine[0].aborted == [engine[0].asked[0]["rid"]]
    assert own.respond([text("p")]) == ["abc"]


def test_what_the_engine_raises_is_reported(engine: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvaluationError, match="out of pages"):
        model().respond([text("p", max_gen_toks=13)])
    monkeypatch.setattr(
        backend, "_sglang", lambda: SimpleNamespace(__version__="0", Engine=lambda **s: 1 / 0)
    )
    with pytest.raises(ModelDoesNotLoad, match="ZeroDivisionError"):
        model()


def test_without_sglang_it_says_so() -> None:
    if backend.importlib.util.find_spec("sglang") is None:
        with pytest.raises(ModelDoesNotLoad, match="not installed"):
            SglangBackend().load(ModelSpec("m", "sglang"), None, (0,))


SOURCES = importlib.util.find_spec("sglang")


@pytest.mark.skipif(SOURCES is None, reason="SGLang is not installed (pip install --no-deps sglang suffices)")
def test_the_installed_version_has_all_that_is_called() -> None:
    """Its sources are read, not imported: importing it needs a GPU's libraries. The names are those of `sglang.Engine`'s documentation."""
    assert SOURCES is not None and SOURCES.origin is not None
    srt = Path(SOURCES.origin).parent / "srt"

    def classes(file: str) -> dict[str, ast.ClassDef]:
        return {
            c.name: c for c in ast.walk(ast.parse((srt / file).read_text())) if isinstance(c, ast.ClassDef)
        }

    def fields(c: ast.ClassDef) -> set[str]:
        return {
            a.target.id for a in c.body if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)
        }

    def method(c: ast.ClassDef, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
        return next(
            f for f in c.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) and f.name == name
        )

    def parameters(f: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
        return {a.arg for a in (*f.args.args, *f.args.kwonlyargs)}

    engine = classes("entrypoints/engine.py")["Engine"]
    asked = {"input_ids", "sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"}  # fmt: skip
    assert asked <= parameters(method(engine, "async_generate")) and method(engine, "shutdown")
    own = {a.attr for a in ast.walk(engine) if isinstance(a, ast.Attribute) and isinstance(a.value, ast.Name) and a.value.id == "self"}  # fmt: skip
    assert {"loop", "tokenizer_manager"} <= own
    manager = srt / "managers/tokenizer_manager.py"
    assert "rid" in parameters(method(classes("managers/tokenizer_manager.py")["TokenizerManager"], "abort_request"))  # fmt: skip
    told = {"input_token_logprobs", "input_top_logprobs", "output_token_ids_logprobs", "output_top_logprobs", "finish_reason", "output_ids"}  # fmt: skip
    assert all(f'"{key}"' in manager.read_text() for key in told)
    settings = AskedOfEngine(seed=1, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1).sampling()  # fmt: skip
    assert set(settings) <= fields(classes("sampling/sampling_params.py")["SamplingParams"])
    places = ("server_args.py", *(str(p.relative_to(srt)) for p in (srt / "arg_groups/fields").glob("*.py")))
    known = {f for p in places for c in classes(p).values() for f in fields(c)}
    assert {"model_path", "tokenizer_path", "dtype", "context_length", "tp_size", "log_level", "random_seed", "trust_remote_code",
            "mem_fraction_static"} <= known  # fmt: skip
