"""What the hooks cost a training on one GPU: a save of a 1 B model through each, and the steps between saves.

    python benchmarks/hooks_gpu.py --out hooks-gpu.json     # five minutes on an H200, 20 s a framework of them for memory
    python benchmarks/hooks_gpu.py --model tiny --device cpu --pairs 3 --saves 2     # the same on a CPU, for the script itself

Each framework has a process of its own and in it two trainings of the same model, each in a thread: one is the framework's alone,
one has our hook. Where a batch is fetched there is a gate, and one of them passes it at a time, so that their windows of steps
alternate. *Cost*: the time of a window with the hook to that of the window beside it without, as pairs; nothing is saved in them.
*Excess* of a save: from the gate before the step at whose end it is saved to the gate at which it is whole in the host's memory,
less as many undisturbed steps (the median of the windows right before and after). Each step is waited for, as reading a loss does.
A copy to the host runs beside the next step's forward and backward passes, and that step's update waits for it: with
`--accumulate 1` steps are shorter than the copy of a 1 B model (0.21 s on an H200), and most of it is seen.
The first save of a training is told apart: its buffers may still be registered with the device then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics as st
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from checkpoint import MODELS, Model, machine, student

FRAMEWORKS = ("transformers", "accelerate", "lightning", "trl")
SETTLE = 2
"""Steps of a training after the other one's turn that are not looked at."""


class Tokens(Dataset):
    """Sequences drawn once; sample i is one of them."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.pool = torch.randint(
            0, vocabulary, (512, length + 1), generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.pool[i % len(self.pool)]}


class Language(Model):
    """The model of benchmarks/checkpoint.py, which gives its loss as Trainer wants it."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(tokens[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())}


class Over(Exception):
    """Ends a training from within its loader."""


class Course:
    """A training in a thread that makes steps when it is asked to; the gate stands in `collate`."""

    def __init__(self, train: Callable[[Course], None], device: str, accumulate: int) -> None:
        self.device, self.accumulate = device, accumulate
        self._batches = 0
        self._left, self._stamps = 0, list[float]()
        self._go, self._here = threading.Semaphore(0), threading.Semaphore(0)
        self._failed: BaseException | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)
        self._thread.start()
        self._wait()

    def steps(self, count: int, after: Callable[[], bool] = lambda: False) -> list[float]:
        """The times of the gates that it passes, one more than steps: `count` of them, or until `after()` holds at one."""
        self._left, self._stamps, self._after = count, [], after
        self._go.release()
        self._wait()
        return self._stamps

    def end(self) -> None:
        """Ends the thread."""
        self._over = True
        self._go.release()
        self._thread.join(60)

    def collate(self, samples: list[Any]) -> Any:
        """The gate, before the first batch of a step, then the batch."""
        self._batches += 1
        if self._batches % self.accumulate != 1 % self.accumulate:
            return torch.utils.data.default_collate(samples)
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()
        self._stamps.append(time.perf_counter())
        if self._left <= 0 or self._after():
            self._here.release()
            self._go.acquire()
            if self._over:
                raise Over
            self._stamps.append(time.perf_counter())
        self._left -= 1
        return torch.utils.data.default_collate(samples)

    def _after(self) -> bool:
        return False

    def _wait(self) -> None:
        self._here.acquire()
        if self._failed is not None:
            raise self._failed

    def _run(self, train: Callable[[Course], None]) -> None:
        try:
            train(self)
        except Over:
            return
        except BaseException as e:  # noqa: BLE001 - it is raised where the thread is waited for
            self._failed = e
        self._here.release()


def loader(course: Course, size: tuple[int, ...]) -> Any:
    """What a user has: an ordinary loader, shuffled."""
    _, _, _, vocabulary, length, batch, _ = size
    return DataLoader(Tokens(vocabulary, length), batch, shuffle=True, collate_fn=course.collate)


