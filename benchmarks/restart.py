"""From `kill -9` of a rank to the first new step, on one machine: `unbroken run` with and without warm processes, and torchrun.

    python benchmarks/restart.py [--script plain|compiled] [--repeats 5] [--contenders warm cold torchrun] [--no-bytecode] [--out RESULT.json]

One script, the same for all, which knows nothing of `unbroken`: it saves by itself at step 10 and goes on from there when it is
started again. `plain` is a small model on the processor. `compiled` is a decoder of 0.97 B parameters whose blocks are compiled,
on a GPU (AdamW is left out so that what it saves is all of its state; 3.8 GB), with NCCL. Each repetition kills the rank once it
has made 3 steps in its attempt and is further than any attempt before, and, for `warm`, once the next warm process is ready. torchrun comes first and fills the compile
caches, which all share (a folder of this call). `nvrx` is NVIDIA's ft_launcher, where it is installed
(`pip install nvidia-resiliency-ext`); its time-outs by heartbeat are set to ten minutes, so that only the end of the process counts.
`torchft` has a script of its own (restart_torchft.py), with `--script plain` alone.

`--no-bytecode` runs every interpreter without compiled modules (`PYTHONPYCACHEPREFIX` is an empty folder that nothing is written to),
as in a container whose image was made without them: importing torch and the compiler is most of a restart then.

With `--fault node` all of a virtual node is killed (agent, keeper, rank, its memory), and a spare takes its place; measured is from
the moment when it is fenced to the first new step, beside the cold start of the same run's first attempt. Losses are compared too: every step made again must have the loss of the first
time, bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import restart_torchft
from benchmarks.machine import describe_machine

from unbroken.cluster.holding.processes import end, marked
from unbroken.progress import RunDir, read_journal, read_spec
from unbroken.progress.records.incident import read_incidents
from unbroken.testing.faults import RunFaults

WITHIN_S, SAVED_AT, STEPS_BEFORE = 120.0, 10, 3
HEAD = """
import os, sys, time
FOLDER = sys.argv[1]
def mark(what):
    with open(f"{FOLDER}/marks", "a") as f:
        f.write(f"{os.getpid()} {time.time()} {time.process_time()} {len(sys.modules)} {what}\\n")
mark("script")
"""
PLAIN = """
import torch
import torch.nn as nn

DEVICE, SIZE, BACKEND = "cpu", 64, "gloo"
def make():
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
def loss_of(model, step):
    torch.manual_seed(step)
    return model(torch.randn(8, SIZE)).square().mean()
"""
COMPILED = """
import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE, BACKEND = "cuda", "nccl"
LAYERS, D, HEADS, VOCAB, B, S = (int(x) for x in os.environ["MODEL"].split())
if D < 512:
    DEVICE, BACKEND = "cpu", "gloo"
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)
    def forward(self, x):
        q, k, v = (t.view(B, S, HEADS, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D))
        return x + self.down(F.gelu(self.up(self.n2(x))))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.RMSNorm(D)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(LAYERS)), nn.Linear(D, VOCAB, bias=False)
    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
def make():
    with torch.device(DEVICE):
        model = Model()
    for block in model.blocks:
        block.compile()
    return model
def loss_of(model, step):
    torch.manual_seed(step)
    x = torch.randint(0, VOCAB, (B, S + 1), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())
"""
LOOP = """
import torch.distributed as dist

