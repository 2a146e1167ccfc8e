"""What a change to the step of `unbroken train` is worth: variants of one trainer, in turns of a few steps in one process.

    python benchmarks/train_variants.py --out FILE.json [--size 1b] [--micro 12] [--rounds 6] [--seconds S] [--only NAME ...] [--tiny]

All but FSDP2 share weights, optimizer and data; the windows of a round come one after the other and the order turns from round to round, so that
heat and power are the same for all. A variant's figures are the means over rounds of (seconds of the plain step, and of FSDP2's, / its seconds), with half
of the 95 % interval (Student). A variant that fails says so and is left out. `--tiny` goes through all of it on a processor.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import describe_machine
from own_folders import use_own_folders

from checkpoint import student

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault(
    "PYTORCH_ALLOC_CONF", "expandable_segments:True"
)  # torch reads it when it first allocates

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from train_contenders import Case, fsdp2, ours  # noqa: E402
from train_products import add_product, product, products_of  # noqa: E402

from train import TINY, card, commit, synchronize, traced  # noqa: E402
from unbroken.train.config import RECIPES, RunConfig  # noqa: E402
from unbroken.train.model import Block, rotate  # noqa: E402
from unbroken.train.planning.sizes import flops_per_token  # noqa: E402
from unbroken.train.world import start_world  # noqa: E402

Step = Callable[[], Any]
POINTWISE = {"coordinate_descent_tuning": True, "triton.multi_kernel": 1}


def main() -> int:
    """Runs the rounds and prints what they found; 1 if a variant failed."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--size", default="1b", choices=sorted(RECIPES))
    p.add_argument("--micro", type=int, default=12)
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--steps", type=int, default=2, help="of a window, after one that is not counted")
    p.add_argument("--seconds", type=float, default=3600, help="after these no round begins")
    p.add_argument("--only", nargs="+", choices=sorted(VARIANTS), help="variants beside plain")
    p.add_argument("--no-fsdp2", action="store_true", help="leave plain FSDP2 out")
    p.add_argument("--trace", nargs="*", default=[], help="variants whose steps are traced at the end")
    p.add_argument("--tiny", action="store_true")
    args = p.parse_args()
    use_own_folders()
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    world = start_world(RunConfig(mode="fast", device="cpu" if args.tiny else "auto"))
    model = TINY if args.tiny else RECIPES[args.size]
    seq = 64 if args.tiny else args.seq
    case = Case("ours", args.size, 2 if args.tiny else args.micro)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step, trainer = ours(case, model, world, folder, seq=seq, tiny=args.tiny)
        others: dict[str, Any] = {}
        if not args.no_fsdp2:
            peer = fsdp2(dataclasses.replace(case, contender="fsdp2"), model, world, folder, seq=seq, tiny=args.tiny)[0]  # fmt: skip
            others["fsdp2"] = lambda _: lambda: contextlib.nullcontext(peer)
        made, failed = prepare(
            ["plain", *(args.only or USUAL), *others], VARIANTS | others, trainer, step, world
        )
        took, losses = rounds(made, step, args, lambda: time.monotonic() - began > args.seconds, world)
        found: dict[str, Any] = {
            n: {"windows_s": seconds, "loss": losses.get(n)} for n, seconds in took.items()
        }
        for n in took if len(took["plain"]) > 1 else ():
            tokens = case.micro * seq / statistics.mean(took[n])
            found[n] |= {"tokens_s_gpu": tokens, "flops_s": tokens * flops_per_token(model, seq)}
            for other in ("plain", "fsdp2"):
                if other in took:
                    found[n][f"over_{other}"] = compare(took[other], took[n])
            print(f"{n:12} {tokens:10,.0f} tokens/s " + " ".join(f"{k} {v[0]:.4f} +- {v[1]:.4f}" for k, v in found[n].items() if k.startswith("over")))  # fmt: skip
        for n in args.trace:
            if n in made:
                with made[n]() as around:
                    found[n]["time"] = traced(around or step, world, folder)
    result = {
        "machine": describe_machine(), "torch": torch.__version__, "commit": commit(), **card(world), "case": dataclasses.asdict(case),
        "variants": found, "failed": failed, "products": chosen(world.device) if world.device.type == "cuda" else [],
        "peak_bytes": torch.cuda.max_memory_allocated() if world.device.type == "cuda" else None,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for n, why in failed.items():
        print(n, why)
    return 1 if failed else 0


def prepare(names: list[str], variants: dict[str, Any], trainer: Any, step: Step, world: Any) -> tuple[dict[str, Any], dict[str, str]]:  # fmt: skip
    """What each variant's steps run within, compiled by three of them; and why a variant failed."""
    made: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for n in names:
        at = time.monotonic()
        try:
            made[n] = variants[n](trainer)
            with made[n]() as around:
                for _ in range(3):
                    loss = (around or step)()
            synchronize(world)
            print(f"{n} ready after {time.monotonic() - at:.1f} s, loss {float(loss):.4f}", flush=True)
        except Exception:  # noqa: BLE001  the others go on; its traceback is kept
            failed[n] = traceback.format_exc()[-1500:]
            made.pop(n, None)
            print(n, "failed", flush=True)
    return made, failed


def rounds(made: dict[str, Any], step: Step, args: argparse.Namespace, late: Callable[[], bool], world: Any) -> Any:  # fmt: skip
    """Seconds of a step in each window, and the last loss, of each variant."""
    gc.disable()
    took: dict[str, list[float]] = {n: [] for n in made}
    losses: dict[str, float] = {}
    for turn in range(args.rounds):
        if late():
            break
        first = turn % len(made)
        order = [*list(made)[first:], *list(made)[:first]]
        for n in order[:: -1 if turn % 2 else 1]:
            with made[n]() as around:
                (around or step)()
                synchronize(world)
                at = time.monotonic()
                for _ in range(args.steps):
                    loss = (around or step)()
                synchronize(world)
                took[n].append((time.monotonic() - at) / args.steps)
                losses[n] = float(loss)
    return took, losses


def compare(others: list[float], seconds: list[float]) -> tuple[float, float]:
    """(mean of others / seconds over the rounds, half of its 95 % interval)."""
    ratios = [a / b for a, b in zip(others, seconds, strict=True)]
    return statistics.mean(ratios), student(len(ratios)) * statistics.stdev(ratios) / len(ratios) ** 0.5


def chosen(device: torch.device) -> list[dict[str, Any]]:
    """Of each product TFLOP/s of cuBLASLt's first proposal and of the chosen one."""
    out = []
    for (a, sa, b, sb, base, _), p in products_of(device).problems.items():  # type: ignore[misc]
        flops = 2 * a[0] * a[1] * b[1]  # type: ignore[index]
        out.append({
            "a": [list(a), list(sa)], "b": [list(b), list(sb)], "added": base, "first_tflops": flops / p.seconds[0] / 1e12,  # type: ignore[call-overload]
            "best_tflops": flops / min(p.seconds) / 1e12, "proposals_tflops": [flops / s / 1e12 for s in p.seconds],
        })  # fmt: skip
        print(f"{list(a)} {list(sa)} x {list(b)} {list(sb)} added {base}: first {out[-1]['first_tflops']:.0f}, best {out[-1]['best_tflops']:.0f} TFLOP/s")  # type: ignore[call-overload] # fmt: skip
    return out


# --- variants: each takes the trainer and what fsdp2 needs once, and gives a context within which steps are its own (or a step of its own)


def blocks_of(trainer: Any) -> list[Any]:
    """The blocks of a trainer on one rank."""
    return list(trainer.stages[0].blocks.values())


def halves(trainer: Any, attended: Any, fed: Any, head: Any = torch.nn.Linear.forward) -> Any:
    """Other functions for the halves of each block, and for the head."""

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        last = trainer.stages[0].head
        old = [(b.attended, b.fed) for b in blocks_of(trainer)], last.forward
        for b in blocks_of(trainer):
            b.attended, b.fed = types.MethodType(attended, b), types.MethodType(fed, b)
        last.forward = types.MethodType(head, last)
        try:
            yield
        finally:
            for b, (x, y) in zip(blocks_of(trainer), old[0], strict=True):
                b.attended, b.fed = x, y
            last.forward = old[1]

    return within


def plain(trainer: Any) -> Any:
    """Products as torch makes them: the step that all are compared with."""
    return halves(trainer, torch.compile(_attended), torch.compile(_fed))


class Shared(torch.autograd.Function):
    """Products of one input with several weights, whose gradients for the input are added up where they are written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.save_for_backward(x, *weights)
        return tuple(product(x, w.t()) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        total = product(grads[0], weights[0])
        for g, w in zip(grads[1:], weights[1:], strict=True):
            total = add_product(total, g, w)
        return total, *(product(g.t(), x) for g in grads)


class Added(torch.autograd.Function):
    """The stream and a product, in one kernel."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return add_product(base, x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad, product(grad, weight), product(grad.t(), x)


def _attended_sums(self: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, t, d = x.shape
    a = self.attention
    q, k, v = Shared.apply(self.attention_norm(x).view(-1, d), a.query.weight, a.key.weight, a.value.weight)  # type: ignore[no-untyped-call]
    q, k = (rotate(z.view(b, t, -1, a.width), cos, sin).transpose(1, 2) for z in (q, k))
    y = a.attend(q, k, v.view(b, t, -1, a.width).transpose(1, 2), 0.0)
    out: Tensor = Added.apply(x.view(-1, d), y.transpose(1, 2).reshape(b * t, -1), a.out.weight)  # type: ignore[no-untyped-call]
    return out.view(b, t, d)


def _fed_sums(self: Block, x: Tensor) -> Tensor:
    d = x.shape[-1]
    f: Any = self.feed_forward
    gate, up = Shared.apply(self.forward_norm(x).view(-1, d), f.gate.weight, f.up.weight)  # type: ignore[no-untyped-call]
    out: Tensor = Added.apply(x.view(-1, d), torch.nn.functional.silu(gate) * up, f.down.weight)  # type: ignore[no-untyped-call]
    return out.view(x.shape)


def products(trainer: Any) -> Any:
    """cuBLASLt's algorithms chosen by measurement, residuals and gradients of inputs added in the products."""
    return halves(trainer, torch.compile(_attended_sums), torch.compile(_fed_sums))


def collecting(trainer: Any) -> Any:
    """As plain, with Python's garbage collector on, as it is outside this script."""
    as_plain = plain(trainer)

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        gc.enable()
        try:
            with as_plain():
                yield
        finally:
            gc.disable()

    return within


def pointwise(trainer: Any) -> Any:
    """As plain, with element-wise kernels whose block sizes inductor has tried (two minutes of compiling)."""
    return halves(
        trainer, torch.compile(_attended, options=POINTWISE), torch.compile(_fed, options=POINTWISE)
    )


def triton(trainer: Any) -> Any:
    """As plain, with products by Triton where inductor finds them faster than cuBLAS."""
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON", "triton.enable_persistent_tma_matmul": True, "epilogue_fusion": True}  # fmt: skip
    return halves(trainer, torch.compile(_attended, options=options), torch.compile(_fed, options=options))


def _attended(self: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return Block.attended(self, x, cos, sin)


def _fed(self: Block, x: Tensor) -> Tensor:
    return Block.fed(self, x)


@contextlib.contextmanager
def _mm(replacement: Any) -> Iterator[None]:
    """Another product in all compiled code."""
    from torch._inductor.select_algorithm import extern_kernels

    old = extern_kernels.mm  # type: ignore[attr-defined]
    extern_kernels.mm = replacement  # type: ignore[attr-defined]
    try:
        yield
    finally:
        extern_kernels.mm = old  # type: ignore[attr-defined]


def _chosen_mm(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    if not a.is_cuda:
        return torch.mm(a, b, out=out)
    return products_of(a.device).multiply(a, b, None, out)


def chosen_products(trainer: Any) -> Any:
    """As plain, with cuBLASLt's algorithm chosen by measurement, and sums in passes of their own."""
    return both(plain, lambda _: lambda: _mm(_chosen_mm))(trainer)


def transposed(trainer: Any) -> Any:
    """The same, and the backward pass reads a second, transposed copy of each weight, which is made again in each step."""
    weights = [p for b in blocks_of(trainer) for p in b.parameters() if p.ndim == 2]
    copies = {p.data_ptr(): torch.empty(p.shape[::-1], dtype=p.dtype, device=p.device) for p in weights}
    as_plain = plain(trainer)

    def multiply(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        other = copies.get(b.data_ptr()) if b.stride(1) == 1 else None
        return _chosen_mm(a, b if other is None else other.t(), out=out)

    def step() -> Any:
        with torch.no_grad():
            for p in weights:
                copies[p.data_ptr()].copy_(p.detach().t())
        return trainer.train_step(lambda: None, False)[0]

    @contextlib.contextmanager
    def within() -> Iterator[Step]:
        with as_plain(), _mm(multiply):
            yield step

    return within


def pair(trainer: Any) -> Any:
    """As plain, and what a half adds to the stream is added in the next half's norm."""
    stage = trainer.stages[0]
    attended, fed, last = torch.compile(_attended_pair), torch.compile(_fed_pair), torch.compile(_last_pair)

    def forward(self: Any, tokens: Tensor) -> Tensor:
        x, more = self.embedding(tokens), None
        for b in self.blocks.values():
            x, more = attended(b, x, more, self.cos, self.sin)
            x, more = fed(b, x, more)
        out: Tensor = self.head(last(self.norm, x, more))
        return out

    as_plain = plain(trainer)

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        stage.forward = types.MethodType(forward, stage)
        try:
            with as_plain():
                yield
        finally:
            del stage.forward

    return within


def _attended_pair(self: Block, x: Tensor, more: Tensor | None, cos: Tensor, sin: Tensor) -> Any:
    x = x if more is None else x + more
    return x, self.attention(self.attention_norm(x), cos, sin)


def _fed_pair(self: Block, x: Tensor, more: Tensor) -> Any:
    x = x + more
    return x, self.feed_forward(self.forward_norm(x))


def _last_pair(norm: Any, x: Tensor, more: Tensor) -> Any:
    return norm(x + more)


def beside(trainer: Any) -> Any:
    """As plain, and the update runs beside the next forward pass, which waits for a block's weights when it comes to it."""
    zero = trainer.zero
    if trainer.world.device.type != "cuda":
        return contextlib.nullcontext
    stream, as_plain = torch.cuda.Stream(), plain(trainer)

    @torch.no_grad()
    def update(optimizer: Any) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            zero.one_pass.begin(trainer.world.device)
            zero._scale.record_stream(stream)
            for unit in zero.units:
                grads = unit.reduced()
                zero.one_pass.update(
                    zip(unit.weights.values(), grads, unit.rows()[1], strict=True), zero._scale
                )
                for g in grads:
                    g.record_stream(stream)
                unit.drop_gradients()
                unit.ready = stream.record_event()

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        zero.update = update
        try:
            with as_plain():
                yield
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            del zero.update
            for unit in zero.units:
                unit.ready = None

    return within


def both(*made: Any) -> Any:
    """Several variants at once."""

    def begin(trainer: Any) -> Any:
        each = [m(trainer) for m in made]

        @contextlib.contextmanager
        def within() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for e in each:
                    stack.enter_context(e())
                yield

        return within

    return begin


VARIANTS: dict[str, Any] = {
    "plain": plain, "products": products, "chosen": chosen_products, "transposed": transposed, "pair": pair, "beside": beside,
    "pointwise": pointwise,
    "triton": triton, "collecting": collecting,
}  # fmt: skip
USUAL = ("products", "chosen", "transposed", "pair", "beside")


if __name__ == "__main__":
    sys.exit(main())