def build(size: tuple[int, ...], device: str) -> tuple[Any, Any]:
    """Model and optimizer."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Language(*size[:4])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")


def train_transformers(
    course: Course, size: tuple[int, ...], folder: Path, hook: dict[str, Any] | None
) -> None:
    import transformers

    cpu = course.device == "cpu"
    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=10**6, gradient_accumulation_steps=course.accumulate,
        per_device_train_batch_size=size[5], bf16=not cpu, use_cpu=cpu, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    model, optimizer = build(size, course.device)
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=Tokens(*size[3:5]),
        data_collator=course.collate,
        optimizers=(optimizer, None),
    )
    if hook is not None:
        from unbroken.hooks.transformers import attach

        attach(trainer, folder / "c", **hook)
    trainer.train()


def train_accelerate(
    course: Course, size: tuple[int, ...], folder: Path, hook: dict[str, Any] | None
) -> None:
    from accelerate import Accelerator

    cpu = course.device == "cpu"
    accelerator = Accelerator(
        cpu=cpu, mixed_precision="no" if cpu else "bf16", gradient_accumulation_steps=course.accumulate
    )
    model, optimizer, batches = accelerator.prepare(*build(size, course.device), loader(course, size))
    if hook is not None:
        from unbroken.hooks.accelerate import attach

        batches = attach(accelerator, batches, folder / "c", **hook)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(batch["tokens"])["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def train_lightning(course: Course, size: tuple[int, ...], folder: Path, hook: dict[str, Any] | None) -> None:
    import pytorch_lightning as L

    cpu = course.device == "cpu"
    model, optimizer = build(size, course.device)

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(batch["tokens"])["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer

    callbacks = []
    if hook is not None:
        from unbroken.hooks.lightning import UnbrokenCallback

        callbacks = [UnbrokenCallback(folder / "c", **hook)]
    trainer = L.Trainer(
        accelerator="cpu" if cpu else "gpu", devices=1, precision="32-true" if cpu else "bf16-mixed", max_epochs=10**6,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        default_root_dir=str(folder), accumulate_grad_batches=course.accumulate,
    )  # fmt: skip
    trainer.fit(Module(), loader(course, size))


def train_trl(course: Course, size: tuple[int, ...], folder: Path, hook: dict[str, Any] | None) -> None:
    """A GPT-2 of about the same size, since SFTTrainer wants a model of transformers'."""
    from datasets import Dataset as Table
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    width, layers, heads, vocabulary, length, batch, _ = size
    cpu = course.device == "cpu"
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")

    texts = Tokens(vocabulary, length)

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        tokens = course.collate([texts[row["number"]] for row in rows])["tokens"][:, :-1]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

    args = SFTConfig(
        output_dir=str(folder / "out"), max_steps=10**6, gradient_accumulation_steps=course.accumulate,
        per_device_train_batch_size=batch, bf16=not cpu, use_cpu=cpu, save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True, remove_unused_columns=False, gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, eos_token_id=1
    )
    with torch.device(course.device):
        model = GPT2LMHeadModel(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not cpu)
    trainer = SFTTrainer(
        model, args, train_dataset=Table.from_dict({"number": range(len(texts))}), data_collator=collate,
        processing_class=tokenizer, optimizers=(optimizer, None),
    )  # fmt: skip
    if hook is not None:
        from unbroken.hooks.transformers import attach

        attach(trainer, folder / "c", **hook)
    trainer.train()


TRAIN = {
    "transformers": train_transformers, "accelerate": train_accelerate, "lightning": train_lightning, "trl": train_trl,
}  # fmt: skip