SAMPLING = [True]
def main(folder):
    mark("imports")
    if os.path.exists(f"{folder}/sample"):
        import threading
        def sample(main):
            with open(f"{folder}/stacks.{os.getpid()}", "w") as f:
                while SAMPLING:
                    time.sleep(0.02)
                    frame, frames = sys._current_frames().get(main), []
                    while frame:
                        code = frame.f_code
                        frames.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno}:{code.co_name}")
                        frame = frame.f_back
                    f.write(" < ".join(frames) + "\\n")
        threading.Thread(target=sample, args=[threading.get_ident()], daemon=True).start()
    torch.use_deterministic_algorithms(True)
    mark("deterministic kernels")
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
        torch.ones(1, device=DEVICE).item()
        mark("context")
    dist.init_process_group(BACKEND)
    dist.all_reduce(torch.ones(1, device=DEVICE))
    mark("group")
    torch.manual_seed(0)
    model, saved, first = make(), f"{folder}/saved.pt", 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    mark("model")
    if os.path.exists(saved):
        first = SAVED_AT
        model.load_state_dict(torch.load(saved, map_location=DEVICE, weights_only=True, mmap=True))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    mark("restore")
    for step in range(first + 1, 1000000):
        loss = loss_of(model, step)
        if step == first + 1:
            mark("first forward")
        loss.backward()
        if step == first + 1:
            mark("first backward")
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        if step == SAVED_AT and not os.path.exists(saved):
            torch.save(model.state_dict(), saved + ".new")
            os.rename(saved + ".new", saved)
        if step == first + 1:
            mark("first step")
            SAMPLING.clear()
        print(f"step {step} loss {value:.6f}", flush=True)
        with open(f"{folder}/steps", "a") as f:
            f.write(f"{time.time()} {os.getpid()} {step} {value.hex()}\\n")
        time.sleep(0.1)

if __name__ == "__main__":
    main(FOLDER)
