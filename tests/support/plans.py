"""Runs many plans in one launch: a process that imports torch once, forks the ranks, and walks through all cases.

`run_plans(world, cases)` starts it; a case is {"name", "argv", "steps", ...}, its answer what rank 0 found, or {"error"}.
What is done with each trainer is a function of this file, named by the case's "do".
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from unbroken.train.planning.layout import group_sizes

TINY = ["--dim", "32", "--heads", "4", "--kv-heads", "4", "--layers", "4", "--hidden", "64", "--seq", "32"]
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
PIPE = ["--pipeline", "2"]
INTERLEAVED = [*PIPE, "--schedule", "interleaved", "--stages", "2"]
ZERO_BUBBLE = [*PIPE, "--schedule", "zero-bubble", "--stages", "2"]
FOUR = {
    "reference": ["--engine", "reference"],
    "data": ["--engine", "plan"],
    "accumulation": ["--micro-batch", "2", "--optimizer", "-1"],
    "parameters": ["--parameters", "4", "--recompute", "selective"],
    "kept whole": ["--parameters", "2", "--gradients", "4", "--no-reshard", "--micro-batch", "2"],
    "optimizer alone": ["--optimizer", "4"],
    "tensor": ["--tensor", "4"],
    "context": ["--context", "4", "--optimizer", "2"],
    "pipeline": ["--pipeline", "4", "--global-batch", "16", "--micro-batch", "2"],
    "gpipe": [*PIPE, "--schedule", "gpipe", "--recompute", "full"],
    "zero-bubble": ZERO_BUBBLE,
}
EIGHT = {
    "three groups": ["--parameters", "2", "--gradients", "4", "--optimizer", "8", "--micro-batch", "1"],
    "tensor x parameters": ["--tensor", "2", "--parameters", "2", "--optimizer", "4", "--recompute", "full"],
    "tensor x context": ["--tensor", "2", "--context", "2", "--gradients", "2"],
    "context x parameters": ["--context", "2", "--parameters", "8"],
    "pipeline x parameters": [*INTERLEAVED, "--parameters", "2", "--optimizer", "4"],
    "pipeline x tensor": [*ZERO_BUBBLE, "--tensor", "2", "--optimizer", "2"],
    "pipeline x context": [*PIPE, "--context", "2", "--gradients", "4"],
    "all": [*PIPE, "--tensor", "2", "--context", "2"],
}
_AT_ONCE = 5
"""Cases of one set of ranks: the threads of a plan's groups stay until their process ends, hundreds of each rank were seen."""
WORDS = "the quick brown fox jumps over the lazy dog and runs on through woods and fields; "


def run_plans(world: int, cases: list[dict[str, Any]], timeout_s: float = 240, *, device: str = "cpu", mode: str = "deterministic") -> dict[str, Any]:  # fmt: skip
    """The answers by the cases' names. AssertionError with what the ranks printed if one did not come to its end. The mode is that of
    the whole process: cases give the same one."""
    with tempfile.TemporaryDirectory() as folder:
        ask = Path(folder) / "cases.json"
        ask.write_text(
            json.dumps({"world": world, "cases": cases, "folder": folder, "device": device, "mode": mode})
        )
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.plans", str(ask)], cwd=root, capture_output=True, text=True,
            timeout=timeout_s, env=os.environ | ONE_THREAD | {"PYTHONPATH": f"{root}:{root / 'src'}"},
        )  # fmt: skip
        answer = Path(folder) / "answers.json"
        assert done.returncode == 0 and answer.exists(), done.stdout[-2000:] + done.stderr[-6000:]
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def open_case(argv: list[str], folder: Path, world: Any) -> Any:
    """The trainer that a command line means, on text of ours."""
    from unbroken.progress import attach
    from unbroken.train.config import parse
    from unbroken.train.training import open_corpus, open_training

    text = folder / "text"
    argv = [a.format(folder=folder) for a in argv]
    config = parse(["--data", str(text), "--cache", str(folder / "cache"), *argv])
    return open_training(config, world, attach(), open_corpus(config))


def byte_cases(world: int, dtype: str) -> list[dict[str, Any]]:
    small = ["--dim", "24", "--heads", "2", "--kv-heads", "1", "--layers", "1", "--hidden", "44", "--seq", "16",
             "--global-batch", str(world), "--dtype", dtype, "--engine", "plan"]  # fmt: skip
    return [
        {"name": f"{p} {g} {o}", "do": "bytes",
         "argv": [*small, "--parameters", str(p), "--gradients", str(g), "--optimizer", str(o)]}
        for p, g, o in group_sizes(world)
    ]  # fmt: skip


