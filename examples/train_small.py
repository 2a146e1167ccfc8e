"""From nothing to an aligned model, on two cores: what `unbroken` does for a training, end to end.

    python examples/train_small.py OUT [--steps 120]          (needs `make install-eval`; three minutes, half of it training)

1. A byte-level Llama of 2.7 M parameters learns the source of Python's own library, on two virtual nodes that share its parameters,
   gradients and optimizer state, under `unbroken run`. In the middle one rank is killed: the run goes on by itself.
2. `unbroken eval watch` evaluates every checkpoint that is left, on two tasks of examples/evaluate_own_tasks.
3. The model is taught to answer sums (supervised), then to prefer right answers to wrong ones (preferences).
4. It is exported, and transformers generates from it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from unbroken.progress import RunDir
from unbroken.testing.faults import RunFaults

HERE = Path(__file__).parent
MODEL = ["--dim", "192", "--layers", "6", "--heads", "6", "--kv-heads", "6", "--hidden", "512"]
ROW, SHORT_ROW = ["--seq", "128"], ["--seq", "32"]


def main() -> int:
    """Goes through all four; 0."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, help="a new folder")
    p.add_argument(
        "--steps",
        type=int,
        default=120,
        help="steps of the training; each alignment takes two fifths of them",
    )
    p.add_argument("--size", type=str.split, default=MODEL, help="options of the model, as one text")
    args = p.parse_args()
    args.out.mkdir(parents=True)
    with told("trained over a killed rank"):
        pretrain(args.out / "run", [*args.size, *ROW], args.steps)
    suite = HERE / "evaluate_own_tasks" / "suite.toml"
    with told("evaluated each checkpoint"):
        unbroken("eval", "watch", str(args.out / "run"), "--suite", str(suite), "--tasks", "sums,likely", "--workers", "1",
                 "--out", str(args.out / "scores"), "--once")  # fmt: skip
    with told("aligned twice"):
        align(args.out, [*args.size, *SHORT_ROW], max(2, args.steps * 2 // 5))
    with told("exported, and generated from"):
        unbroken("checkpoint", "export", str(args.out / "dpo"), "--to", "huggingface", "--out", str(args.out / "model"))  # fmt: skip
        generate(args.out / "model")
    return 0


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Says how long a part took."""
    began = time.monotonic()
    yield
    print(f"--- {what}: {time.monotonic() - began:.0f} s", flush=True)


def pretrain(run: Path, model: list[str], steps: int) -> None:
    """A run over a killed rank."""
    plan = ["--parameters", "2", "--recompute", "selective"]
    command = ["run", "--run-dir", str(run), "--nodes", "2", "--nproc", "1", "--", "-m", "unbroken.train", *model, *plan,
               "--steps", str(steps), "--global-batch", "16", "--warmup", "10", "--log-every", "10",
               "--persist-every", str(max(1, steps // 2)), "--keep", "3", "--device", "cpu"]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "unbroken", *command])
    threading.Thread(target=kill_a_rank, args=(run, steps // 2, process), daemon=True).start()
    if process.wait():
        raise SystemExit(f"the run ended with {process.returncode}")


def kill_a_rank(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until the training is at a step, then ends rank 1 with -9."""
    while not (run / "run.toml").exists():
        if process.poll() is not None:
            return
        threading.Event().wait(0.1)
    faults = RunFaults(RunDir(run))
    faults.wait_for_step(step, within=1800, alive=lambda: process.poll() is None)
    faults.kill_rank(1)


def align(out: Path, model: list[str], steps: int) -> None:
    """Supervised, then by preferences, on sums; each begins with the weights of the one before."""
    rng = random.Random(0)
    sums = [(a, b) for a in range(10) for b in range(10)]
    chat = [{"messages": [{"role": "user", "content": f"{a} + {b} ="}, {"role": "assistant", "content": str(a + b)}]} for a, b in sums]  # fmt: skip
    pairs = [{"prompt": f"{a} + {b} =", "chosen": str(a + b), "rejected": str(a + b + rng.randint(1, 5))} for a, b in sums]  # fmt: skip
    for name, rows in (("chat", chat), ("pairs", pairs)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    common = [*model, "--steps", str(steps), "--global-batch", "16", "--log-every", "10", "--persist-every", str(steps), "--device", "cpu", "--warmup", "5"]  # fmt: skip
    unbroken("train", *common, "--task", "sft", "--data", str(out / "chat.jsonl"), "--checkpoints", str(out / "sft"),
             "--weights-from", str(out / "run" / "checkpoints"), "--lr", "1e-3")  # fmt: skip
    unbroken("train", *common, "--task", "dpo", "--data", str(out / "pairs.jsonl"), "--checkpoints", str(out / "dpo"),
             "--weights-from", str(out / "sft"), "--lr", "1e-4", "--min-lr", "1e-5")  # fmt: skip


def generate(folder: Path) -> None:
    """What the exported model says, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from unbroken.train.corpus.chat import render

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for question in ("2 + 3 =", "7 + 8 ="):
        prompt = tokenizer(render([{"role": "user", "content": question}]).decode(), return_tensors="pt")
        said = model.generate(prompt["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0)
        print(question, repr(tokenizer.decode(said[0][prompt["input_ids"].shape[1] :])))


def unbroken(*argv: str) -> None:
    """One command; ends with its exit code if that is not 0."""
    done = subprocess.run([sys.executable, "-m", "unbroken", *argv], check=False)
    if done.returncode:
        raise SystemExit(f"unbroken {argv[0]} ended with {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