"""


class Job:
    """A run of the script under one of the launchers."""

    def __init__(self, contender: str, folder: Path, script: Path, env: dict[str, str], spares: int) -> None:
        self.contender, self.folder, self._spares = contender, folder, spares
        folder.mkdir()
        self.run_dir = RunDir(folder / "run")
        self.kills: list[float] = []
        self._log = open(folder / "output", "ab")  # noqa: SIM115  closed in `end`
        words = [str(script), str(folder)]
        if contender == "torchft":
            self._processes = restart_torchft.start(folder, env, self._log)
            return
        if contender == "torchrun":
            argv = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=1",
                "--max-restarts=100",
                *words,
            ]
        elif contender == "nvrx":
            argv = [
                "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone", "--nproc-per-node=1", "--max-restarts=100",
                "--ft-param-initial_rank_heartbeat_timeout=600", "--ft-param-rank_heartbeat_timeout=600", *words,
            ]  # fmt: skip
        else:
            how = ["--warm", "--warm-after", "0.5s"] if contender == "warm" else ["--no-warm"]
            argv = [
                "-m", "unbroken", "run", "--run-dir", str(self.run_dir.path), "--spares", str(spares), *how, "--", *words,
            ]  # fmt: skip
        self._processes = [
            subprocess.Popen(
                [sys.executable, *argv], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                start_new_session=True,
            )
        ]  # fmt: skip

    def steps(self) -> list[tuple[float, int, int, str]]:
        """(time, process, step, loss) of each."""
        path = self.folder / "steps"
        rows = [x.split() for x in path.read_text().splitlines()] if path.exists() else []
        return [(float(x[0]), int(x[1]), int(x[2]), x[3]) for x in rows if len(x) == 4]

    def wait(self, what: str, ready: Callable[[], Any], within_s: float = WITHIN_S) -> Any:
        deadline = time.monotonic() + within_s
        while not (found := ready()):
            if time.monotonic() > deadline or self._processes[-1].poll() is not None:
                raise TimeoutError(
                    f"{self.contender}: no {what}\n{(self.folder / 'output').read_text()[-3000:]}"
                )
            time.sleep(0.02)
        return found

    def is_warm(self, number: int) -> bool:
        """Whether the process that is to take over is ready, or came to nothing."""
        records = read_journal(self.run_dir).records if self.run_dir.spec.exists() else []
        told = [r["node"] for r in records if r["kind"] == "warm"]
        return f"node-{number:03d}" in told if self._spares else len(told) >= number

    def find_phases(self, number: int) -> dict[str, float]:
        """Those of an incident that is over; none before."""
        found = [i for i in read_incidents(self.run_dir) if i["number"] == number and i["resumed"]]
        return dict(found[0]["phases"]) if found else {}

    def measure(self, number: int) -> float:
        """Seconds from the kill to the first step of another process; `number` counts from 1."""

        def trains() -> int:
            rows = self.steps()
            mine = [r for r in rows if r[1] == rows[-1][1]]
            # It has to be further than any attempt before: after a failure without progress `unbroken run` waits, by its policy.
            furthest = max([SAVED_AT, *(r[2] for r in rows if r[1] != rows[-1][1])])
            return mine[0][1] if len(mine) >= STEPS_BEFORE and rows[-1][2] > furthest else 0

        pid = self.wait("steps", lambda: bool(self.steps()) and trains())
        if self.contender == "warm":
            self.wait("warm process", lambda: self.is_warm(number))
        at = time.time()
        self.kills.append(at)
        if self._spares:
            RunFaults(self.run_dir).kill_node(f"node-{number - 1:03d}")
            self.wait("new step", lambda: [r for r in self.steps() if r[1] != pid and r[0] > at])
            phases = self.wait("end of the incident", lambda: self.find_phases(number))
            return sum(phases[k] for k in ("diagnose", "schedule", "start", "restore_and_first_step"))
        os.kill(pid, signal.SIGKILL)
        return float(
            self.wait("new step", lambda: [r for r in self.steps() if r[1] != pid and r[0] > at])[0][0] - at
        )

    def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a launcher has helpers
            process.wait(20)
        if self.run_dir.spec.exists():
            end(lambda: marked(read_spec(self.run_dir.spec).run_id))
        for place in Path("/proc").glob("[0-9]*"):  # ranks have sessions of their own
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in (place / "cmdline").read_bytes():
                    os.kill(int(place.name), signal.SIGKILL)
        self._log.close()


def list_starts(marks: str, kills: list[float]) -> list[dict[str, Any]]:
    """Each process of the script that came to its first step: by part of its start (seconds, CPU seconds, modules imported)."""
    rows: dict[int, list[tuple[float, float, int, str]]] = {}
    for pid, at, cpu, modules, what in (x.split(" ", 4) for x in marks.splitlines()):
        rows.setdefault(int(pid), []).append((float(at), float(cpu), int(modules), what))
    found = []
    for pid, mine in rows.items():
        killed = max((k for k in kills if k < mine[0][0]), default=None)
        parts = {
            what: [round(at - before[0], 3), round(cpu - before[1], 3), modules - before[2]]
            for before, (at, cpu, modules, what) in itertools.pairwise(mine)
        }
        found.append(
            {
                "process": pid, "from the kill to the script's first line": killed and round(mine[0][0] - killed, 3),
                "modules there": mine[0][2], "parts": parts,
            }
        )  # fmt: skip
    return found


def count_stacks(text: str) -> list[list[Any]]:
    """[samples, where]: how many samples of the main thread lay in each function with so many of its callers; most first."""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        frames = line.split(" < ")
        counts.update(
            {" < ".join(frames[:depth]) for depth in (1, 4)} | {f for f in frames if ":<module>" not in f}
        )
    return [[n, where] for where, n in counts.most_common(150)]


def measure(
    contender: str,
    folder: Path,
    script: Path,
    env: dict[str, str],
    repeats: int,
    spares: int,
    stacks: bool,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The figures of one contender; of a failure what was measured until then, and why. `keep` takes them after each repetition."""
    job, seconds, error = Job(contender, folder / contender, script, env, spares), [], ""
    try:
        for number in range(1, repeats + 1):
            seconds.append(round(job.measure(number), 2))
            print(f"{contender} {number}: {seconds[-1]} s", flush=True)
            keep(describe(job, seconds))
        if stacks:
            (job.folder / "sample").touch()
            print(f"{contender}, sampled: {job.measure(repeats + 1):.2f} s", flush=True)
    except (TimeoutError, OSError, KeyboardInterrupt) as e:
        error = str(e) or "interrupted"
        print(error, flush=True)
    finally:
        job.end()
    found = describe(job, seconds) | {"error": error[-500:]}
    if stacks:
        found["stacks"] = {p.suffix[1:]: count_stacks(p.read_text()) for p in job.folder.glob("stacks.*")}
    keep(found)
    return found


