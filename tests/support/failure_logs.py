"""Logs of failed training jobs, made from a seed, with labels: for measuring any diagnosis tool.

Each case is a folder with `case.json` and logs in the format of the public corpus that the benchmark reads. The
error texts are those that libraries and kernels really print; the jobs around them are invented: eight frameworks'
metric lines, launchers' tear-down, collective time-outs on the other ranks, and distractors that are no cause.

    python -m tests.support.failure_logs OUT --cases 200 --seed 1
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.progress.records.verdict import REASONS

_ST = "/opt/conda/lib/python3.11/site-packages"


@dataclass(frozen=True)
class Kind:
    """One kind of failure. `lines` are the error's own lines, the one with the root marked by a leading '>';
    `how`: all (every rank raises), one (one rank raises, the others time out), zero (rank 0 alone raises), kernel
    (node-level lines, then a CUDA error), node (the node vanishes), text (lines without a traceback), end (only how
    the job ended). `{node}`, `{bus}`, `{pid}`, `{gpu}`, `{rank}`, `{peer}`, `{stamp}`, `{sys}` are filled in."""

    reason: str
    how: str
    lines: tuple[str, ...]
    frames: tuple[str, ...] = ()
    recoverable: bool = False
    cordon: bool = False
    place: str = ""
    also: tuple[str, ...] = ()
    when: str = "middle"


def _k(reason: str, how: str, *lines: str, **kw: Any) -> Kind:
    return Kind(reason, how, lines, **kw)


_INFRA = {"recoverable": True}
_GPU = {"recoverable": True, "place": "gpu"}
_HW = {"recoverable": True, "cordon": True, "place": "gpu"}
KINDS: tuple[Kind, ...] = (
    # Hardware, seen by the kernel first.
    _k("ECCError", "kernel", ">{sys} kernel: NVRM: Xid (PCI:0000:{bus}:00): 48, pid={pid}, name=python, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 3, subpartition 0.", "{sys} kernel: NVRM: Xid (PCI:0000:{bus}:00): 63, pid={pid}, name=python, Row Remapper: New row marked for remapping, reset gpu to activate.", also=("CUDAError",), **_HW),
    _k("ECCError", "kernel", ">{sys} kernel: NVRM: Xid (PCI:0000:{bus}:00): 95, pid={pid}, name=python3, Uncontained: SM (0x1). RST: Yes, D-RST: No", also=("CUDAError",), **_HW),
    _k("ECCError", "kernel", ">{sys} kernel: NVRM: Xid (PCI:0000:{bus}:00): 64, pid={pid}, name=python3, Row Remapper: Failed to remap row", also=("CUDAError",), **_HW),
    _k("ECCError", "one", ">RuntimeError: CUDA error: uncorrectable ECC error encountered", frames=(f"{_ST}/torch/autograd/graph.py:_engine_run_backward",), **_HW),
    _k("NVLinkError", "kernel", ">{sys} kernel: NVRM: Xid (PCI:0000:{bus}:00): 74, pid={pid}, name=python3, NVLink: fatal error detected on link 4(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", also=("CUDAError",), **_HW),
    _k("NVLinkError", "kernel", ">{sys} kernel: NVRM: Xid (PCI:0000:{bus}:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 12 (0x00000004 0x80000000 0x00000000 0x00000000 0x00000000 0x00000000)", also=("CUDAError",), **_HW),
    _k("NVLinkError", "one", ">RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", frames=(f"{_ST}/torch/autograd/graph.py:_engine_run_backward",), **_HW),
    _k("CUDAError", "kernel", ">{sys} kernel: NVRM: Xid (PCI:0000:{bus}:00): 119, pid={pid}, name=python3, Timeout after 6s of waiting for RPC response from GPU{gpu} GSP! Expected function 76 (GSP_RM_CONTROL)", **_HW),
    _k("CUDAError", "one", ">RuntimeError: CUDA error: unspecified launch failure", frames=(f"{_ST}/torch/autograd/graph.py:_engine_run_backward",), **_GPU),
    _k("CUDAError", "one", ">RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`", frames=(f"{_ST}/torch/nn/modules/linear.py:forward",), **_GPU),
    _k("CUDAError", "one", ">torch.AcceleratorError: CUDA error: misaligned address", frames=(f"{_ST}/torch/_tensor.py:backward",), **_GPU),
    _k("NodeFailure", "node", ">{sys} kernel: Kernel panic - not syncing: Fatal exception in interrupt", recoverable=True, cordon=True, place="node", also=("NCCLRemoteError",)),
    _k("NodeFailure", "node", ">{sys} kernel: watchdog: BUG: soft lockup - CPU#17 stuck for 23s! [python3:{pid}]", recoverable=True, cordon=True, place="node", also=("NCCLRemoteError",)),
    _k("NodeFailure", "node", ">[{stamp}] error: Node {node} unexpectedly rebooted", recoverable=True, cordon=True, place="node", also=("NCCLRemoteError",)),
    _k("NodeFailure", "node", ">{stamp} Warning NodeNotReady pod/train-worker-3 Node {node} status is now: NodeNotReady", recoverable=True, cordon=True, place="node", also=("NCCLRemoteError",)),
    # Network and services.
    _k("NetworkError", "one", ">{node}:{pid}:{pid} [{gpu}] transport/net_ib.cc:1295 NCCL WARN NET/IB: Got completion from peer {peer}<51432> with status=12 opcode=0 len=0 vendor err 129 (Send)", recoverable=True, cordon=True, place="rank"),
    _k("NetworkError", "zero", ">OSError: [Errno 101] Network is unreachable", frames=("/usr/lib/python3.11/socket.py:create_connection",), recoverable=True),
    _k("NetworkError", "one", ">OSError: [Errno 113] No route to host", frames=("/usr/lib/python3.11/socket.py:create_connection",), recoverable=True),
    _k("ConnectionError", "zero", ">requests.exceptions.ConnectionError: HTTPSConnectionPool(host='alerts.example.com', port=443): Max retries exceeded with url: /push (Caused by NewConnectionError('<urllib3.connection.HTTPSConnection object>: Failed to establish a new connection: [Errno 111] Connection refused'))", frames=(f"{_ST}/requests/adapters.py:send",), **_INFRA),
    _k("ConnectionError", "zero", ">ConnectionResetError: [Errno 104] Connection reset by peer", frames=("/usr/lib/python3.11/ssl.py:read",), **_INFRA),
    _k("ConnectionError", "zero", ">wandb.errors.CommError: Run initialization has timed out after 90.0 sec.", frames=(f"{_ST}/wandb/sdk/wandb_init.py:init",), when="start", **_INFRA),
    _k("ConnectionError", "all", ">torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 29500).", frames=(f"{_ST}/torch/distributed/rendezvous.py:_create_c10d_store",), when="start", **_INFRA),
    _k("S3StorageError", "zero", ">botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: \"https://ckpt.s3.example.com/run/model.pt\"", frames=(f"{_ST}/botocore/httpsession.py:send",), **_INFRA),
    _k("S3StorageError", "zero", ">botocore.exceptions.ClientError: An error occurred (InternalError) when calling the UploadPart operation (reached max retries: 4): We encountered an internal error. Please try again.", frames=(f"{_ST}/boto3/s3/transfer.py:upload_file",), **_INFRA),
    _k("S3StorageError", "one", ">botocore.exceptions.ReadTimeoutError: Read timeout on endpoint URL: \"https://data.s3.example.com/shard-00031.tar\"", frames=(f"{_ST}/botocore/response.py:read",), **_INFRA),
    _k("NCCLTimeoutError", "text", ">", recoverable=True, place="missing"),
    _k("NCCLTimeoutError", "all", ">RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", frames=(f"{_ST}/torch/distributed/distributed_c10d.py:all_reduce",), **_INFRA),
    _k("NCCLRemoteError", "remote", ">ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.", **_INFRA),
    # Memory and loaders.
    _k("OutOfMemoryError", "one", ">torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU {gpu} has a total capacity of 79.15 GiB of which 1.31 GiB is free.", frames=(f"{_ST}/torch/nn/functional.py:linear",), place="gpu"),
    _k("OutOfMemoryError", "all", ">torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 3.31 GiB is free.", frames=(f"{_ST}/torch/nn/modules/module.py:convert",), when="start"),
    _k("DataloaderKilled", "one", ">RuntimeError: DataLoader worker (pid {pid}) is killed by signal: Killed. ", frames=(f"{_ST}/torch/utils/data/_utils/signal_handling.py:handler",), recoverable=True, place="rank"),
    _k("DataloaderKilled", "one", ">RuntimeError: DataLoader worker (pid(s) {pid}) exited unexpectedly", frames=(f"{_ST}/torch/utils/data/dataloader.py:_try_get_data",), recoverable=True, place="rank"),
    _k("DataloaderKilled", "one", ">RuntimeError: DataLoader worker (pid {pid}) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.", frames=(f"{_ST}/torch/utils/data/_utils/signal_handling.py:handler",), recoverable=True, place="rank"),
    # The program.
    _k("AttributeError", "all", ">AttributeError: module 'torch.library' has no attribute 'custom_op'", frames=("/workspace/train/ops.py:<module>",), when="start"),
    _k("AttributeError", "all", ">AttributeError: 'NoneType' object has no attribute 'shape'", frames=("/workspace/train/model.py:forward",)),
    _k("AssertionError", "all", ">AssertionError: num_attention_heads (30) must be divisible by tensor parallel size (8)", frames=("/workspace/megatron/core/transformer.py:__init__",), when="start"),
    _k("AssertionError", "one", ">AssertionError: Rank {rank}: found NaN in local grad norm in backward pass before data-parallel communication collective. Device: {gpu}, node: {node}", frames=("/workspace/megatron/core/distributed/param_and_grad_buffer.py:check_grads",), recoverable=True, place="gpu"),
    _k("ValueError", "all", ">ValueError: Attention mask should be of size (4, 1, 4096, 4096), but is torch.Size([4, 1, 4096, 8192])", frames=(f"{_ST}/transformers/models/llama/modeling_llama.py:forward",)),
    _k("ValueError", "zero", ">json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", frames=("/usr/lib/python3.11/json/decoder.py:raw_decode",), when="start"),
    _k("RuntimeError", "all", ">RuntimeError: mat1 and mat2 shapes cannot be multiplied (8192x4096 and 5120x5120)", frames=(f"{_ST}/torch/nn/modules/linear.py:forward",)),
    _k("RuntimeError", "all", ">RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!", frames=("/workspace/train/model.py:forward",)),
    _k("RuntimeError", "all", ">NotImplementedError: Cannot copy out of meta tensor; no data!", frames=(f"{_ST}/torch/nn/modules/module.py:convert",), when="start"),
    _k("ZeroDivisionError", "zero", ">ZeroDivisionError: float division by zero", frames=("/workspace/train/metrics.py:mean",)),
    _k("ModelLoadingError", "all", ">RuntimeError: Error(s) in loading state_dict for GPTModel:", "\tMissing key(s) in state_dict: \"decoder.layers.0.self_attention.linear_qkv.weight\".", frames=(f"{_ST}/torch/nn/modules/module.py:load_state_dict",), when="start", also=("RuntimeError",)),
    _k("ModelLoadingError", "all", ">OSError: /models/llama-70b does not appear to have a file named model-00003-of-00030.safetensors.", frames=(f"{_ST}/transformers/utils/hub.py:cached_file",), when="start", also=("OSError",)),
    _k("ModelLoadingError", "all", ">safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", frames=(f"{_ST}/transformers/modeling_utils.py:load_state_dict",), when="start"),
    _k("DatasetLoadingError", "zero", ">datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset", frames=(f"{_ST}/datasets/builder.py:_prepare_split_single",), when="start"),
    _k("DatasetLoadingError", "all", ">datasets.exceptions.DataFilesNotFoundError: No (supported) data files found in /mnt/data/pile", frames=(f"{_ST}/datasets/load.py:dataset_module_factory",), when="start"),
    _k("FileNotFoundError", "all", ">FileNotFoundError: [Errno 2] No such file or directory: '/mnt/data/tokens/train_text_document.idx'", frames=("/workspace/megatron/core/datasets/indexed_dataset.py:__init__",), when="start"),
    _k("FileNotFoundError", "one", ">FileNotFoundError: [Errno 2] No such file or directory: '/mnt/ckpt/iter_0001000/mp_rank_{rank:02d}/distrib_optim.pt'", frames=("/workspace/megatron/training/checkpointing.py:load_checkpoint",), when="start", place="rank"),
    _k("OSError", "zero", ">OSError: [Errno 28] No space left on device", frames=(f"{_ST}/torch/serialization.py:_save",)),
    _k("OSError", "zero", ">OSError: [Errno 122] Disk quota exceeded", frames=("/workspace/train/checkpoint.py:save",)),
    _k("OSError", "one", ">OSError: [Errno 24] Too many open files: '/mnt/data/shard_0193.bin'", frames=("/workspace/train/data.py:__getitem__",), place="rank"),
    _k("TypeError", "all", ">TypeError: LlamaAttention.__init__() missing 1 required positional argument: 'layer_idx'", frames=("/workspace/train/model.py:__init__",), when="start"),
    _k("NameError", "all", ">NameError: name 'rearrange' is not defined. Did you mean: 'range'?", frames=("/workspace/train/attention.py:forward",), when="start"),
    _k("NameError", "all", ">UnboundLocalError: cannot access local variable 'grad_norm' where it is not associated with a value", frames=("/workspace/train/loop.py:step",)),
    _k("PermissionError", "zero", ">PermissionError: [Errno 13] Permission denied: '/mnt/ckpt/shared/run7/latest'", frames=("/workspace/train/checkpoint.py:save",)),
    _k("ImportError", "all", ">ModuleNotFoundError: No module named 'transformer_engine'", frames=("/workspace/train/train.py:<module>",), when="start"),
    _k("ImportError", "all", ">ImportError: cannot import name 'LlamaFlashAttention2' from 'transformers.models.llama.modeling_llama' (/opt/conda/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py)", frames=("/workspace/train/patch.py:<module>",), when="start"),
    _k("KeyError", "all", ">KeyError: 'input_ids'", frames=("/workspace/train/collate.py:__call__",)),
    _k("SyntaxError", "all", ">SyntaxError: invalid syntax. Perhaps you forgot a comma?", frames=("/workspace/train/config.py:<module>",), when="start"),
    _k("SyntaxError", "all", ">IndentationError: unindent does not match any outer indentation level", frames=("/workspace/train/config.py:<module>",), when="start"),
    _k("ArgumentError", "usage", ">train.py: error: the following arguments are required: --data-path", when="start"),
    _k("ArgumentError", "usage", ">train.py: error: argument --lr: invalid float value: '3e-4x'", when="start"),
    _k("CalledProcessError", "all", ">subprocess.CalledProcessError: Command '['make', '-C', '/workspace/megatron/core/datasets']' returned non-zero exit status 2.", frames=("/usr/lib/python3.11/subprocess.py:run",), when="start"),
    _k("IndexError", "all", ">IndexError: index 50304 is out of bounds for dimension 0 with size 50304", frames=("/workspace/train/embed.py:forward",)),
    # Endings.
    _k("Hang", "end", ">slurmstepd: error: *** JOB 4711 ON {node} CANCELLED AT {late} DUE TO TIME LIMIT ***", recoverable=True),
    _k("Hang", "end", ">[{late_stamp}] operator: no step for 95 min, scancel 4711", recoverable=True),
    _k("LossSpike", "spike", ">[{stamp}] training guard: loss 9.61 above 3x its mean for 8 steps, exiting", recoverable=True),
    _k("Unknown", "cut", ">", recoverable=True),
    _k("Success", "end", ">[{stamp}] job 4711 COMPLETED ExitCode 0:0"),
    _k("Success", "end", ">[{stamp}] training finished: all steps done, exit code 0"),
    _k("TimeLimit", "end", ">slurmstepd: error: *** JOB 4711 ON {node} CANCELLED AT {iso} DUE TO TIME LIMIT ***"),
    _k("Cancelled", "end", ">slurmstepd: error: *** JOB 4711 ON {node} CANCELLED AT {iso} ***"),
    _k("Preempted", "end", ">slurmstepd: error: *** JOB 4711 ON {node} CANCELLED AT {iso} DUE TO PREEMPTION ***"),
)  # fmt: skip

_METRICS: dict[str, Callable[[datetime.datetime, int, float], str]] = {
    "megatron": lambda t, n, x: f" [{t:%Y-%m-%d %H:%M:%S}] iteration {n:8d}/   50000 | consumed samples: {n * 2048:12d} | elapsed time per iteration (ms): 4871.8 | learning rate: 1.500000E-04 | global batch size:  2048 | lm loss: {x:.6E} | loss scale: 1.0 | grad norm: 0.378 | number of skipped iterations:   0 | number of nan iterations:   0 |",
    "titan": lambda t, n, x: f"[rank0]:[titan] {t:%Y-%m-%d %H:%M:%S},360 - root - INFO - step: {n:5d}  loss: {x:7.4f}  grad_norm:  0.3547  memory: 61.88GiB(77.44%)  tps: 5,743  tflops: 295.84  mfu: 29.75%",
    "hf": lambda t, n, x: f"{{'loss': {x:.4f}, 'grad_norm': 0.4878, 'learning_rate': 1.95832e-05, 'epoch': {n / 4000:.4f}}}",
    "nemo": lambda t, n, x: f"Training epoch 0, iteration {n}/249999 | lr: 0.0001351 | global_batch_size: 512 | global_step: {n} | reduced_train_loss: {x:.4f} | train_step_timing in s: 4.335 | consumed_samples: {n * 512}",
    "deepspeed": lambda t, n, x: f"[{t:%Y-%m-%d %H:%M:%S},017] [INFO] [logging.py:128:log_dist] [Rank 0] step={n}, skipped=0, lr=[2e-05], mom=[(0.9, 0.95)]\nsteps: {n} loss: {x:.4f} iter time (s): 5.409 samples/sec: 378.599",
    "internevo": lambda t, n, x: f"{t:%Y-%m-%d %H:%M:%S},422\tINFO\trecord_metrics.py:341 in record_current_batch_training_metrics -- tflops: 185.4, step: {n}, loss: {x:.6f}, tgs (tokens/gpu/second): 4063.27, lr: 0.0001, loss_scale: 65536.0",
    "lightning": lambda t, n, x: f"Epoch 0:  12%|█▏        | {n}/80000 [10:11<59:12,  4.9it/s, v_num=3, train_loss={x:.3f}]",
    "plain": lambda t, n, x: f"{t:%Y-%m-%d %H:%M:%S} INFO train.py:88 - step {n} loss {x:.4f} lr 1.5e-04".replace(" loss ", " loss="),
}  # fmt: skip
_BUSES = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")
_NOISE = (
    "[{stamp}] WARNING metrics exporter: push to gateway failed (timeout 5s), will retry with next batch",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "[rank2]:[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=62): Connection was likely closed; retrying",
    f"{_ST}/torch/utils/checkpoint.py:403: UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    "[{stamp}] INFO loader: skipped 3 documents with decode errors in shard 01354 (tolerated)",
)
_DISTRACTORS = (
    (),
    (),
    ("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB.", "[{stamp}] WARN rank 1: micro-batch split in two and step repeated (handled)"),
    ('[{stamp}] eval sample 12 completion: "KeyError: \'x\' means that the key is missing; RuntimeError: CUDA error ..." (model text)',),
    ("{sysforeign} kernel: NVRM: Xid (PCI:0000:3a:00): 79, pid=1, GPU has fallen off the bus.",),
    ("[rank3]:[E ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.", "[{stamp}] in-job restart 1/3: all ranks re-joined, training goes on"),
    ("{node0}:2351:2784 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error",),
    ("[{stamp}] WARNING telemetry plug-in raised KeyError: 'gpu_temp' (ignored, plug-in disabled)",),
)  # fmt: skip


@dataclass
class _Job:
    """One invented job while it is written."""

    rng: random.Random
    framework: str
    nodes: list[str]
    per_node: int
    now: datetime.datetime
    lines: list[str] = field(default_factory=list)
    step: int = 0

    @property
    def world(self) -> int:
        return len(self.nodes) * self.per_node

    def node(self, rank: int) -> str:
        return self.nodes[rank // self.per_node]

    def fill(self, text: str, rank: int) -> str:
        late = self.now + datetime.timedelta(hours=9)
        gpu = rank % self.per_node
        return text.format(
            node=self.node(rank), node0=self.nodes[0], bus=_BUSES[gpu % 8], pid=2000 + rank, gpu=gpu, rank=rank, peer="10.9.8.7",
            stamp=f"{self.now:%Y-%m-%d %H:%M:%S}", iso=f"{self.now:%Y-%m-%dT%H:%M:%S}", late=f"{late:%Y-%m-%dT%H:%M:%S}",
            late_stamp=f"{late:%Y-%m-%d %H:%M:%S}", sys=f"{self.now:%b %e %H:%M:%S} {self.node(rank)}", sysforeign=f"{self.now:%b %e %H:%M:%S} node-999",
        )  # fmt: skip

    def say(self, *lines: str) -> None:
        self.lines += lines

    def glog(self, level: str) -> str:
        return f"{level}{self.now:%m%d %H:%M:%S}.{self.rng.randrange(10**9):09d}"

    def train(self, n: int, loss: float = 2.0) -> None:
        for _ in range(n):
            self.step += 1
            self.now += datetime.timedelta(seconds=5)
            self.say(
                *_METRICS[self.framework](self.now, self.step, loss + self.rng.gauss(0, 0.01)).split("\n")
            )
            if self.rng.random() < 0.02:
                self.say(self.fill(self.rng.choice(_NOISE), 0))

    def start(self) -> None:
        self.say(
            f"[{self.now:%Y-%m-%d %H:%M:%S}] submitting job 4711 partition=llm nodes={len(self.nodes)} nodelist={','.join(self.nodes)} gpus_per_node={self.per_node}"
        )
        for r in range(self.world):
            gpu = r % self.per_node
            self.say(
                f"{self.node(r)}:{2000 + r}:{2300 + r} [{gpu}] NCCL INFO comm 0x{self.rng.randrange(16**10):x} rank {r} nranks {self.world} cudaDev {gpu} nvmlDev {gpu} busId {_BUSES[gpu % 8]}000 commId 0xbc07 - Init COMPLETE"
            )

    def traceback(self, rank: int, kind: Kind) -> int:
        """Writes one rank's traceback and returns the line of its root."""
        p = f"[rank{rank}]: "
        self.say(
            p + "Traceback (most recent call last):",
            p + '  File "/workspace/train/train.py", line 659, in <module>',
            p + "    main(cfg)",
        )
        for f in kind.frames:
            file, _, name = f.rpartition(":")
            self.say(
                p + f'  File "{file}", line {self.rng.randrange(20, 900)}, in {name}',
                p + "    return self._run(args)",
            )
        at = 0
        for text in kind.lines:
            self.say(p + self.fill(text.removeprefix(">"), rank))
            at = len(self.lines) if text.startswith(">") else at
        return at

    def timeouts(self, but: Sequence[int]) -> None:
        self.now += datetime.timedelta(seconds=600)
        ranks = [r for r in range(self.world) if r not in but]
        self.rng.shuffle(ranks)
        for r in ranks:
            p = f"[rank{r}]:[{self.glog('E')} ProcessGroupNCCL.cpp:632] "
            self.say(
                f"{p}[Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4521, OpType=ALLREDUCE, NumelIn=16384000, NumelOut=16384000, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
                f"{p}[Rank {r}] To avoid data inconsistency, we are taking the entire process down.",
            )

    def tear_down(self, rank: int, code: int) -> None:
        self.now += datetime.timedelta(seconds=3)
        host, local = self.node(rank), rank % self.per_node
        self.say(
            f"{self.glog('W')} 1148 torch/distributed/elastic/multiprocessing/api.py:897] Sending process {2000 + (rank + 1) % self.world} closing signal SIGTERM",
            f"{self.glog('E')} 1148 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: {local} (pid: {2000 + rank}) of binary: /opt/conda/bin/python",
            "Traceback (most recent call last):", '  File "/opt/conda/bin/torchrun", line 8, in <module>', "    sys.exit(main())",
            f'  File "{_ST}/torch/distributed/launcher/api.py", line 259, in launch_agent', "    raise ChildFailedError(",
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "=" * 60, "train.py FAILED", "-" * 60, "Failures:",
            "  <NO_OTHER_FAILURES>", "-" * 60, "Root Cause (first observed failure):", "[0]:", f"  time      : {self.now:%Y-%m-%d_%H:%M:%S}",
            f"  host      : {host}", f"  rank      : {rank} (local_rank: {local})", f"  exitcode  : {code} (pid: {2000 + rank})", "  error_file: <N/A>", "=" * 60,
            f"srun: error: {host}: task {rank // self.per_node}: Exited with exit code 1", "srun: Terminating StepId=4711.0",
            f"slurmstepd: error: *** STEP 4711.0 ON {self.nodes[0]} CANCELLED AT {self.now:%Y-%m-%dT%H:%M:%S} ***",
        )  # fmt: skip