def do_losses(trainer: Any, case: dict[str, Any]) -> Any:
    """Losses and gradient norms of the first steps, and the held-out loss if there is one."""
    found: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(case["steps"]):
        loss, norm, _, _ = trainer.train_step(lambda: None, False)
        found["losses"].append(loss)
        found["norms"].append(float(norm))
    if trainer.config.run.eval_every:
        found["held_out"] = trainer.evaluate()
    return found


def do_ddp(trainer: Any, case: dict[str, Any]) -> list[float]:
    """The same model and data under torch's DistributedDataParallel and AdamW."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from unbroken.train.config import learning_rate
    from unbroken.train.parallel.stage import Stage

    c = trainer.config
    stage = Stage(c.model, range(c.model.layers))
    stage.load_state_dict({n: p.detach().clone() for n, p in trainer.stages[0].named_parameters()})
    stage.set_positions(c.model, torch.arange(c.data.seq), trainer.world.device)
    model = DistributedDataParallel(stage)
    decayed = [p for p in stage.parameters() if p.ndim > 1]
    others = [p for p in stage.parameters() if p.ndim == 1]
    o = c.optim
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps,
    )  # fmt: skip
    found = []
    for step in range(1, case["steps"] + 1):
        indices, trainer.position = trainer.position.take(c.data.global_batch)
        tokens, targets = trainer._rows([trainer.order[i] for i in indices])
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), o.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step, c.run.steps)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        found.append(float(mean) / dist.get_world_size())
    return found


def do_bytes(trainer: Any, case: dict[str, Any]) -> Any:
    """Bytes of storage by category on this rank, after a step; all ranks compare with the formula."""
    import torch.distributed as dist

    from unbroken.train.planning.memory import state_bytes
    from unbroken.train.profiling.memory import held_bytes

    if case.get("step"):
        trainer.train_step(lambda: None, False)
    low = trainer.config.run.dtype == "bfloat16"
    held = held_bytes(trainer)
    layout = trainer.mesh.layout
    said = state_bytes(layout, trainer.mesh.here, trainer.config.model, parameter=2 if low else 4, gradient=4)
    mine = [held, {k: getattr(said, k) for k in held}]
    everyone: list[Any] = [None] * layout.world
    dist.all_gather_object(everyone, mine)
    return everyone


def _rank(rank: int, ask: dict[str, Any], port: int) -> None:
    faulthandler.enable()  # a crash in a library leaves its stack
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ask["world"]), LOCAL_WORLD_SIZE=str(ask["world"]),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    from unbroken.train.config import RunConfig
    from unbroken.train.world import start_world

    world = start_world(RunConfig(device=ask["device"], mode=ask["mode"], comm_timeout=60.0))
    answers = {}
    for case in ask["cases"]:
        try:
            trainer = open_case(case["argv"], Path(ask["folder"]), world)
            answers[case["name"]] = globals()["do_" + case.get("do", "losses")](trainer, case)
        except Exception as e:  # noqa: BLE001  the answer of the case
            if not type(e).__module__.startswith("unbroken"):
                traceback.print_exc()
                os._exit(3)
            answers[case["name"]] = {"error": str(e)}
    if rank == 0:
        file = Path(ask["folder"], "answers.json")
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | answers))
    import torch.distributed as dist

    if world.size > 1:
        dist.barrier()
    os._exit(0)


def main(path: str) -> int:
    """Forks the ranks; the worst exit code."""
    ask = json.loads(Path(path).read_text())
    text = Path(ask["folder"], "text")
    text.mkdir(exist_ok=True)
    messages = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes" * (i % 4)}] for i in range(90)]  # fmt: skip
    Path(ask["folder"], "chat.jsonl").write_text(
        "".join(json.dumps({"messages": m}) + "\n" for m in messages)
    )
    (text / "words.txt").write_text("".join(f"{i} {WORDS}" for i in range(300)))
    from unbroken.train.world import pin_environment

    pin_environment()
    import torch

    torch.set_num_threads(
        1
    )  # also where the machine has hundreds of cores: 17 processes of 640 threads were seen
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    import unbroken.train.parallel.trainer  # noqa: F401

    at_once = [ask["cases"][i : i + _AT_ONCE] for i in range(0, len(ask["cases"]), _AT_ONCE)]
    return max((_fork_ranks({**ask, "cases": cases}) for cases in at_once), default=0)


def _fork_ranks(ask: dict[str, Any]) -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = []
    for rank in range(ask["world"]):
        pid = os.fork()
        if not pid:
            try:
                _rank(rank, ask, port)
            except BaseException:  # noqa: BLE001  a rank that fails ends as one
                traceback.print_exc()
                os._exit(4)
        children.append(pid)
    codes = []
    for _ in children:
        _, status = os.waitpid(-1, 0)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:
            for pid in children:  # the others would wait for it
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    pass
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