def describe(job: Job, seconds: list[float]) -> dict[str, Any]:
    """What is known so far."""
    losses: dict[int, set[str]] = {}
    for _, _, step, loss in job.steps():
        losses.setdefault(step, set()).add(loss)
    again = [step for step in losses if step > SAVED_AT]
    marks = job.folder / "marks"
    found: dict[str, Any] = {
        "seconds": list(seconds), "losses": {s: sorted(x) for s, x in losses.items() if s <= SAVED_AT + 3},
        "the same losses": all(len(losses[s]) == 1 for s in again),
        "starts": list_starts(marks.read_text() if marks.exists() else "", job.kills),
    }  # fmt: skip
    if seconds:
        found |= {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)}
    if job.run_dir.spec.exists():
        incidents = read_incidents(job.run_dir)
        found["phases"] = [i["phases"] for i in incidents]
        # From the kill until the agent has seen the end, and until the next attempt is launched: the rest is the script's start.
        launched = {r["attempt"]: r["t"] for r in read_journal(job.run_dir).records if r["kind"] == "attempt"}
        found["before the launch"] = [
            {
                "its end is seen": round(i["last_sign"] - kill, 3),
                "launched": round(at - kill, 3) if (at := launched.get(i["next_attempt"])) else None,
            }
            for i, kill in zip(incidents, job.kills, strict=False)
        ]
        found["warm"] = [
            {k: r.get(k) for k in ("ready", "why", "seconds", "modules", "bytes")}
            for r in read_journal(job.run_dir).records
            if r["kind"] == "warm"
        ]
        found["cold starts"] = [
            r["seconds"] for r in read_journal(job.run_dir).records if r["kind"] == "first_step"
        ][:1]
        found["cold"] = [r["cold"] for r in read_journal(job.run_dir).records if r["kind"] == "launched"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--script", choices=["plain", "compiled"], default="plain")
    parser.add_argument(
        "--model", default="26 1664 13 32000 4 1024", help="layers, width, heads, words, batch, length"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--torchrun-repeats", type=int)
    parser.add_argument("--cold-repeats", type=int)
    parser.add_argument("--fault", choices=["rank", "node"], default="rank")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=["torchrun", "nvrx", "torchft", "cold", "warm"],
        default=["torchrun", "cold", "warm"],
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="one more repetition, not counted, that samples where the start spends its time",
    )
    parser.add_argument(
        "--no-bytecode", action="store_true", help="interpreters without compiled modules, for all contenders"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if "torchft" in args.contenders and (args.script != "plain" or restart_torchft.why_not()):
        parser.error(restart_torchft.why_not() or "torchft runs with --script plain alone")
    if args.fault == "node":  # the others know no spares
        args.contenders = [c for c in args.contenders if c in ("cold", "warm")]
    result: dict[str, Any] = {
        "machine": describe_machine(), "script": args.script, "model": args.model, "bytecode": not args.no_bytecode,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        folder = Path(made)
        script = folder / "train.py"
        body = PLAIN if args.script == "plain" else COMPILED
        script.write_text(HEAD + body + f"SAVED_AT = {SAVED_AT}\n" + LOOP)
        env = {
            **os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "MODEL": args.model, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }  # fmt: skip
        if args.no_bytecode:
            env |= {"PYTHONPYCACHEPREFIX": str(folder / "no-bytecode"), "PYTHONDONTWRITEBYTECODE": "1"}
        for contender in args.contenders:
            spares = args.repeats + args.stacks if args.fault == "node" else 0
            repeats = {"torchrun": args.torchrun_repeats, "cold": args.cold_repeats}.get(
                contender
            ) or args.repeats

            def keep(found: dict[str, Any], contender: str = contender) -> None:
                result[contender] = found
                if args.out:
                    args.out.write_text(json.dumps(result, indent=1) + "\n")

            measure(
                contender, folder, script, env, repeats, spares, args.stacks and contender != "cold", keep
            )
    for contender in args.contenders:
        r = result[contender]
        beside = f", a cold start {r['cold starts'][0]} s" if r.get("cold starts") else ""
        print(
            f"{contender}: {r.get('min')} / {r.get('median')} / {r.get('max')} s{beside}, the same losses: {r['the same losses']}"
        )
    medians = {c: result[c]["median"] for c in args.contenders if "median" in result[c]}
    if "torchrun" in medians and "warm" in medians:
        print(f"warm / torchrun: {medians['warm'] / medians['torchrun']:.2f}")


if __name__ == "__main__":
    main()