def make(kind: Kind, framework: str, seed: int, distractor: int = 0) -> tuple[list[str], dict[str, Any]]:
    """(lines, label) of one case."""
    rng = random.Random(seed)
    nodes = [f"node-{n:03d}" for n in sorted(rng.sample(range(1, 400), rng.choice((2, 2, 4))))]
    job = _Job(
        rng,
        framework,
        nodes,
        rng.choice((4, 8)),
        datetime.datetime(2026, rng.randrange(1, 12), rng.randrange(1, 28), rng.randrange(0, 12), 3),
    )
    job.start()
    rank = rng.randrange(1, job.world)
    if kind.when == "middle":
        job.train(rng.randrange(30, 120))
        for text in _DISTRACTORS[distractor % len(_DISTRACTORS)]:
            job.say(job.fill(text, 0))
        job.train(rng.randrange(20, 80))
    at, cut = _fail(job, kind, rank)
    text = job.lines[at - 1] if at else ""
    reason = kind.reason
    faulty = None
    if kind.place:
        where = job.node(rank)
        faulty = {
            "node": where,
            "rank": None if kind.place == "node" else rank,
            "gpu": rank % job.per_node if kind.place in ("gpu", "missing") else None,
        }
    healthy = reason in ("Success", "TimeLimit", "Cancelled", "Preempted")
    category = REASONS[reason].value if reason in REASONS else "None" if healthy else "Unknown"
    label = {
        "category": category, "reason": reason, "evidence": re.escape(text), "faulty": faulty, "recoverable_by_restart": kind.recoverable,
        "needs_node_cordon": kind.cordon, "acceptable_reasons": [reason, *kind.also], "difficulty": "generated", "framework": framework,
        "world_size": job.world, "files": ["log.txt"], "evidence_file": "log.txt", "evidence_line": at, "distractor": distractor % len(_DISTRACTORS), "cut": cut,
    }  # fmt: skip
    return job.lines, label