def measure(framework: str, a: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> None:
    """Saves, then pairs of windows; what there is so far is told after each part."""
    from unbroken.checkpoint.device import staging
    from unbroken.hooks.training import HookedTraining

    if a.copies:
        piece, count, streams, look = a.copies.split()
        staging._PIECE_BYTES, staging._UNDER_WAY, staging._STREAMS, staging._LOOK_S = (
            int(piece), int(count), int(streams), float(look),
        )  # fmt: skip
    width, layers, heads, vocabulary, length, batch, _ = MODELS[a.model]
    size = (width, layers, heads, vocabulary, length, a.batch or batch, 1)
    made, saved, due = list[HookedTraining](), list[Any](), set[int]()
    begin = HookedTraining.begin

    def noting(self: HookedTraining, state: dict[str, Any]) -> Any:
        made.append(self)
        self.checkpoints.due = lambda step: step in due  # type: ignore[method-assign]
        save = self.checkpoints.save
        self.checkpoints.save = lambda *args, **how: saved.append(save(*args, **how)) or saved[-1]  # type: ignore
        return begin(self, state)

    HookedTraining.begin = noting  # type: ignore[method-assign]
    folder = a.folder / framework
    options = {"snapshot_every": 1, "persist_every": 10**9, "buffers": 2, "throttle": a.throttle}
    result: dict[str, Any] = {"version": version(framework.replace("lightning", "pytorch-lightning"))}
    began = time.perf_counter()
    ours = Course(lambda c: TRAIN[framework](c, size, folder, options), a.device, a.accumulate)
    ours.steps(2)
    training = made[0]
    buffers = training.checkpoints._opened().buffers.device

    def registered() -> bool:
        stuck = time.perf_counter() - began > 60
        return (
            stuck
            or buffers.pinning is None
            or all(b.pinned for b in training.checkpoints.memory.buffers.values())
        )

    ours.steps(2000, registered)
    result["until_registered_s"] = time.perf_counter() - began

    def quiet() -> list[float]:
        stamps = ours.steps(a.window)
        return [y - x for x, y in itertools.pairwise(stamps)]

    rows: list[dict[str, Any]] = []
    ours.steps(SETTLE)
    before = quiet()
    for number in range(a.saves):
        ours.steps(SETTLE)
        due.add(training.step + 1)
        count = len(saved)

        def whole(count: int = count) -> bool:
            return len(saved) > count and saved[-1].host.done()

        stamps = ours.steps(200, whole)
        after = quiet()
        usual = st.median(before + after)
        rows.append({
            "steps": len(stamps) - 1, "quiet_step_s": usual, "host_s": stamps[-1] - stamps[0],
            "excess_s": stamps[-1] - stamps[0] - (len(stamps) - 1) * usual, "first": number == 0,
        })  # fmt: skip
        before = after
        tell(result | {"saves": rows})
    result["saves"] = rows
    if a.pairs:
        result["pairs_s"] = compare(ours, framework, size, folder, a)
        tell(result)
    keeper = int(training.checkpoints.memory.link.info["pid"])
    os.kill(keeper, 9)  # nobody wants what was saved
    os._exit(0)


def compare(
    ours: Course, framework: str, size: tuple[int, ...], folder: Path, a: argparse.Namespace
) -> list[tuple[float, float]]:
    """Seconds of windows with the hook and without, in turn."""
    plain = Course(lambda c: TRAIN[framework](c, size, folder, None), a.device, a.accumulate)
    plain.steps(4)
    pairs = []
    for number in range(a.pairs):
        took = {}
        for course in (ours, plain) if number % 2 else (plain, ours):
            course.steps(SETTLE)
            stamps = course.steps(a.window)
            took[course] = stamps[-1] - stamps[0]
        pairs.append((took[ours], took[plain]))
    return pairs


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the means' intervals of 95 %."""
    found: dict[str, Any] = {}
    rows = [r["excess_s"] for r in result.get("saves", []) if not r["first"]]
    if len(rows) > 1:
        found |= {"excess_s": st.median(rows), "excess_mean_s": st.mean(rows), "excess_half_s": half(rows)}
        found["step_s"] = st.median(r["quiet_step_s"] for r in result["saves"])
    ratios = [ours / plain - 1 for ours, plain in result.get("pairs_s", [])]
    if len(ratios) > 1:
        found |= {"cost": st.median(ratios), "cost_mean": st.mean(ratios), "cost_half": half(ratios)}
    return found


def half(values: list[float]) -> float:
    """Half of the interval that holds the mean with 95 % (Student)."""
    return student(len(values)) * st.stdev(values) / len(values) ** 0.5


def start(framework: str, a: argparse.Namespace) -> subprocess.Popen[str]:
    """The process of a framework, which imports it and waits for a word."""
    words = ["--only", framework, "--model", a.model, "--device", a.device, "--folder", str(a.folder)]
    words += [
        "--pairs",
        str(a.pairs),
        "--saves",
        str(a.saves),
        "--window",
        str(a.window),
        "--batch",
        str(a.batch),
        "--accumulate",
        str(a.accumulate),
    ]
    words += ["--throttle", a.throttle] if a.throttle else []
    words += ["--copies", a.copies] if a.copies else []
    env = {k: v for k, v in os.environ.items() if not k.startswith("UNBROKEN_")}
    return subprocess.Popen(
        [sys.executable, __file__, *words], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def alone(framework: str, a: argparse.Namespace) -> None:
    """One framework in this process."""
    __import__({"lightning": "pytorch_lightning"}.get(framework, framework))
    if framework in ("transformers", "trl"):
        from transformers import Trainer  # noqa: F401  seconds
    sys.stdin.readline()
    measure(framework, a, lambda result: print("RESULT " + json.dumps(result), flush=True))


def collect(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """The last result that a framework's process told; it is ended after so many seconds."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    found: dict[str, Any] = {}
    for line in process.stdout:
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
    code = process.wait()
    timer.cancel()
    return found if code == 0 else found | {"failed": f"exit code {code} (-9: after {seconds:.0f} s)"}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=list(MODELS), default="1b")
    p.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    p.add_argument("--batch", type=int, default=4, help="sequences a batch")
    p.add_argument("--accumulate", type=int, default=4, help="batches a step")
    p.add_argument("--pairs", type=int, default=8, help="of windows; 0 leaves the cost between saves out")
    p.add_argument("--saves", type=int, default=6, help="the first apart")
    p.add_argument("--window", type=int, default=4, help="steps")
    p.add_argument("--throttle", help="of the copies, such as 30GB a second")
    p.add_argument("--copies", help="how they are given to the GPU: what copy_reads.py --best writes")
    p.add_argument("--seconds", type=float, default=90, help="each framework has at most")
    p.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    p.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / f"unbroken-hooks-{os.getpid()}"
    )
    p.add_argument("--out", type=Path)
    p.add_argument("--only", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.only:
        alone(a.only, a)
        return
    result: dict[str, Any] = {
        "machine": machine(torch.device(a.device)),
        "model": a.model,
        "batch": a.batch,
        "accumulate": a.accumulate,
        "throttle": a.throttle,
        "hooks": {},
    }
    processes = {f: start(f, a) for f in a.frameworks.split(",")}
    for framework, process in processes.items():
        found = collect(process, a.seconds)
        result["hooks"][framework] = figures(found) | found
        if a.out:
            a.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["machine"]))
    print(f"{'hook':14}{'step':>9}{'excess of a save (mean +- half)':>36}{'cost without faults':>32}")
    for framework, row in result["hooks"].items():
        save = (
            f"{row['excess_s']:.4f} s ({row['excess_mean_s']:.4f} +- {row['excess_half_s']:.4f})"
            if "excess_s" in row
            else "-"
        )
        cost = (
            f"{row['cost']:+.3%} ({row['cost_mean']:+.3%} +- {row['cost_half']:.3%})"
            if "cost" in row
            else "-"
        )
        print(
            f"{framework:14}{row.get('step_s', float('nan')):9.4f}{save:>36}{cost:>32}  {row.get('failed', '')}"
        )


if __name__ == "__main__":
    main()
