"""Complete training logs as messy as public ones: shell traces, modules, packages, arguments, ranks that repeat each other.

Used by `benchmarks/diagnosis_logs.py` and by the tests. Everything follows from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

ROOT = "RuntimeError: CUDA error: an illegal memory access was encountered"
_SYLLABLES = [
    "ba",
    "co",
    "di",
    "fe",
    "gu",
    "ha",
    "ji",
    "ko",
    "lu",
    "me",
    "no",
    "pi",
    "ra",
    "so",
    "tu",
    "va",
    "we",
    "xi",
    "yo",
    "zu",
]
_OPTIONS = [
    "adam",
    "bias",
    "block",
    "cache",
    "clip",
    "data",
    "decay",
    "dropout",
    "embed",
    "epoch",
    "eval",
    "fp",
    "fused",
    "grad",
    "head",
    "hidden",
    "init",
    "layer",
    "lr",
    "load",
    "log",
    "loss",
    "master",
    "mask",
    "micro",
    "norm",
    "num",
    "optim",
    "param",
    "pipe",
    "rope",
    "save",
    "scale",
    "seq",
    "shard",
    "split",
    "step",
    "tensor",
    "tie",
    "train",
    "valid",
    "warmup",
    "weight",
    "window",
    "zero",
]


def _name(rng: random.Random, parts: int = 3) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(parts))


def shell_trace(rng: random.Random, lines: int) -> list[str]:
    """What `set -x` prints of modules and conda."""
    out = []
    for _ in range(lines):
        plus = "+" * rng.randint(1, 5)
        out.append(
            rng.choice(
                [
                    f"{plus} export {_name(rng).upper()}=/opt/{_name(rng)}/{_name(rng)}/lib:/usr/{_name(rng)}",
                    f"{plus} unset {_name(rng).upper()}_{_name(rng, 2).upper()}",
                    f"{plus} '[' -n '{_name(rng)}' ']'",
                    f"{plus} . /opt/conda/etc/conda/activate.d/{_name(rng)}-activate.sh",
                    f"_mod_{_name(rng)}='{_name(rng)}/1.{rng.randint(0, 9)}:{_name(rng)}';",
                    f'        {_name(rng)}="${{{_name(rng).upper()}}}"',
                ]
            )
        )
    return out


def packages(rng: random.Random, lines: int) -> list[str]:
    """`pip freeze` or `conda list`."""
    if rng.random() < 0.5:
        return [
            f"{_name(rng)}=={rng.randint(0, 9)}.{rng.randint(0, 30)}.{rng.randint(0, 9)}"
            for _ in range(lines)
        ]
    return [
        f"{_name(rng):<24}{rng.randint(0, 9)}.{rng.randint(0, 30)}   py310h{_name(rng)}_0    conda-forge"
        for _ in range(lines)
    ]


def arguments(rng: random.Random, lines: int) -> list[str]:
    """A dump of arguments."""
    style = rng.randint(0, 3)
    names = sorted(
        {f"{rng.choice(_OPTIONS)}_{rng.choice(_OPTIONS)}_{rng.choice(_OPTIONS)}" for _ in range(lines)}
    )
    values = ["None", "True", "False", "0.1", "1e-05", "4096", "/data/" + _name(rng)]
    pick = lambda: rng.choice(values)  # noqa: E731
    if style == 0:
        return [f"  {n} {'.' * max(3, 48 - len(n))} {pick()}" for n in names]
    if style == 1:
        return [f"{n}: {pick()}" for n in names]
    if style == 2:
        return ["{", *(f'  "{n}": "{pick()}",' for n in names), "}"]
    return [f"    {n}={pick()}," for n in names]


def model(rng: random.Random, lines: int) -> list[str]:
    """A model's printout."""
    return [
        "GPTModel(",
        *(
            f"{'  ' * rng.randint(1, 5)}({_name(rng)}): {_name(rng).title()}(in_features={rng.randint(8, 9999)}, bias=False)"
            for _ in range(lines)
        ),
        ")",
    ]


def smi(rng: random.Random, lines: int) -> list[str]:
    """nvidia-smi."""
    return [
        "+-----------------------------------------------------------------------------+",
        *(
            f"| {i}  Tesla {_name(rng)}  Off | 00000000:{rng.randint(10, 99)}:00.0 Off | {rng.randint(0, 9)} | N/A {rng.randint(20, 60)}C P0 {rng.randint(20, 90)}W / 300W |"
            for i in range(lines)
        ),
        "+-----------------------------------------------------------------------------+",
    ]


