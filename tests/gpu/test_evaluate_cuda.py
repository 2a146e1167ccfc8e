"""The transformers backend on a GPU: memory that really runs out, and answers that no split changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("transformers")

from tests.support.tiny_model import write_tiny_model  # noqa: E402
from tests.support.tiny_tasks import WORDS  # noqa: E402
from unbroken.errors import OutOfMemory  # noqa: E402
from unbroken.evaluate.contracts import ModelSpec, Request  # noqa: E402
from unbroken.evaluate.harness.transformers import TransformersBackend  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 60 million parameters in bfloat16."""
    place = tmp_path_factory.mktemp("model")
    return write_tiny_model(place, hidden=1024, layers=6, context=4096, dtype="bfloat16")


def text(i: int, words: int) -> str:
    return " ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(words))


def asked() -> list[Request]:
    settings = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    out = [
        Request("loglikelihood", (text(i, 3 + 9 * (i % 11)), " " + text(i + 1, 1 + i % 3))) for i in range(60)
    ]
    out += [Request("generate_until", (text(i, 4 + 5 * i), settings)) for i in range(10)]
    return out + [Request("loglikelihood_rolling", (text(i, 50 + 100 * i),)) for i in range(6)]


def bits(outputs: Any) -> Any:
    return json.loads(json.dumps(outputs))


def test_it_lies_on_the_gpu_and_says_so(folder: Path) -> None:
    before = torch.cuda.memory_allocated()
    model = TransformersBackend().load(ModelSpec(str(folder)), folder, (0,))
    assert model.conditions.device == torch.cuda.get_device_name(0)
    assert model.conditions.dtype == "bfloat16"
    assert torch.cuda.memory_allocated() - before > 2 * 40_000_000
    model.close()
    assert torch.cuda.memory_allocated() - before < 1_000_000


def test_with_one_sequence_a_batch_no_split_changes_a_bit(folder: Path) -> None:
    model = TransformersBackend().load(ModelSpec(str(folder), batch_size=1), folder, (0,))
    requests = asked()
    whole = model.respond(requests)
    for size in (1, 7, 32):
        parts = [x for at in range(0, len(requests), size) for x in model.respond(requests[at : at + size])]
        assert bits(parts) == bits(whole)


def test_a_block_answered_again_has_the_same_bits(folder: Path) -> None:
    for batch in (1, 8):
        model = TransformersBackend().load(ModelSpec(str(folder), batch_size=batch), folder, (0,))
        assert bits(model.respond(asked())) == bits(model.respond(asked()))


GENERATES = """
import json, sys
from pathlib import Path
from unbroken.evaluate.contracts import ModelSpec, Request
from unbroken.evaluate.harness.transformers import TransformersBackend
folder = Path(sys.argv[1])
model = TransformersBackend().load(ModelSpec(str(folder), batch_size=16), folder, (0,))
print(json.dumps(model.respond([Request(*r) for r in json.loads(sys.stdin.read())])))
"""


def test_generated_answers_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Prompts of other lengths, so that there is padding; forty-eight tokens, in which a last bit finds its tie."""
    folder = write_tiny_model(tmp_path, hidden=2048, layers=16, context=4096, dtype="bfloat16")
    settings = {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
    asked = json.dumps([("generate_until", (text(i, 4 + 3 * i), settings)) for i in range(48)])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    processes = [
        subprocess.Popen([sys.executable, "-c", GENERATES, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         text=True, env=env)
        for _ in range(3)
    ]  # fmt: skip
    answers = [p.communicate(asked, timeout=300)[0].splitlines()[-1] for p in processes]
    assert len(set(answers)) == 1
    assert len(set(json.loads(answers[0]))) > 1


def test_memory_that_runs_out_is_told_and_half_the_batch_fits(folder: Path) -> None:
    model = TransformersBackend().load(ModelSpec(str(folder), batch_size=64), folder, (0,))
    requests = [Request("loglikelihood", (f"{i} {text(i, 1500)}", " amber")) for i in range(64)]
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (held + (128 << 20)) / total))
    try:
        with pytest.raises(OutOfMemory, match="a batch of 64 does not fit"):
            model.respond(requests)
        halvings = 0
        while True:
            assert model.halve()
            halvings += 1
            try:
                answers = model.respond(requests)
                break
            except OutOfMemory:
                continue
        assert halvings >= 1
        assert len(answers) == 64
        assert model.conditions.batch_size == 64 >> halvings
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    model.restore()
    assert len(model.respond(requests)) == 64, "usable again with all its memory"


@pytest.mark.parametrize("batch", [1, 8])
def test_the_same_bits_as_the_harness_own_model(folder: Path, batch: int) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed here")
    from unbroken.evaluate.harness.lm_eval_models import LmEvalBackend

    spec = ModelSpec(str(folder), batch_size=batch)
    theirs = LmEvalBackend().load(spec, folder, (0,))
    ours = TransformersBackend().load(spec, folder, (0,))
    assert bits(ours.respond(asked())) == bits(theirs.respond(asked()))
