"""What the frameworks' own resume gives, beside ours: each trains an example of examples/hooks without our lines, saves in its own
way, and goes on from there in a new process. Told is whether every loss is that of the undisturbed training, bit for bit.

    python benchmarks/hooks_resume.py             # prints a table, writes benchmarks/results/hooks_resume.json; minutes
    python benchmarks/hooks_resume.py --frameworks lightning     # one of them; the other rows of the file stay

One process, CPU; shuffled, dropout, two workers, two batches a step, samples that draw. The resume begins after step 4 (first epoch of
eleven steps) or 14 (second epoch). `noise` tells whether the dataset draws for each sample.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "hooks"
SCRIPTS = {
    "transformers": "transformers_trainer",
    "accelerate": "accelerate_loop",
    "lightning": "lightning_fit",
    "deepspeed": "deepspeed_zero",
}
AFTER = (4, 14)


def train(framework: str, folder: Path, resume: int, noise: bool) -> None:
    """Trains in this process without our hook; saves at the steps of AFTER, or goes on from what was saved at `resume`."""
    sys.path[:0] = [str(ROOT / "src"), str(EXAMPLES)]
    sys.argv = [f"{SCRIPTS[framework]}.py", "--out", str(folder / "out"), "--epochs", "2"]
    with without_noise(noise):
        globals()[f"_{framework}"](__import__(SCRIPTS[framework]), folder, resume)


@contextlib.contextmanager
def without_noise(noise: bool) -> Iterator[None]:
    """Datasets draw nothing inside, where that is asked for. Workers are forked, and have it too."""
    import torch

    rand, randn = torch.rand, torch.randn
    if not noise:
        torch.rand = lambda *a, **k: torch.ones(*a) if "generator" not in k else rand(*a, **k)
        torch.randn = lambda *a, **k: torch.zeros(*a) if "generator" not in k else randn(*a, **k)
    try:
        yield
    finally:
        torch.rand, torch.randn = rand, randn


def _transformers(example: Any, folder: Path, resume: int) -> None:
    class Own(example.Printing):  # type: ignore[misc, name-defined]
        def train(self, **_: Any) -> Any:
            return super().train(
                resume_from_checkpoint=str(folder / "out" / f"checkpoint-{resume}") if resume else None
            )

    arguments = example.TrainingArguments
    example.TrainingArguments = lambda **how: arguments(**{**how, "save_strategy": "steps", "save_steps": 2})
    example.attach, example.Printing = lambda *_, **__: None, Own
    example.main()


def _accelerate(example: Any, folder: Path, resume: int) -> None:
    from accelerate import skip_first_batches

    class Own:
        """What accelerate's documentation tells to write."""

        def __init__(self, accelerator: Any, loader: Any) -> None:
            self.accelerator, self.loader, self.step, self.passes = accelerator, loader, resume, 0
            self.epoch, self.batches = divmod(resume * accelerator.gradient_accumulation_steps, len(loader))
            if resume:
                accelerator.load_state(str(folder / f"own-{resume}"))

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            if self.passes <= self.epoch:
                return
            loader = self.loader
            if self.passes == self.epoch + 1 and self.batches:
                loader = skip_first_batches(loader, self.batches)
            loader.set_epoch(self.passes - 1)
            for number, batch in enumerate(loader, 1):
                self.step += number % 2 == 0 or number == len(loader)
                yield batch
                if self.step in AFTER and number % 2 == 0 and not resume:
                    self.accelerator.save_state(str(folder / f"own-{self.step}"))

    example.attach = lambda accelerator, loader, **_: Own(accelerator, loader)
    example.main()


def _lightning(example: Any, folder: Path, resume: int) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(
        folder / "own", "{step}", every_n_train_steps=2, save_top_k=-1, auto_insert_metric_name=True
    )
    trainer = example.L.Trainer

    def own(**how: Any) -> Any:
        made = trainer(**{**how, "callbacks": [saving], "enable_checkpointing": True})
        path = folder / "own" / f"step={resume}.ckpt"
        made.fit = functools.partial(made.fit, ckpt_path=str(path) if resume else None, weights_only=False)
        return made

    example.UnbrokenCallback = lambda **_: None
    example.L.Trainer = own
    example.main()


def _deepspeed(example: Any, folder: Path, resume: int) -> None:
    """What its documentation tells to write: the step in `client_state`, and batches that are skipped by the script."""
    sys.path.insert(0, str(ROOT))
    from tests.hooks.on_cpu.zero import stand_in

    stand_in()

    class Own:
        def __init__(self, engine: Any, loader: Any) -> None:
            self.engine, self.loader, self.skip = engine, loader, 0
            if resume:
                _, state = engine.load_checkpoint(str(folder / "own"), tag=str(resume))
                self.skip = state["batches"]

        def __iter__(self) -> Iterator[Any]:
            for batch in self.loader:
                if self.skip:
                    self.skip -= 1
                    continue
                yield batch
                engine = self.engine
                if not resume and engine.global_steps in AFTER and engine.micro_steps % 2 == 0:
                    state = {"batches": engine.micro_steps}
                    engine.save_checkpoint(
                        str(folder / "own"), tag=str(engine.global_steps), client_state=state
                    )

    example.attach = lambda engine, loader, *_, **__: Own(engine, loader)
    sys.argv += ["--stage", "2"]
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }.items():
        os.environ[name] = str(value)
    example.main()


def free_port() -> int:
    """A port that nothing listens on now."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def losses(framework: str, folder: Path, resume: int, noise: bool) -> dict[int, list[str]]:
    """The losses of each step in a process of its own. SystemExit where it fails."""
    words = [
        "--train",
        framework,
        "--folder",
        str(folder),
        "--resume",
        str(resume),
        *(["--noise"] if noise else []),
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("UNBROKEN_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, *words], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    found: dict[int, list[str]] = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if line.startswith("rank 0 step"):
            found.setdefault(int(words[3]), []).append(words[5])
    return found


def compare(framework: str, noise: bool) -> dict[str, Any]:
    """Whether two undisturbed trainings are equal, and the first step that differs after each resume (None: exact)."""
    with tempfile.TemporaryDirectory() as name:
        whole = losses(framework, Path(name), 0, noise)
        with tempfile.TemporaryDirectory() as other:
            same = losses(framework, Path(other), 0, noise) == whole
        found: dict[str, Any] = {"twice_the_same": same}
        for after in AFTER:
            rest = losses(framework, Path(name), after, noise)
            wrong = [step for step in sorted(whole) if step > after and rest.get(step) != whole[step]]
            found[f"after_{after}"] = wrong[0] if wrong else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "hooks_resume.json")
    parser.add_argument("--frameworks", default=",".join(SCRIPTS))
    parser.add_argument("--train", choices=list(SCRIPTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--noise", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.folder, args.resume, args.noise)
        return
    from machine import describe_machine

    rows = json.loads(args.output.read_text())["own_resume"] if args.output.exists() else {}
    for name in args.frameworks.split(","):
        rows[name] = {"version": version(name)}
        for kind, noise in {"noise": True, "no_noise": False}.items():
            rows[name][kind] = compare(name, noise)
            print(name, kind, rows[name][kind], flush=True)
            args.output.write_text(
                json.dumps({"machine": describe_machine(), "own_resume": rows}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