def per_rank(rng: random.Random, ranks: int) -> list[str]:
    """What each rank says at the start, mixed."""
    rows = []
    for r in range(ranks):
        node = f"r{rng.randint(1, 9)}i{rng.randint(1, 9)}n{rng.randint(0, 9)}"
        rows += [
            f"{node}:{rng.randint(999, 99999)}:{rng.randint(999, 99999)} [{r % 4}] NCCL INFO Channel {c:02d} : {r}[{rng.randint(1, 9)}a000] -> {r + 1}[8a000] via P2P/IPC"
            for c in range(6)
        ]
        rows += [
            f"[rank{r}]: /opt/{_name(rng)}/torch/{_name(rng)}.py:{rng.randint(9, 999)}: UserWarning: {_name(rng)} is deprecated",
            f"> rank {r} loading shard {_name(rng)}-{r:05d}.safetensors",
            f"[default{r % 8}]:> setting random seeds to {rng.randint(1, 9999)} for rank {r}",
        ]
    rng.shuffle(rows)
    return rows


_METRICS: dict[str, Callable[[int, float], str]] = {
    "megatron": lambda n, x: f" iteration {n:8d}/  90000 | consumed samples: {n * 512:12d} | elapsed time per iteration (ms): {4000 + n % 90:.1f} | learning rate: 1.5E-04 | lm loss: {x:.6E} | grad norm: 0.378 | number of nan iterations:   0 |",
    "neox": lambda n, x: f"  samples/sec: {300 + n % 9}.{n % 7} | iteration {n:8d}/  143000 | lm_loss: {x:.6E} | loss scale: 65536.0 |",
    "nemo": lambda n, x: f"Training epoch 0, iteration {n}/249999 | lr: 0.0001351 | reduced_train_loss: {x:.4f} | consumed_samples: {n * 512}",
    "titan": lambda n, x: f"[rank0]:[titan] 2026-01-07 23:{n // 60 % 60:02d}:{n % 60:02d},360 - root - INFO - step: {n:5d}  loss:  {x:.4f}  grad_norm:  0.35  tps: 5,8{n % 90:02d}",
    "hf": lambda n, x: f"{{'loss': {x:.4f}, 'grad_norm': 0.{n % 900 + 99}, 'learning_rate': 1.5e-05, 'epoch': {n / 1000:.3f}}}",
    "olmo": lambda n, x: f"2026-01-07T10:{n // 60 % 60:02d}:{n % 60:02d} INFO [olmo.train:{n % 3}] [step={n}/739328]\n    train/CrossEntropyLoss={x:.3f}\n    throughput/device/tokens_per_second={9000 + n % 99}",
    "nanogpt": lambda n, x: f"step:{n}/5100 train_loss:{x:.4f} train_time:{n * 141}ms step_avg:141.{n % 90}ms",
    "opt": lambda n, x: f"2026-01-07 10:{n // 60 % 60:02d}:{n % 60:02d} | INFO | train_inner | {{\"epoch\": 1, \"loss\": \"{x:.3f}\", \"ppl\": \"7.1\", \"wps\": \"{99000 + n % 77}\", \"num_updates\": \"{n}\"}}",
    "litgpt": lambda n, x: f"Epoch 1 | iter {n} step {n // 4} | loss train: {x:.3f}, val: n/a | iter time: {300 + n % 40}.1{n % 9} ms (step)",
    "tqdm": lambda n, x: f"\r {n % 100:3d}%|####      | {n}/90000 [00:01<12:00,  4.{n % 9}it/s, loss={x:.3f}]",
}  # fmt: skip
STYLES = tuple(_METRICS)


def log(
    style: str, seed: int, root: str | None = None, steps: int = 1500, launches: int = 2
) -> tuple[str, int | None]:
    """One log of several launches, and the number of the root's line, where it has one: the last launch dies of it."""
    rng = random.Random(f"{style}{seed}")
    rows: list[str] = []
    shared = arguments(rng, 180)
    for launch in range(launches):
        parts = [
            shell_trace(rng, rng.randint(60, 500)),
            packages(rng, rng.randint(40, 200)),
            smi(rng, 8),
            list(shared),
            model(rng, rng.randint(20, 120)),
            per_rank(rng, rng.choice((8, 32, 64))),
        ]
        for part in parts:
            rows += part
        for n in range(1, steps):
            rows.append(_METRICS[style](n, 2.0 + 8 / (n + 1) + rng.random() * 0.05))
            if n % 250 == 0:
                rows += [
                    f"saving checkpoint at iteration {n} to /data/{_name(rng)}",
                    f"validation loss at iteration {n} | value: 2.{n}",
                ]
        if launch < launches - 1:
            rows.append(
                "slurmstepd: error: *** STEP 199.0 ON node-7 CANCELLED AT 2026-01-07T21:42:11 DUE TO TIME LIMIT ***"
            )
            rows += [
                f"Killing subprocess {rng.randint(1000, 99999)}" for _ in range(rng.choice((8, 64, 256)))
            ]
    at = None
    if root is not None:
        text = "\n".join(rows) + "\n"
        at = text.count("\n") + 5
        rows += [
            "[rank3]: Traceback (most recent call last):",
            '[rank3]:   File "/app/train.py", line 7, in main',
            "[rank3]:     loss.backward()",
            f"[rank3]:     {'^' * 15}",
            f"[rank3]: {root}",
        ]
        rows += [f"Killing subprocess {rng.randint(1000, 99999)}" for _ in range(120)]
    return "\n".join(rows) + "\n", at
