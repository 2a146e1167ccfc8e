"""Our transformers backend against lm_eval's own `hf` model: the same bits on the same batches."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (requirements/all.txt)")
pytest.importorskip("lm_eval", reason="lm-eval is not installed (make install-eval)")

from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_tasks import WORDS
from unbroken.errors import EvaluationError, ModelDoesNotLoad, OutOfMemory
from unbroken.evaluate.contracts import Json, ModelSpec, Request
from unbroken.evaluate.harness.lm_eval_models import LmEvalBackend
from unbroken.evaluate.harness.requests import generation_settings, rolling_windows
from unbroken.evaluate.harness.transformers import TransformersBackend
from unbroken.evaluate.harness.transformers_model import TransformersModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def both(folder: Path, batch: int, **more: Any) -> tuple[Any, TransformersModel]:
    spec = ModelSpec(str(folder), batch_size=batch, **more)
    theirs = LmEvalBackend().load(spec, folder, ())
    return theirs, TransformersBackend().load(spec, folder, ())


def text(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def pairs(count: int = 40) -> list[Request]:
    """Contexts of all lengths, some shared, some empty, some longer than the model, some ending in a space."""
    rng = random.Random(5)
    out = []
    for i in range(count):
        context = "" if i % 9 == 0 else text(rng, 1, 30) if i % 7 else text(rng, 200, 260)
        context += " " if i % 5 == 0 and context else ""
        for choice in rng.sample(["a", " b", " amber", " amber birch cedar", text(rng, 1, 5)], 3):
            out.append(Request("loglikelihood", (context, choice)))
    return out


def generations(count: int = 12) -> list[Request]:
    rng = random.Random(6)
    settings: list[Json] = [
        {"until": ["\n", " river"], "max_gen_toks": 12, "do_sample": False},
        {"until": "amber", "max_gen_toks": 9},
        {"until": ["</s>"], "max_new_tokens": 5, "temperature": 0.0, "do_sample": False},
    ]
    return [Request("generate_until", (text(rng, 1, 60), settings[i % 3])) for i in range(count)]


def rolling(count: int = 9) -> list[Request]:
    rng = random.Random(7)
    return [Request("loglikelihood_rolling", (text(rng, 1, 400 if i % 3 else 10),)) for i in range(count)]


def bits(outputs: Sequence[Json]) -> list[Json]:
    return json.loads(json.dumps(outputs))  # repr of a float is exact


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("make", [pairs, generations, rolling])
def test_the_same_bits_as_the_harness_own_model(folder: Path, batch: int, make: Any) -> None:
    theirs, ours = both(folder, batch)
    assert bits(ours.respond(make())) == bits(theirs.respond(make()))


def test_the_same_bits_in_bfloat16(folder: Path) -> None:
    theirs, ours = both(folder, 4, dtype="bfloat16")
    assert ours.conditions.dtype == theirs.conditions.dtype == "bfloat16"
    assert bits(ours.respond(pairs(12))) == bits(theirs.respond(pairs(12)))


def test_with_one_sequence_a_batch_the_split_changes_nothing(folder: Path) -> None:
    _, ours = both(folder, 1)
    asked = [*pairs(12), *generations(6), *rolling(4)]
    whole = ours.respond(asked)
    for size in (1, 5, 7):
        parts = [x for at in range(0, len(asked), size) for x in ours.respond(asked[at : at + size])]
        assert bits(parts) == bits(whole)


def test_sampling_draws_the_same_for_the_same_prompts(folder: Path) -> None:
    _, ours = both(folder, 4)
    settings = {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 1.0}
    asked = [Request("generate_until", (w, settings)) for w in WORDS[:4]]
    first = ours.respond(asked)
    ours.respond(generations())
    assert ours.respond(asked) == first
    assert len(set(map(str, ours.respond(asked * 4)))) > 4, "repeats of a question are drawn again"
    assert len(set(map(str, ours.respond(asked[:1] * 12)))) > 6, "also where they fill several batches alone"


def test_conditions_and_halving(folder: Path) -> None:
    _, ours = both(folder, 4)
    assert (ours.conditions.device, ours.conditions.dtype, ours.conditions.batch_size) == (
        "cpu",
        "float32",
        4,
    )
    assert ours.conditions.engine.startswith("transformers ")
    assert ours.halve()
    assert ours.halve()
    assert not ours.halve()
    assert ours.conditions.batch_size == 1
    ours.restore()
    assert ours.conditions.batch_size == 4


def test_out_of_memory_is_told_and_leaves_the_model_usable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    _, ours = both(folder, 4)
    asked = pairs(4)
    whole = ours.respond(asked)
    real = ours.model

    class Full:
        dtype = real.dtype

        def __call__(self, tokens: Any) -> Any:
            if len(tokens) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real(tokens)

    ours.model = Full()
    with pytest.raises(OutOfMemory, match="a batch of 4 does not fit"):
        ours.respond(asked)
    assert ours.halve()
    assert len(ours.respond(asked)) == len(whole)


def test_models_that_do_not_load_say_why(folder: Path, tmp_path: Path) -> None:
    backend = TransformersBackend()

    def refused(place: Path, says: str, **more: Any) -> None:
        with pytest.raises(ModelDoesNotLoad, match=says) as e:
            backend.load(ModelSpec(str(place), **more), place, ())
        assert e.value.hint

    refused(tmp_path, "no config.json")
    refused(folder, "no dtype 'float12'", dtype="float12")
    torn = tmp_path / "torn"
    shutil.copytree(folder, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    refused(torn, "does not load")
    strange = tmp_path / "strange"
    shutil.copytree(folder, strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    refused(strange, "no-such-model")
    (strange / "config.json").write_text("{")
    refused(strange, "does not load")
    spec = ModelSpec(str(folder))
    import torch

    if torch.cuda.device_count() < 8:
        with pytest.raises(ModelDoesNotLoad, match="torch sees"):
            backend.load(spec, folder, range(8))


@pytest.mark.parametrize("make", [TransformersBackend, LmEvalBackend])
def test_weights_that_the_files_lack_are_never_random(
    folder: Path, tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedModel

    def renamed(name: str, **change: str) -> Path:
        place = tmp_path / name
        shutil.copytree(folder, place)
        there = load_file(place / "model.safetensors")
        save_file({change.get(k, k) or f"module.{k}": v for k, v in there.items()}, place / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
        return place

    before = PreTrainedModel.__dict__["from_pretrained"]
    names = load_file(folder / "model.safetensors")
    ddp = renamed("ddp", **dict.fromkeys(names, ""))
    with pytest.raises(ModelDoesNotLoad, match=r"lack \d+ tensors \(.*that it does not know") as e:
        make().load(ModelSpec(str(ddp)), ddp, ())
    assert "module." in str(e.value) and e.value.hint
    norm = next(k for k in sorted(names) if "norm" in k)
    one = renamed("one", **{norm: "other"})
    with pytest.raises(ModelDoesNotLoad, match=f"lack 1 tensor .{norm}"):
        make().load(ModelSpec(str(one)), one, ())
    assert PreTrainedModel.__dict__["from_pretrained"] is before
    capsys.readouterr()
    more = renamed("more")
    save_file({**names, "spare": names[norm].clone()}, more / "model.safetensors", metadata={"format": "pt"})
    make().load(ModelSpec(str(more)), more, ())
    assert "1 tensor (spare) that the model does not use" in capsys.readouterr().err
    if make is TransformersBackend:
        make().load(ModelSpec(str(one), options={"allow_missing": True}), one, ())


def test_requests_that_it_cannot_answer(folder: Path) -> None:
    _, ours = both(folder, 4)
    with pytest.raises(EvaluationError, match="'plain'"):
        ours.respond([Request("plain", ({"a": 1},))])
    long = Request("generate_until", ("amber", {"max_gen_toks": 4000}))
    (said,) = ours.respond([long])
    assert "holds 256 in all" in said["problem"], "its own sample's, not its neighbours'"


def test_rolling_windows_predict_every_token_once() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for n in (0, 1, 4, 5, 6, 13, 40):
        tokens = list(range(100, 100 + n))
        theirs = [make_disjoint_window(w) for w in get_rolling_token_windows(tokens, 1, 5, 1)]
        ours = list(rolling_windows(tokens, 1, 5))
        assert [(list(a), list(b)) for a, b in ours] == [(list(a), list(b)) for a, b in theirs]
        assert [t for _, c in ours for t in c] == tokens


def test_generation_settings() -> None:
    from lm_eval.models.utils import normalize_gen_kwargs

    for given in (
        {}, {"until": "x"}, {"temperature": 0.7}, {"do_sample": True, "temperature": 0.3, "max_tokens": 4},
        {"do_sample": False}, {"max_new_tokens": 3, "max_tokens": 9, "top_p": 0.5},
    ):  # fmt: skip
        theirs = dict(normalize_gen_kwargs(dict(given)))
        theirs.pop("temperature", None) if not theirs["do_sample"] else None
        assert generation_settings(given) == theirs
    assert generation_settings({"do_sample": False, "temperature": 0.9}) == {
        "until": [], "max_gen_toks": 256, "do_sample": False,
    }  # fmt: skip


def test_chat_templates_are_those_of_the_harness(folder: Path) -> None:
    from unbroken.evaluate.harness.chat import chat_of

    theirs, _ = both(folder, 1)
    render = chat_of(replace(ModelSpec(str(folder)), chat_template=True), folder)
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "amber?"}]
    assert render(history, True) == theirs._lm.apply_chat_template(history)
    prefilled = [*history, {"role": "assistant", "content": "It is"}]
    assert render(prefilled, False) == theirs._lm.apply_chat_template(prefilled, add_generation_prompt=False)


@pytest.mark.parametrize(("batch", "block"), [pytest.param(1, 4, marks=pytest.mark.soak), (8, 10_000)])
def test_scores_are_those_of_lm_eval_with_its_own_model(
    folder: Path, tmp_path: Path, batch: int, block: int
) -> None:
    """With one sequence a batch for any split; with larger batches where the task is one block."""
    import lm_eval
    import lm_eval.tasks

    from tests.evaluate.test_lm_eval import answer, same
    from tests.support.tiny_tasks import NAMES, write_tiny_tasks
    from unbroken.evaluate.contracts import Suite, Task
    from unbroken.evaluate.harness.lm_eval import LmEvalHarness, one_process

    write_tiny_tasks(tmp_path / "tasks", documents=9)
    manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    options = {"include": str(tmp_path / "tasks"), "bootstrap_iters": 20}
    spec = ModelSpec(str(folder), batch_size=batch, block=block)
    harness = LmEvalHarness()
    for name in NAMES:
        if name == "tiny_vote":
            continue  # sampled: lm_eval draws from one stream over the whole run, we from one per batch
        arguments = {"pretrained": str(folder), "dtype": "auto"}
        with one_process():
            alone = lm_eval.simple_evaluate(
                "hf",
                arguments,
                tasks=[name],
                task_manager=manager,
                bootstrap_iters=20,
                batch_size=batch,
                device="cpu",
            )
        suite = Suite("s", (Task(name, options=options),))
        for task in harness.expand(suite.tasks[0], suite):
            prepared = harness.prepare(task, suite, spec, folder, tmp_path / task.name)
            for shards in (1, 3):
                answers = answer(harness, prepared, shards, spec, TransformersBackend())
                same(harness.score(prepared, answers), alone["results"][task.harness_name])


def test_importing_rests_the_collector_and_leaves_scikit_learn_as_it_was() -> None:
    code = """