def _fail(job: _Job, kind: Kind, rank: int) -> tuple[int, bool]:
    """Writes how the job fails; returns the root's line and whether the log is cut off."""
    how, code = kind.how, 1
    if how == "end":
        job.say(*(job.fill(x.removeprefix(">"), 0) for x in kind.lines))
        return len(job.lines), False
    if how == "cut":
        job.train(1)
        job.lines[-1] = job.lines[-1][: len(job.lines[-1]) * 2 // 3]
        return len(job.lines), True
    if how == "spike":
        at = len(job.lines) + 1
        for x in (4.0, 6.5, 8.0, 9.0, 9.5, 9.6, 9.61, 9.6):
            job.train(1, x)
        job.say(job.fill(kind.lines[0].removeprefix(">"), 0))
        while "loss" not in job.lines[at - 1] or "step=" in job.lines[at - 1]:
            at += 1
        return at, False
    if how == "text":
        at = len(job.lines) + 1
        job.timeouts([rank])
        job.tear_down((rank + 1) % job.world, -6)
        return at, False
    if how == "usage":
        at = len(job.lines) + 2
        for _ in range(job.world):
            job.say("usage: train.py [-h] [--data-path PATH] [--lr LR]", kind.lines[0].removeprefix(">"))
        job.tear_down(0, 2)
        return at, False
    if how == "kernel":
        at = len(job.lines) + 1
        job.say(*(job.fill(x.removeprefix(">"), rank) for x in kind.lines))
        cuda = Kind(
            "CUDAError",
            "one",
            (
                ">RuntimeError: CUDA error: unspecified launch failure",
                "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
            ),
        )
        job.traceback(rank, cuda)
        job.timeouts([rank])
        job.tear_down(rank, -6)
        return at, False
    if how in ("node", "remote"):
        at = len(job.lines) + 1
        if how == "node":
            job.say(*(job.fill(x.removeprefix(">"), rank) for x in kind.lines))
        for other in range(job.world):
            if job.node(other) != job.node(rank) and other % job.per_node < 2:
                p = f"[rank{other}]: "
                job.say(
                    f"{job.node(other)}:{2000 + other}:{2300 + other} [{other % job.per_node}] misc/socket.cc:531 NCCL WARN Net : Connection closed by remote peer {job.node(rank)}<34271>",
                    p
                    + "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5",
                    p
                    + "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
                )
                if how == "remote" and at == len(job.lines) - 2:
                    at = len(job.lines)
        if how == "node":
            job.say(f"srun: error: Node failure on {job.node(rank)}")
        other = next(r for r in range(job.world) if job.node(r) != job.node(rank))
        job.tear_down(other, -6)
        return at, False
    ranks = range(job.per_node) if how == "all" else [0] if how == "zero" else [rank]
    at = 0
    if kind.lines[0].startswith(">{node}:{pid}"):
        job.say(job.fill(kind.lines[0][1:], rank))
        at = len(job.lines)
    else:
        for r in ranks:
            line = job.traceback(r, kind)
            at = at or line
    if how == "one":
        job.timeouts([rank])
        code = 1
    job.tear_down(ranks[0], code)
    return at, False


def write(folder: Path, name: str, lines: Sequence[str], label: dict[str, Any]) -> None:
    """Writes one case."""
    case = folder / name
    case.mkdir(parents=True, exist_ok=True)
    cut = label.pop("cut", False)
    text = "\n".join(lines) + ("" if cut else "\n")
    (case / "log.txt").write_text(text, "utf-8")
    (case / "case.json").write_text(
        json.dumps(label | {"bytes": len(text.encode()), "lines": len(lines)}, indent=1) + "\n"
    )


def generate(folder: Path, cases: int, seed: int) -> int:
    """Writes `cases` cases below `folder`, all kinds in turn with frameworks and distractors varying."""
    rng = random.Random(seed)
    frameworks = list(_METRICS)
    for i in range(cases):
        kind = KINDS[i % len(KINDS)]
        lines, label = make(
            kind, rng.choice(frameworks), rng.randrange(2**31), rng.randrange(len(_DISTRACTORS))
        )
        write(folder, f"g{i + 1:04d}", lines, label)
    return cases


def main() -> None:
    """The command line of the generator."""
    parser = argparse.ArgumentParser(description="Write labelled logs of failed training jobs.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", type=int, default=len(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{generate(args.out, args.cases, args.seed)} cases below {args.out}")


if __name__ == "__main__":
    main()
