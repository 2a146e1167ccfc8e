"""What libraries, kernels and launchers really print, and the reason that each means when it comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.diagnose import diagnose

from .logs import job, steps, traceback

EXCEPTIONS = {
    "NVLinkError": ["torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution"],
    "CUDAError": [
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "RuntimeError: CUDA error: invalid device ordinal",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "torch.AcceleratorError: CUDA error: unknown error",
    ],
    "ECCError": ["RuntimeError: CUDA error: uncorrectable ECC error encountered"],
    "NetworkError": ["OSError: [Errno 101] Network is unreachable", "OSError: [Errno 113] No route to host"],
    "ConnectionError": [
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.wandb.ai', port=443): Max retries exceeded",
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. (read timeout=10)",
        "requests.exceptions.SSLError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded",
        "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected",
        "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub",
        "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the cached files",
        "redis.exceptions.ConnectionError: Error 110 connecting to 10.0.0.3:6379. Connection timed out.",
        "wandb.errors.CommError: Error communicating with wandb process",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.",
        "TimeoutError: The client socket has timed out after 1800s while trying to connect to (10.0.0.1, 29500).",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, code: -98, name: EADDRINUSE",
        "httpx.ConnectTimeout: timed out",
        "http.client.RemoteDisconnected: Remote end closed connection without response",
    ],
    "S3StorageError": [
        "botocore.exceptions.ClientError: An error occurred (503) when calling the HeadObject operation (reached max retries: 4): Service Unavailable",
        "botocore.exceptions.ConnectTimeoutError: Connect timeout on endpoint URL: \"https://s3/\"",
        "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        "boto3.exceptions.S3UploadFailedError: Failed to upload /tmp/x to bucket/x: An error occurred (RequestTimeout)",
        "OSError: AWS Error NETWORK_CONNECTION during UploadPart operation: curlCode: 28, Timeout was reached",
        "petrel_client.common.exception.S3ServerError: server error",
        "google.api_core.exceptions.ServiceUnavailable: 503 PUT https://storage.googleapis.com/upload",
        "urllib.error.HTTPError: HTTP Error 503: Slow Down",
    ],
    "NCCLTimeoutError": [
        "RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by store->get('0'), but store->get('0') got error: Socket Timeout. This may indicate a possible application crash on rank 0: ncclUniqueId",
        "RuntimeError: Rank 3 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 5: monitoredBarrier on rank 3 timed out",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for send operation to complete",
    ],
    "DataloaderKilled": [
        "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Segmentation fault. ",
        "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Aborted. ",
        "RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly",
        "RuntimeError: unable to open shared memory object </torch_123_456> in read-write mode",
    ],
    "AttributeError": ["AttributeError: 'GPTModel' object has no attribute 'module'", "dataclasses.FrozenInstanceAttributeError: x", "omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct"],
    "OutOfMemoryError": [
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.20 GiB total capacity; 76.3 GiB already allocated)",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 81788928 bytes.",
        "MemoryError",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    ],
    "RuntimeError": [
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
        "RuntimeError: The size of tensor a (4096) must match the size of tensor b (4097) at non-singleton dimension 1",
        "RuntimeError: Expected to mark a variable ready only once.",
        "RecursionError: maximum recursion depth exceeded",
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
    ],
    "AssertionError": ["AssertionError", "AssertionError: micro batch size must divide global batch size", "AssertionError: Torch not compiled with CUDA enabled"],
    "ValueError": [
        "ValueError: Asking to pad but the tokenizer does not have a padding token.",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig",
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
        "json.decoder.JSONDecodeError: Extra data: line 2 column 1 (char 5)",
        "yaml.scanner.ScannerError: mapping values are not allowed here",
    ],
    "ZeroDivisionError": ["ZeroDivisionError: integer division or modulo by zero"],
    "ModelLoadingError": [
        "RuntimeError: Error(s) in loading state_dict for DistributedDataParallel:",
        "OSError: meta-llama/Llama-3 is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'",
        "OSError: Error no file named pytorch_model.bin, model.safetensors found in directory /models/x.",
        "OSError: Can't load tokenizer for '/models/x'. If you were trying to load it from the Hub",
        "OSError: Unable to load weights from pytorch checkpoint file for '/m/pytorch_model-00001.bin'",
        "_pickle.UnpicklingError: invalid load key, 'v'.",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "ValueError: The checkpoint you are trying to load has model type `qwen3` but Transformers does not recognize this architecture.",
        "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.",
    ],
    "DatasetLoadingError": [
        "datasets.exceptions.DatasetNotFoundError: Dataset 'x' doesn't exist on the Hub or cannot be accessed.",
        "datasets.builder.DatasetGenerationError: An error occurred while generating the dataset",
        "pyarrow.lib.ArrowInvalid: JSON parse error: Column() changed from object to string in row 0",
        "FileNotFoundError: Couldn't find a dataset script at /mnt/x/x.py or any data file in the same directory.",
        "datasets.utils.info_utils.NonMatchingSplitsSizesError: [{'expected': 1}]",
        "datasets.exceptions.DatasetGenerationCastError: An error occurred while generating the dataset",
        "pyarrow.lib.ArrowTypeError: Expected bytes, got a 'int' object",
    ],
    "FileNotFoundError": ["FileNotFoundError: [Errno 2] No such file or directory: '/mnt/data/vocab.json'", "FileNotFoundError: /mnt/data does not exist"],
    "OSError": [
        "OSError: [Errno 28] No space left on device: '/tmp/x'",
        "OSError: [Errno 122] Disk quota exceeded",
        "OSError: [Errno 116] Stale file handle",
        "OSError: [Errno 5] Input/output error",
        "OSError: [Errno 30] Read-only file system: '/mnt/x'",
        "OSError: [Errno 24] Too many open files",
        "OSError: [Errno 16] Device or resource busy: '.nfs000000'",
        "FileExistsError: [Errno 17] File exists: '/mnt/ckpt/run'",
        "RuntimeError: [enforce fail at inline_container.cc:595] . unexpected pos 1245184 vs 1245076",
        "OSError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "IsADirectoryError: [Errno 21] Is a directory: '/mnt/x'",
    ],
    "TypeError": ["TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'", "TypeError: __init__() got an unexpected keyword argument 'foo'"],
    "NameError": ["NameError: name 'deepspeed' is not defined", "UnboundLocalError: local variable 'loss' referenced before assignment"],
    "PermissionError": ["PermissionError: [Errno 13] Permission denied: '/root/.triton'", "PermissionError: [Errno 1] Operation not permitted: '/mnt'"],
    "ImportError": [
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
        "ImportError: cannot import name 'log' from 'torch.distributed.elastic.agent.server.api'",
        "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by /opt/x.so)",
    ],
    "KeyError": ["KeyError: 'model'", "KeyError: 0", "omegaconf.errors.ConfigKeyError: Missing key trainer"],
    "SyntaxError": ["SyntaxError: invalid syntax", "TabError: inconsistent use of tabs and spaces in indentation"],
    "ArgumentError": ["argparse.ArgumentError: argument --x: conflicting option string: --x", "hydra.errors.OverrideParseException: mismatched input '=' expecting <EOF>"],
    "CalledProcessError": ["subprocess.CalledProcessError: Command '['nvcc', '--version']' died with <Signals.SIGKILL: 9>.", "subprocess.TimeoutExpired: Command 'git' timed out after 5 seconds"],
    "IndexError": ["IndexError: list index out of range", "IndexError: Target 32000 is out of bounds."],
}  # fmt: skip
LINES = {
    "NVLinkError": [
        "May  1 10:00:09 node-001 kernel: NVRM: Xid (PCI:0000:5d:00): 74, pid=1, name=python, NVLink: fatal error detected on link 4",
        "May  1 10:00:09 node-001 kernel: nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    ],
    "ECCError": [
        "[Fri May  1 10:00:09 2026] NVRM: Xid (PCI:0000:5d:00): 94, pid=1, name=python, Contained: SM (0x1). RST: No, D-RST: No",
        "kern  :warn  : 2026-05-01T10:00:09,284250+00:00 NVRM: Xid (PCI:0000:38:00): 95, pid='<unknown>', name=<unknown>, Uncontained",
    ],
    "CUDAError": [
        "May  1 10:00:09 node-001 kernel: NVRM: Xid (PCI:0000:5d:00): 13, pid=1, name=python, Graphics SM Warp Exception on (GPC 9, TPC 5, SM 0): Out Of Range Address",
        "May  1 10:00:09 node-001 kernel: NVRM: Xid (PCI:0000:5d:00): 119, pid=1, name=python, Timeout after 6s of waiting for RPC response from GPU4 GSP!",
        "node-001:1:2 [3] enqueue.cc:123 NCCL WARN Cuda failure 'an illegal memory access was encountered'",
    ],
    "NodeFailure": [
        "slurmstepd: error: *** STEP 7.0 ON node-001 CANCELLED AT 2026-05-01T10:00:09 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        "May  1 10:00:09 node-001 kernel: mce: [Hardware Error]: CPU 44: Machine Check Exception: 5 Bank 6: bb80000000000e0b",
        "May  1 10:00:09 node-001 kernel: NMI watchdog: Watchdog detected hard LOCKUP on cpu 3",
        "Warning  NodeNotReady  2m  node-controller  Node is not ready",
        "May  1 10:00:09 node-001 kernel: NVRM: Xid (PCI:0000:5d:00): 79, pid=1, GPU has fallen off the bus.",
    ],
    "NetworkError": [
        "node-001:1:2 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.1.2.3<40011> with status=12 opcode=0 len=0 vendor err 129",
        "node-001:1:2 [3] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
        "[rank3]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "May  1 10:00:09 node-001 kernel: mlx5_core 0000:5e:00.0 ib0: Link down",
    ],
    "OutOfMemoryError": [
        "May  1 10:00:09 node-001 kernel: Memory cgroup out of memory: Killed process 2165 (python) total-vm:1kB, anon-rss:1kB",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        "    Reason:       OOMKilled",
    ],
    "ArgumentError": ["train.py: error: argument --dtype: invalid choice: 'bf8' (choose from 'bf16', 'fp16')", "Error: No such option: --lrr", "pretrain_gpt.py: error: ambiguous option: --num could match --num-layers"],
    "ImportError": ["/opt/conda/bin/python: No module named torchrun", "python: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object file"],
    "FileNotFoundError": ["/opt/conda/bin/python: can't open file '/workspace/train.py': [Errno 2] No such file or directory", "/var/spool/slurmd/job1/slurm_script: line 7: torchrunx: command not found"],
    "CalledProcessError": ["ninja: build stopped: subcommand failed.", "make: *** [Makefile:7: helpers] Error 1"],
    "NCCLRemoteError": ["[rank3]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."],
    "ConnectionError": ["[rank3]:[E501 socket.cpp:957] [c10d] The client socket has timed out after 60s while trying to connect to (10.0.0.1, 29500)."],
    "Hang": ["[2026-05-01 11:30:00] watchdog: training hung, no progress for 5400 s"],
}  # fmt: skip


@pytest.mark.parametrize(("reason", "text"), [(r, t) for r, texts in EXCEPTIONS.items() for t in texts])
def test_exceptions(tmp_path: Path, reason: str, text: str) -> None:
    v = diagnose([job(tmp_path, steps(9) + traceback(text, 3))])
    assert v.reason == reason
    assert v.root is not None and v.root.line == 14 and v.root.text.endswith(text)


@pytest.mark.parametrize(("reason", "text"), [(r, t) for r, texts in LINES.items() for t in texts])
def test_lines(tmp_path: Path, reason: str, text: str) -> None:
    v = diagnose([job(tmp_path, steps(9) + text + "\n")])
    assert v.reason == reason
    assert v.root is not None and v.root.line == 11


HARMLESS = [
    "wandb: ERROR Error while calling W&B API: internal database error (<Response [500]>), entering retry loop",
    "W0501 10:00:01.1 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1",
    "/opt/x.py:3: UserWarning: The error is harmless",
    "[2026-05-01 10:00:01] WARNING uploader: part 3 attempt 2/5 got HTTP 503 SlowDown, back-off 2s",
    "node-001:1:2 [0] NCCL INFO NET/IB : No device found.",
    "INFO: error_correction=on, fail_fast=False, max_retries=3",
    "May  1 10:00:01 node-001 kernel: NVRM: Xid (PCI:0000:5d:00): 63, pid=1, Row Remapper: New row marked for remapping",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
    "0 errors, 0 warnings",
    "[rank0]:[W501 10:00:01 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.",
    "Some weights of the model checkpoint were not used when initializing: ['lm_head.weight']",
    "DeepSpeed: Overflow detected. Skipping step. Attempted loss scale: 65536, reducing to 32768",
    '{"prompt": "Traceback?", "response": "ValueError: bad"}',
]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_lines_are_no_alarm(tmp_path: Path, text: str) -> None:
    v = diagnose(
        [
            job(
                tmp_path,
                steps(9) + text + "\n" + steps(9, 10) + text + "\ntraining finished: 18 steps, exit code 0\n",
            )
        ]
    )
    assert (v.outcome.value, v.reason) == ("completed", None)
    v = diagnose([job(tmp_path / "b", steps(9) + text + "\n" + traceback("KeyError: 'x'", 2))])
    assert v.reason == "KeyError"