import gc, sys, types
from unbroken.evaluate.harness.transformers import TransformersBackend
seen = []
class Finder:
    def find_spec(self, name, *_):
        if name == "transformers":
            seen.append((gc.isenabled(), "sklearn" in sys.modules and sys.modules["sklearn"] is None))
sys.meta_path.insert(0, Finder())
TransformersBackend().warm()
assert seen[0] == (False, True), seen
assert gc.isenabled() and "sklearn" not in sys.modules
gc.disable()
sys.modules["sklearn"] = there = types.ModuleType("sklearn")
TransformersBackend().warm()
assert not gc.isenabled() and sys.modules["sklearn"] is there
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_of_other_lengths_and_stops_share_a_batch_and_keep_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each of them gets alone, in a quarter of the calls; a harness that defines its batches keeps them apart."""
    model = TransformersBackend().load(ModelSpec(str(folder), batch_size=8, dtype="float32"), folder, ())
    asked = [
        Request("generate_until", (f"the word {i} " * (1 + i % 3), {"until": [s], "max_gen_toks": n}))
        for i, (n, s) in enumerate((n, s) for n in (1, 3, 7, 12) for s in ("e", "."))
    ]
    calls: list[int] = []
    generate = model.model.generate

    def counted(**more: object) -> object:
        calls.append(len(more["input_ids"]))  # type: ignore[arg-type]
        return generate(**more)

    monkeypatch.setattr(model.model, "generate", counted)
    alone = [model.respond([r])[0] for r in asked]
    assert calls == [1] * 8
    calls.clear()
    assert model.respond(asked) == alone and calls == [1] * 8, "equal settings only, as lm_eval has it"
    calls.clear()
    model.mix_settings = True
    assert model.respond(asked) == alone and calls == [8]


def test_an_automatic_batch_is_found_again_step_by_step(folder: Path) -> None:
    spec = ModelSpec(str(folder), batch_size=8, batch_auto=True, dtype="float32")
    model = TransformersBackend().load(spec, folder, ())
    sizes = [model.conditions.batch_size]
    for step in (model.halve, model.halve, model.restore, model.restore, model.restore):
        step()
        sizes.append(model.conditions.batch_size)
    assert sizes == [8, 4, 2, 4, 8, 8]


def test_an_answer_that_cannot_fit_is_no_reason_for_others_to_go_without(folder: Path) -> None:
    spec = ModelSpec(str(folder), batch_size=32, dtype="float32")
    model = TransformersBackend().load(spec, folder, ())
    model.mix_settings = True

    def asked(n: int, prompt: str = "amber birch ") -> Request:
        return Request("generate_until", (prompt, {"until": [], "max_gen_toks": n, "do_sample": False}))

    fit = [asked(n) for n in (1, 4, 200, 9)]
    out = model.respond([*fit[:2], asked(256), asked(9000), *fit[2:]])
    assert all(isinstance(o, str) for o in (*out[:2], *out[4:]))
    assert [set(o) for o in out[2:4]] == [{"problem"}, {"problem"}] and "9000 tokens" in out[3]["problem"]
    alone = [model.respond([r])[0] for r in fit]
    assert [*out[:2], *out[4:]] == alone


@pytest.mark.parametrize("seed", range(20))
def test_in_a_mixed_batch_no_prompt_is_cut_for_anothers_answer(seed: int) -> None:
    rng = random.Random(seed)
    room, most = 100, rng.randint(1, 8)
    limits = [rng.randint(1, 99) for _ in range(30)]
    lengths = [rng.randint(1, room - n) for n in limits]
    order = sorted(range(30), key=lambda i: -limits[i])
    like = SimpleNamespace(_batch=most, max_length=room)
    chunks = list(TransformersModel._chunks(like, order, lengths, limits))  # type: ignore[arg-type]
    assert [i for c in chunks for i in c] == order
    for c in chunks:
        assert 0 < len(c) <= most
        assert max(lengths[i] for i in c) + max(limits[i] for i in c) <= room
