"""Labelled logs of kinds that trained eyes know and rules may not: other frameworks, wrappers, launchers, machines.

Each was written from public reports of its framework before the rules were tried on it (a held-out check). `reasons`
are the acceptable answers ("Success" and "Cancelled" stand for endings that are no failure, "Unknown" for an honest one),
`evidence` fits the decisive line, `stop` says whether a restart of the same job is pointless.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Wild:
    """One case: its logs by name, and what a careful reader concludes."""

    name: str
    logs: dict[str, list[str]]
    reasons: tuple[str, ...]
    evidence: str = "."
    stop: bool | None = None


def steps(n: int = 30, form: str = "step {i} loss {loss:.4f} lr 1.00e-04", start: int = 0) -> list[str]:
    """Metric lines of a healthy run."""
    return [
        form.format(
            i=start + i * 10, loss=3.0 - i * 0.01, s=f"{i % 60:02d}", m=f"{i // 60:02d}", t=f"2026-05-02 11:{i // 60:02d}:{i % 60:02d}"
        )
        for i in range(1, n + 1)
    ]  # fmt: skip


def tb(
    last: str, *frames: str, tag: str = "", header: str = "Traceback (most recent call last):"
) -> list[str]:
    """A traceback whose frames lie in the named files."""
    rows = [header]
    for f in frames or ("train.py",):
        rows += [f'  File "/work/src/{f}", line 120, in run', "    out = self.call(*args, **kwargs)"]
    return [tag + r for r in [*rows, *last.split("\n")]]


CAUSE = ["", "The above exception was the direct cause of the following exception:", ""]
DURING = ["", "During handling of the above exception, another exception occurred:", ""]
MEGATRON = " [{t}] iteration {i:8d}/   50000 | consumed samples: {i:12d} | elapsed time per iteration (ms): 2104.1 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.412 | number of skipped iterations:   0 | number of nan iterations:   0 |"


def kernel(lines: list[str], host: str = "nid001234") -> list[str]:
    """A syslog of the kernel that is quiet but for `lines`."""
    quiet = ["usb 1-1: new high-speed USB device number 4 using xhci_hcd", "EXT4-fs (sda2): re-mounted. Opts: errors=remount-ro", "IPv6: ADDRCONF(NETDEV_UP): hsn0: link is not ready",
             "perf: interrupt took too long (3140 > 3131), lowering kernel.perf_event_max_sample_rate to 63500", "nfs: server nas3 OK", "audit: backlog limit exceeded",
             "ACPI BIOS Error (bug): Could not resolve symbol", "systemd[1]: Started Session 411 of user root.", "nvidia-modeset: Loading NVIDIA Kernel Mode Setting Driver"]  # fmt: skip
    rows = [*quiet * 5, *lines, *quiet[:4]]
    return [f"May  4 03:{i // 60:02d}:{i % 60:02d} {host} kernel: {x}" for i, x in enumerate(rows)]


def _json(lines: list[str], field: str = "message") -> list[str]:
    return [
        json.dumps({"ts": "2026-05-02T11:00:00Z", "severity": "INFO", field: x, "pod": "t-0"}) for x in lines
    ]


CASES: tuple[Wild, ...] = (
    # Wrappers
    Wild("retry-error-gcs", {"log.txt": steps() + tb("google.api_core.exceptions.ServiceUnavailable: 503 GET https://storage.googleapis.com/b/run/o/idx: We encountered an internal error. Please try again.", "store.py") + CAUSE
          + tb("tenacity.RetryError: RetryError[<Future at 0x7f2 state=finished raised ServiceUnavailable>]", "train.py", "tenacity/__init__.py")}, ("S3StorageError", "ConnectionError"), "503 GET|ServiceUnavailable", False),
    Wild("ray-tune-index", {"log.txt": [f"(RayTrainWorker pid=411, ip=10.0.3.8) {x}" for x in steps()] + tb("ray.exceptions.RayTaskError(IndexError): ray::RayTrainWorker._RayTrainWorker__execute() (pid=411, ip=10.0.3.8, actor_id=a1)\n"
          '  File "/srv/fit.py", line 88, in loop\n    lr = table[step]\nIndexError: list index out of range', "ray/_private/worker.py")}, ("IndexError",), "IndexError: list index", True),
    Wild("concurrent-futures", {"log.txt": steps() + ["concurrent.futures.process._RemoteTraceback: ", '"""'] + tb("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 12: invalid start byte", "concurrent/futures/process.py", "tokenize.py")
          + ['"""', *CAUSE] + tb("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 12: invalid start byte", "prep.py")}, ("ValueError",), "UnicodeDecodeError", True),
    Wild("joblib", {"log.txt": steps(10, "shard {i} packed") + ["joblib.externals.loky.process_executor._RemoteTraceback: ", '"""'] + tb("PermissionError: [Errno 13] Permission denied: '/proj/corpus/part-0031.arrow'", "joblib/externals/loky/process_executor.py", "pack.py")
          + ['"""', *CAUSE] + tb("PermissionError: [Errno 13] Permission denied: '/proj/corpus/part-0031.arrow'", "main.py")}, ("PermissionError",), "Permission denied", True),
    Wild("dataloader-oserror", {"log.txt": steps() + tb("OSError: Caught OSError in DataLoader worker process 2.\nOriginal Traceback (most recent call last):\n"
          '  File "/opt/torch/utils/data/_utils/worker.py", line 309, in _worker_loop\n    data = fetcher.fetch(index)\nOSError: [Errno 116] Stale file handle', "torch/utils/data/dataloader.py")}, ("OSError",), "Stale file handle", False),
    Wild("lightning-wrapped", {"log.txt": steps() + tb("RuntimeError: stack expects each tensor to be equal size, but got [3, 224, 224] at entry 0 and [1, 224, 224] at entry 5", "collate.py") + DURING
          + tb("RuntimeError: Caught RuntimeError in pin memory thread for device 0.", "torch/utils/data/dataloader.py")}, ("RuntimeError",), "stack expects each tensor", True),
    Wild("accelerate-called-process", {"log.txt": steps() + tb("FileNotFoundError: [Errno 2] No such file or directory: '/datasets/coco/val.json'", "sd3.py")
          + tb("subprocess.CalledProcessError: Command '['/usr/bin/python3', 'sd3.py', '--bf16']' returned non-zero exit status 1.", "accelerate/commands/launch.py")}, ("FileNotFoundError",), "val.json", True),
    Wild("mp-spawn", {"log.txt": steps() + tb('torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 3 terminated with the following error:\nTraceback (most recent call last):\n  File "/opt/torch/multiprocessing/spawn.py", line 90, in _wrap\n'
          '    fn(i, *args)\n  File "/srv/ddp.py", line 51, in worker\n    model = build(cfg.width)\nAttributeError: \'Config\' object has no attribute \'width\'', "torch/multiprocessing/spawn.py")}, ("AttributeError",), "has no attribute 'width'", True),
    Wild("exception-group-timeout", {"log.txt": steps() + ["  + Exception Group Traceback (most recent call last):", '  |   File "/srv/rl/run.py", line 10, in <module>', "  |     asyncio.run(main())",
          "  | ExceptionGroup: errors in rollout workers (2 sub-exceptions)", "  +-+---------------- 1 ----------------", "    | Traceback (most recent call last):", '    |   File "/srv/rl/env.py", line 31, in step', "    |     return self.sim[k]",
          "    | KeyError: 'reward_model'", "    +---------------- 2 ----------------", "    | Traceback (most recent call last):", '    |   File "/srv/rl/env.py", line 77, in close', "    |     raise RuntimeError(self)", "    | RuntimeError: pool closed", "    +------------------------------------"]}, ("KeyError",), "reward_model", True),
    # Decoration
    Wild("fluent-bit-nan", {"log.txt": _json(steps() + tb("ZeroDivisionError: float division by zero", "sched.py"), "log")}, ("ZeroDivisionError",), "float division", True),
    Wild("loguru-tagged", {"log.txt": [f"2026-05-02 11:00:{i % 60:02d}.120 | INFO     | trainer.loop:run:88 - {x}" for i, x in enumerate(steps())] + ["2026-05-02 11:01:02.001 | ERROR    | __main__:<module>:12 - An error has been caught in function '<module>', process 'MainProcess' (311), thread 'MainThread' (14):"]
          + tb("AssertionError: head_dim 80 is not supported by this kernel", "attn.py")}, ("AssertionError",), "head_dim 80", True),
    Wild("ansible-indent-lost", {"log.txt": [f"gpu-a17 >> {x.strip()}" for x in ["start", "cfg ok", "ready", *steps(), *tb("NameError: name 'warmup_iters' is not defined", "sched.py", "go.py")]]}, ("NameError",), "warmup_iters", True),
    Wild("srun-label-many", {"log.txt": [f"{r}: {x}" for x in ["init", "model built", "data open", *steps(20)] for r in range(3)] + [f"2: {x}" for x in tb("TypeError: forward() missing 1 required positional argument: 'mask'", "net.py")] + ["srun: error: n4: task 2: Exited with exit code 1"]}, ("TypeError",), "forward\\(\\) missing", True),
    Wild("utf16-windows", {"log.txt": ["\ufeff" + steps()[0], *steps()[1:], *tb("ModuleNotFoundError: No module named 'triton'", "fit.py")]}, ("ImportError",), "triton", True),
    # What is no failure
    Wild("completed-composer", {"log.txt": steps(60, "[batch={i}/600]: Train loss/train/total: {loss:.4f}") + ["[batch=600/600]: Eval metrics/lm/LanguagePerplexity: 11.92", "Checkpoint saved: /out/ep0-ba600.pt", "Done."]}, ("Success",)),
    Wild("completed-keras-like", {"log.txt": [f"{i}/120 [====>....] - ETA: 2s - loss: {2 - i / 100:.4f}" for i in range(1, 121)] + ["120/120 [==============================] - 31s 240ms/step - loss: 0.8021 - val_loss: 0.9120", "Epoch 10/10 finished", "saved model to out/last.keras"]}, ("Success",)),
    Wild("completed-axolotl", {"log.txt": steps(40) + ["[INFO] Training Completed!!! Saving pre-trained model to ./outputs/lora", "wandb: Run history:", "wandb: train/loss ▇▆▅▃▂▁", "wandb: Synced 5 W&B file(s), 0 media file(s)", "wandb: Find logs at: ./wandb/run-1/logs"]}, ("Success",)),
    Wild("ctrl-c-single", {"log.txt": ["ada@ws3:~/exp$ python train.py --cfg a.yaml", *steps(), "^CTraceback (most recent call last):", *tb("KeyboardInterrupt", "train.py")[1:], "ada@ws3:~/exp$ "]}, ("Cancelled",)),
    Wild("ctrl-c-accelerate", {"log.txt": steps() + ["^C"] + tb("KeyboardInterrupt", "loop.py") + tb("KeyboardInterrupt", "accelerate/commands/launch.py") + ["Aborted!"]}, ("Cancelled",)),
    Wild("second-launch-fine", {"log.txt": ["$ accelerate launch sft.py", *tb("ValueError: Unknown scheduler 'cosne'", "sft.py"), "$ accelerate launch sft.py --sched cosine", *steps(50, "step {i}/500 loss {loss:.3f}"), "all steps are done, model written to /out/sft", "$ "]}, ("Success",)),
    Wild("kernel-quiet", {"dmesg.txt": kernel([])}, ("Success", "Unknown-none")),
    Wild("fabric-manager-quiet", {"fabricmanager.log": [f"[May 04 2026 03:{i:02d}:11] [INFO] [tid 2011] {x}" for i, x in enumerate(["Fabric Manager log initializing at: 5/4/2026 03:00:11.100", "Fabric Manager version 550.90.07", "getting NVSwitch device information", "number of GPUs in the fabric: 8", "NVSwitch 0 enabled link mask 0xffff, failed link mask 0x0", "Successfully configured all the available NVSwitches to route GPU NVLink traffic", "error polling disabled", "dumping NVLink topology: no errors"] * 4)]}, ("Success", "Unknown-none")),
    Wild("spike-that-heals", {"log.txt": steps(60, MEGATRON) + [x.replace("lm loss: 2", "lm loss: 6") for x in steps(3, MEGATRON, 600)] + steps(60, MEGATRON, 640) + ["[after training is done] datetime: 2026-05-02 13:00:00"]}, ("Success",)),
    # Quoted text
    Wild("quoted-xid", {"log.txt": steps(20) + ['rollout[3] >> The kernel said: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus', "reward 0.31"] + steps(20, start=200) + tb("AttributeError: 'NoneType' object has no attribute 'shape'", "reward.py")}, ("AttributeError",), "NoneType", True),
    Wild("quoted-traceback", {"log.txt": steps(20) + ["### Assistant: your program printed", "```", *tb("KeyError: 'price'", "shop.py"), "```", "### end"] + steps(40, "step {i}/600 loss {loss:.3f}", 200) + ["training complete"]}, ("Success",)),
    Wild("quoted-oom-in-prompt", {"log.txt": steps(20) + ["prompt: why do I get torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB?", "decoded: lower the batch size"] + tb("IndexError: index 50304 is out of bounds for dimension 0 with size 50304", "embed.py")}, ("IndexError",), "50304", True),
    # Causes
    Wild("oom-neighbour", {"log.txt": ["launching on gpu-09, pid 4411", *steps(2), *tb("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 2 has a total capacity of 79.15 GiB of which 12.88 MiB is free. Process 90210 has 71.90 GiB memory in use. Process 4411 has 7.20 GiB memory in use. Of the allocated memory 6.1 GiB is allocated by PyTorch", "m.py")]}, ("OutOfMemoryError",), "Process 90210", False),
    Wild("oom-own-batch", {"log.txt": steps(4) + tb("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 3.1 GiB is free. Including non-PyTorch memory, this process has 76.0 GiB memory in use. Of the allocated memory 70.1 GiB is allocated by PyTorch", "m.py")}, ("OutOfMemoryError",), "20.00 GiB", True),
    Wild("port-taken", {"log.txt": tb("RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).", "torch/distributed/rendezvous.py")}, ("ConnectionError", "NetworkError", "OSError", "RuntimeError"), "Address already in use", False),
    Wild("ascend-link", {"log.txt": steps() + ["[ERROR] 2026-05-02-11:20:01 (PID:3011, Device:4, RankID:4) ERR02200 DIST call hccl api failed.", "EI0006: [PID: 3011] 2026-05-02-11:20:01.1 Getting socket times out. Reason: The remote does not initiate a connect request. some NPUs in the cluster are abnormal."]
          + tb("RuntimeError: The Inner error is reported as above. The process exits for this inner error, and the current working operator name is HcclAllGather.", "torch_npu/npu/utils.py", tag="[rank4]: ")}, ("NCCLTimeoutError", "NCCLRemoteError", "NetworkError", "Hang"), "Getting socket times out|HcclAllGather", False),
    Wild("ascend-oom", {"log.txt": steps(3) + tb("RuntimeError: NPU out of memory. Tried to allocate 1.50 GiB (NPU 6; 60.97 GiB total capacity; 58.01 GiB already allocated; 58.9 GiB current active; 900.2 MiB free; 59.9 GiB reserved in total by PyTorch)", "m.py")}, ("OutOfMemoryError",), "NPU out of memory", True),
    Wild("rocm-hang-reset", {"messages": kernel(["amdgpu 0000:c1:00.0: amdgpu: ring sdma0 timeout, signaled seq=88121, emitted seq=88123", "amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!", "amdgpu 0000:c1:00.0: amdgpu: GPU reset(2) failed"])}, ("CUDAError", "NodeFailure"), "amdgpu", False),
    Wild("rocm-hip-illegal", {"log.txt": steps() + tb("RuntimeError: HIP error: an illegal memory access was encountered\nHIP kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.", "m.py", tag="[rank5]: ")}, ("CUDAError",), "HIP error", False),
    Wild("jax-oom-gpu", {"log.txt": steps(3, "step={i} loss={loss:.3f}") + tb("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.", "jax/_src/api.py", "maxtext/train.py")}, ("OutOfMemoryError",), "RESOURCE_EXHAUSTED", True),
    Wild("jax-coordination", {"log.txt": steps(20, "step={i} loss={loss:.3f}") + ["2026-05-02 11:30:01.7 F external/xla/xla/pjrt/distributed/client.h:80] Terminating process because the JAX distributed service detected fatal errors. absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats): /job:jax_worker/replica:0/task:9"]}, ("NodeFailure", "NCCLRemoteError", "ConnectionError", "NetworkError", "NCCLTimeoutError"), "unhealthy|UNAVAILABLE", False),
    Wild("xpu-oom", {"log.txt": steps(3) + tb("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 64.00 GiB.", "m.py")}, ("OutOfMemoryError",), "XPU out of memory", True),
    Wild("gpfs-stale", {"log.txt": steps() + tb("OSError: [Errno 5] Input/output error: '/gpfs/ckpt/step_300/__2_0.distcp'", "torch/distributed/checkpoint/filesystem.py"), "mmfs.log": ["2026-05-02_11:00:09.100+0000: [E] Disk failure from gpu-11. Volume fs1. rc = 5. Physical volume nsd14.", "2026-05-02_11:00:09.210+0000: [N] mmfsd: expelling node gpu-11 (lease overdue)"]}, ("OSError", "NodeFailure"), "Input/output error|Disk failure|expell", False),
    Wild("quota-home", {"log.txt": steps() + tb("OSError: [Errno 122] Disk quota exceeded: '/home/ada/.cache/torch/ckpt.tmp'", "save.py")}, ("OSError",), "quota exceeded", True),
    Wild("s3-token-expired", {"log.txt": steps() + tb("botocore.exceptions.ClientError: An error occurred (ExpiredToken) when calling the PutObject operation: The provided token has expired.", "up.py")}, ("S3StorageError", "PermissionError"), "ExpiredToken", True),
    Wild("hub-gated", {"log.txt": tb("requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://hub.example/api/models/x/resolve/main/config.json", "hub.py")}, ("PermissionError", "ConnectionError", "ModelLoadingError", "OSError"), "403 Client Error", True),
    Wild("sigbus-native", {"log.txt": steps() + ["[gpu-4:11202] *** Process received signal ***", "[gpu-4:11202] Signal: Bus error (7)", "[gpu-4:11202] Signal code: Non-existant physical address (2)", "[gpu-4:11202] [ 0] /lib/x86_64-linux-gnu/libc.so.6(+0x42520)[0x7f]", "[gpu-4:11202] *** End of error message ***"]}, ("RuntimeError", "Unknown", "DataloaderKilled"), "Bus error|received signal", False),
    Wild("malloc-corrupt", {"log.txt": steps() + ["free(): invalid pointer", "./run.sh: line 9: 31337 Aborted                 (core dumped) python -u fit.py"]}, ("RuntimeError", "Unknown"), "invalid pointer|Aborted", False),
    Wild("uneven-join", {"rank0.log": steps(30) + ["rank 0: data exhausted after 300 batches, leaving the loop"], "rank1.log": steps(31) + ["[rank1]:[E502 12:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=311, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."]}, ("NCCLTimeoutError", "Hang", "RuntimeError"), "Watchdog|exhausted", None),
    Wild("slow-divergence", {"log.txt": [f"iter {i * 10} | loss {2.5 - min(i, 150) * 0.003 + max(0, i - 150) * 0.01:.4f} | lr 3.0e-04" for i in range(1, 400)]}, ("LossSpike",), "iter \\d+", False),
    Wild("pod-oomkilled", {"describe.txt": ["Name:         train-3", "Status:       Failed", "    State:          Terminated", "      Reason:       OOMKilled", "      Exit Code:    137", "Events:", "  Warning  BackOff  2m  kubelet  Back-off restarting failed container"]}, ("OutOfMemoryError",), "OOMKilled", False),
    Wild("deepspeed-scale", {"log.txt": steps(20) + ["[2026-05-02 11:20:00,100] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 2 Skipping step. Attempted loss scale: 2, reducing to 1"] * 6 + tb("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "deepspeed/runtime/fp16/loss_scaler.py")}, ("LossSpike", "RuntimeError", "AssertionError"), "loss scale", False),
    Wild("mixed-jsonl-nccl", {"log.txt": _json([*steps(), "[rank2]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 2] Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered"])}, ("ECCError",), "uncorrectable ECC", False),
    Wild("first-of-two-reports", {"log.txt": steps() + tb("FileNotFoundError: [Errno 2] No such file or directory: '/d/part-7.npy'", "data.py") + ["ERROR main: training failed: [Errno 2] No such file or directory: '/d/part-7.npy'"] + tb("FileNotFoundError: [Errno 2] No such file or directory: '/d/part-7.npy'", "cli.py")}, ("FileNotFoundError",), "part-7", True),
    Wild("cut-off-quiet", {"log.txt": steps(40, MEGATRON) + [" [2026-05-02 11:01:10] iteration      4"]}, ("Unknown", "NodeFailure"), "iteration", None),
)  # fmt: skip
