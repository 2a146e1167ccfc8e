"""Which of several errors came first: each rule of chronology by the smallest log that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.diagnose import Action, Outcome, Verdict, diagnose

from .logs import job, steps, traceback

TIMEOUT = "[rank{r}]:[E0501 10:30:00.1 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={s}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
CUDA = "RuntimeError: CUDA error: an illegal memory access was encountered"


def timeouts(*ranks: int, seq: int = 88) -> str:
    return "".join(TIMEOUT.format(r=r, s=seq) for r in ranks)


def verdict(tmp_path: Path, body: str, **kw: object) -> Verdict:
    return diagnose([job(tmp_path, body, **kw)])  # type: ignore[arg-type]


def test_a_time_out_with_a_cause_before_it_is_a_consequence(tmp_path: Path) -> None:
    v = verdict(tmp_path, steps(20) + traceback(CUDA, 3) + timeouts(0, 1, 2, 4, 5, 6, 7))
    assert v.reason == "CUDAError" and v.cascade[0].reason == "NCCLTimeoutError" and v.cascade[0].count == 7
    assert v.faulty is not None and (v.faulty.node, v.faulty.rank, v.faulty.gpu) == ("node-001", 3, 3)


def test_a_time_out_alone_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    v = verdict(tmp_path, steps(20) + timeouts(0, 1, 2, 3, 4, 6, 7))
    assert v.reason == "NCCLTimeoutError" and v.faulty is not None
    assert (v.faulty.node, v.faulty.rank, v.faulty.gpu) == ("node-002", 5, 1)


def test_a_time_out_on_all_ranks_names_the_one_that_lags(tmp_path: Path) -> None:
    v = verdict(tmp_path, steps(20) + timeouts(0, 1, 2, 3, 4, 6, 7) + timeouts(5, seq=87))
    assert v.faulty is not None and v.faulty.rank == 5


def test_a_barrier_names_the_rank_itself(tmp_path: Path) -> None:
    said = "[rank0]: RuntimeError: Rank 6 failed to pass monitoredBarrier in 1800000 ms\n"
    v = verdict(tmp_path, steps(20) + said)
    assert v.reason == "NCCLTimeoutError" and v.faulty is not None and v.faulty.rank == 6


@pytest.mark.parametrize("offset", [-40, 0, 40])
def test_the_kernel_explains_the_cuda_error_beside_it(tmp_path: Path, offset: int) -> None:
    job(tmp_path, steps(20) + traceback(CUDA, 2) + timeouts(0, 1, 3))
    at = 20 + offset if offset >= 0 else 60 + offset
    minute = "10:00" if offset >= 0 else "09:59"
    (tmp_path / "syslog.txt").write_text(
        f"May  1 {minute}:{at % 60:02d} node-001 kernel: NVRM: Xid (PCI:0000:3a:00): 48, pid=77, name=python, DBE\n"
    )
    v = diagnose([tmp_path])
    assert v.reason == "ECCError" and v.cordon == ("node-001",) and v.action is Action.RESTART_ELSEWHERE


def test_an_old_kernel_error_explains_nothing(tmp_path: Path) -> None:
    job(tmp_path, steps(59) + traceback(CUDA, 2))
    (tmp_path / "syslog.txt").write_text(
        "May  1 03:00:00 node-001 kernel: NVRM: Xid (PCI:0000:3a:00): 48, pid=77, name=python, DBE\n"
        + steps(0)
    )
    v = diagnose([tmp_path])
    assert v.reason == "CUDAError"


def test_another_jobs_host_does_not_count(tmp_path: Path) -> None:
    foreign = "May  1 10:00:20 node-777 kernel: NVRM: Xid (PCI:0000:3a:00): 79, pid=7, GPU has fallen off the bus.\n"
    assert verdict(tmp_path, steps(20) + foreign + traceback(CUDA, 2)).reason == "CUDAError"


@pytest.mark.parametrize("code", [43, 45, 63])
def test_clean_up_codes_are_never_the_root(tmp_path: Path, code: int) -> None:
    early = f"May  1 10:00:20 node-001 kernel: NVRM: Xid (PCI:0000:3a:00): {code}, pid=7, name=python\n"
    late = "May  1 10:00:21 node-001 kernel: NVRM: Xid (PCI:0000:5d:00): 74, pid=7, NVLink fatal\n"
    assert verdict(tmp_path, steps(20) + early + late + traceback(CUDA, 2)).reason == "NVLinkError"


def test_what_training_overcame_is_no_root(tmp_path: Path) -> None:
    body = (
        steps(20)
        + "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB.\n"
        + steps(20, 21)
    )
    assert verdict(tmp_path / "a", body + traceback("KeyError: 'x'")).reason == "KeyError"
    assert verdict(tmp_path / "b", body + "job 4711 COMPLETED ExitCode 0:0\n").outcome is Outcome.COMPLETED
    v = verdict(tmp_path / "c", body)
    assert v.reason == "Unknown"


def test_one_more_step_on_another_rank_overcomes_nothing(tmp_path: Path) -> None:
    body = steps(20) + traceback("ZeroDivisionError: division by zero", 4) + steps(1, 21)
    assert verdict(tmp_path, body).reason == "ZeroDivisionError"


def test_a_restart_from_an_earlier_step_overcomes_what_was_before(tmp_path: Path) -> None:
    body = (
        steps(20)
        + traceback(CUDA, 2)
        + "[2026-05-01 10:20:00] in-job restart 1/3: all ranks re-joined\n"
        + steps(15, 10)
        + traceback("IndexError: list index out of range")
    )
    assert verdict(tmp_path, body).reason == "IndexError"


def test_text_that_a_model_wrote_is_no_error(tmp_path: Path) -> None:
    talk = '[2026-05-01 10:00:20] eval sample 3 completion: "RuntimeError: CUDA error: device-side assert triggered" (model text)\n'
    assert (
        verdict(tmp_path, steps(20) + talk + "job 4711 COMPLETED ExitCode 0:0\n").outcome is Outcome.COMPLETED
    )
    assert (
        verdict(tmp_path, steps(20) + talk + traceback("NameError: name 'x' is not defined")).reason
        == "NameError"
    )


def test_of_chained_exceptions_the_first_counts(tmp_path: Path) -> None:
    cause = (
        traceback("FileNotFoundError: [Errno 2] No such file or directory: 'a'")
        + "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    v = verdict(tmp_path, steps(5) + cause + traceback("RuntimeError: could not start"))
    assert v.reason == "FileNotFoundError" and v.root is not None and "Errno 2" in v.root.text


def test_a_failed_look_up_that_was_provided_for_does_not(tmp_path: Path) -> None:
    look = (
        traceback("KeyError: 'flash'")
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
    )
    assert verdict(tmp_path, look + traceback("ValueError: unknown attention 'flash'")).reason == "ValueError"


def test_a_library_that_names_the_trouble_better_counts(tmp_path: Path) -> None:
    low = (
        traceback("socket.gaierror: [Errno -3] Temporary failure in name resolution")
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
    )
    v = verdict(
        tmp_path,
        low
        + traceback(
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded"
        ),
    )
    assert v.reason == "ConnectionError"


def test_the_launchers_own_traceback_is_a_consequence(tmp_path: Path) -> None:
    launcher = traceback(
        "subprocess.CalledProcessError: Command '['python', 'x.py']' returned non-zero exit status 1.",
        frame='File "/opt/conda/lib/python3.11/site-packages/accelerate/commands/launch.py", line 9, in simple_launcher',
    )
    assert (
        verdict(tmp_path, traceback("TypeError: f() takes 1 positional argument", 0) + launcher).reason
        == "TypeError"
    )


def test_peers_that_lost_the_connection_follow_from_the_rank_that_failed(tmp_path: Path) -> None:
    gloo = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:33312"
    body = (
        steps(20)
        + traceback(gloo, 0)
        + traceback(gloo, 1)
        + traceback("AttributeError: 'NoneType' object has no attribute 'loss'", 2)
    )
    v = verdict(tmp_path, body)
    assert v.reason == "AttributeError" and v.faulty is not None and v.faulty.rank == 2


def test_a_lost_node_explains_connections_that_closed_before(tmp_path: Path) -> None:
    body = (
        steps(20)
        + "[rank0]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nsrun: error: Node failure on node-002\n"
    )
    v = verdict(tmp_path, body)
    assert (
        (v.reason, v.cordon) == ("NodeFailure", ("node-002",))
        and v.faulty is not None
        and v.faulty.rank is None
    )


def test_a_host_that_ran_out_of_memory_explains_the_peers_errors(tmp_path: Path) -> None:
    body = (
        steps(20)
        + "[rank0]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
        + "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
    )
    v = verdict(tmp_path, body)
    assert v.reason == "OutOfMemoryError" and v.recoverable and v.action is Action.RESTART


def test_only_consequences_are_still_an_answer(tmp_path: Path) -> None:
    body = (
        steps(20)
        + "node-001:20:21 [0] misc/socket.cc:531 NCCL WARN Net : Connection closed by remote peer node-002<34271>\n"
    )
    v = verdict(tmp_path, body)
    assert v.reason == "NCCLRemoteError" and v.faulty is not None and v.faulty.node == "node-002"


def test_links_that_failed_to_one_node_convict_it(tmp_path: Path) -> None:
    row = "{a}:20:21 [0] NCCL WARN NET/IB : Got completion from peer {b}<35806> with status=12 opcode=0 len=0 vendor err 129 (Recv)\n"
    body = steps(20) + "".join(row.format(a=a, b=b) for a, b in [("n1", "n3"), ("n2", "n3"), ("n3", "n1")])
    v = verdict(tmp_path, body, nodes="n1,n2,n3", per_node=1)
    assert v.reason == "NetworkError" and v.cordon == ("n3",)


def test_a_flapping_link_is_the_root_from_its_first_error_on(tmp_path: Path) -> None:
    flap = "node-002:20:21 [1] transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error\n"
    body = "".join(steps(5, 1 + 5 * i) + flap for i in range(4)) + steps(5, 21)
    down = "node-002:20:21 [1] NCCL WARN NET/IB : Got completion from peer 10.1.1.1<3> with status=12 opcode=0 len=0 vendor err 129 (Recv)\n"
    v = verdict(tmp_path / "a", body + down)
    assert (
        v.reason == "NetworkError" and v.root is not None and v.root.line == 7 and v.cordon == ("node-002",)
    )
    one = (
        steps(20)
        + flap
        + "node-002:20:21 [1] NCCL INFO NET/IB : Got async event : port active\n"
        + steps(20, 21)
    )
    v = verdict(
        tmp_path / "b",
        one
        + "[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n",
    )
    assert v.reason == "NCCLRemoteError", "one flap that recovered is no root"


def test_failures_of_all_ranks_have_no_place(tmp_path: Path) -> None:
    v = verdict(tmp_path, "".join(traceback("TypeError: x", r) for r in range(4)))
    assert v.faulty is None
    v = verdict(
        tmp_path / "b",
        "".join(
            traceback("PermissionError: [Errno 13] Permission denied: '/tmp/x'", r) for r in (4, 5, 6, 7)
        ),
    )
    assert v.faulty is not None and (v.faulty.node, v.faulty.rank) == ("node-002", None)


def test_silence_before_the_time_limit_is_a_hang(tmp_path: Path) -> None:
    limit = "slurmstepd: error: *** JOB 4711 ON node-001 CANCELLED AT 2026-05-01T{t} DUE TO TIME LIMIT ***\n"
    v = verdict(tmp_path / "a", steps(30) + limit.format(t="19:00:00"))
    assert (v.outcome, v.reason) == (Outcome.HUNG, "Hang")
    v = verdict(tmp_path / "b", steps(30) + limit.format(t="10:00:40"))
    assert (v.outcome, v.reason) == (Outcome.TIME_LIMIT, None)


def test_an_idle_gpu_among_busy_ones_is_where_it_hangs(tmp_path: Path) -> None:
    gpus = "".join(
        f"2026-05-01 11:00:00 gpumon node-00{n} gpu{g} util={0 if (n, g) == (2, 1) else 100}% power=96W\n"
        for n in (1, 2)
        for g in range(4)
    )
    v = verdict(
        tmp_path, steps(30) + gpus + "[2026-05-01 12:00:00] operator: no step for 119 min, scancel 4711\n"
    )
    assert (
        v.outcome is Outcome.HUNG
        and v.cordon == ("node-002",)
        and v.faulty is not None
        and v.faulty.rank == 5
    )


def test_a_rank_whose_log_stops_early_is_where_it_hangs(tmp_path: Path) -> None:
    for r in range(4):
        (tmp_path / f"rank{r}.log").write_text(steps(20 if r != 2 else 19))
    (tmp_path / "slurm.out").write_text(
        "slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2026-05-01T15:00:00 DUE TO TIME LIMIT ***\n"
    )
    v = diagnose([tmp_path])
    assert v.outcome is Outcome.HUNG and v.faulty is not None and v.faulty.rank == 2


@pytest.mark.parametrize("values", [(4.0, 7.0, 9.0, 9.5), (float("nan"),) * 4])
def test_a_loss_that_goes_wrong_at_the_end(tmp_path: Path, values: tuple[float, ...]) -> None:
    body = steps(40) + "".join(
        f"[2026-05-01 10:01:{i:02d}] step: {41 + i} loss: {x}\n" for i, x in enumerate(values)
    )
    v = verdict(tmp_path, body)
    assert (v.outcome, v.reason, v.action) == (Outcome.LOSS_SPIKE, "LossSpike", Action.ROLLBACK_SKIP)
    assert v.root is not None and v.root.line == 42


def test_a_spike_that_recovered_is_none(tmp_path: Path) -> None:
    bump = "".join(f"[2026-05-01 10:00:50] step: {41 + i} loss: {x}\n" for i, x in enumerate((4.0, 6.0, 3.0)))
    v = verdict(tmp_path, steps(40) + bump + steps(40, 44) + "training finished: 83 steps, exit code 0\n")
    assert v.outcome is Outcome.COMPLETED


def test_a_log_that_breaks_off_is_unknown_not_success(tmp_path: Path) -> None:
    log = job(tmp_path, steps(30))
    log.write_text(log.read_text()[:-20])
    v = diagnose([log])
    assert v.reason == "Unknown" and v.outcome is Outcome.FAILED and v.recoverable
    assert v.root is not None and v.root.line == 31


def test_the_last_step_of_all_is_an_end(tmp_path: Path) -> None:
    body = "".join(
        f" [2026-05-01 10:00:{i:02d}] iteration {i:8d}/      20 | lm loss: 2.0E+00 |\n" for i in range(1, 21)
    )
    assert verdict(tmp_path, body).outcome is Outcome.COMPLETED


def test_a_recent_log_is_running_only_when_asked(tmp_path: Path) -> None:
    log = job(tmp_path, steps(30))
    end = 1777629630.0  # 2026-05-01 10:00:30 UTC
    assert diagnose([log], now=end + 20).outcome is Outcome.RUNNING
    hung = diagnose([log], now=end + 4000)
    assert hung.outcome is Outcome.HUNG and hung.root is not None and hung.root.line == 31
    assert diagnose([log]).outcome is Outcome.UNKNOWN


def test_clocks_in_other_time_zones_are_put_right(tmp_path: Path) -> None:
    job(tmp_path, steps(20) + traceback(CUDA, 2))
    (tmp_path / "syslog.txt").write_text(
        "May  1 03:00:21 node-001 kernel: NVRM: Xid (PCI:0000:3a:00): 95, pid=77, name=python, Uncontained\n"
    )
    assert diagnose([tmp_path]).reason == "ECCError"


def test_the_oom_killer_took_the_loaders_worker(tmp_path: Path) -> None:
    body = (
        steps(20)
        + "May  1 10:00:20 node-001 kernel: Out of memory: Killed process 99 (python3) total-vm:1kB\n"
        + traceback("RuntimeError: DataLoader worker (pid 99) is killed by signal: Killed. ", 2)
    )
    v = verdict(tmp_path, body)
    assert v.reason == "DataloaderKilled" and v.faulty is not None and v.faulty.rank == 2


def test_a_traceback_in_torchruns_error_file_block(tmp_path: Path) -> None:
    body = (
        steps(5)
        + '  time      : 2026-05-01_10:00:09\n  host      : node-002\n  rank      : 6 (local_rank: 2)\n  exitcode  : 1 (pid: 31)\n  error_file: /tmp/e.json\n  traceback : Traceback (most recent call last):\n    File "/app/x.py", line 3, in main\n      f()\n  ValueError: bad shape\n'
    )
    v = verdict(tmp_path, body)
    assert v.reason == "ValueError"


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank5]: ",
        "[default1]:[rank5]: ",
        "5: ",
        "(RayTrainWorker pid=77, ip=10.0.0.9) ",
        "2026-05-01T10:00:21.123456Z stdout F ",
        "node-002: ",
        "[node-002] ",
        "2026-05-01 10:00:21,100 ERROR ",
    ],
)
def test_tracebacks_behind_any_prefix(tmp_path: Path, prefix: str) -> None:
    body = "".join(
        prefix + row + "\n"
        for row in traceback("FileNotFoundError: [Errno 2] No such file or directory: 'x'").splitlines()
    )
    v = verdict(tmp_path, steps(20) + body)
    assert v.reason == "FileNotFoundError" and v.root is not None and v.root.line == 25


def test_interleaved_ranks_are_kept_apart(tmp_path: Path) -> None:
    a, b = (
        traceback("KeyError: 'a'", 1).splitlines(),
        traceback("IndexError: list index out of range", 2).splitlines(),
    )
    v = verdict(tmp_path, steps(5) + "\n".join(x for pair in zip(a, b, strict=True) for x in pair) + "\n")
    assert v.reason == "KeyError" and v.root is not None and v.root.rank == 1


@pytest.mark.parametrize(
    "text",
    [
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL\n",
        "E0501 10:00:09.1 1148 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 2 (pid: 9) of binary: /usr/bin/python\n",
        "[2026-05-01 10:00:09,510] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', '--local_rank=7'] exits with return code = -9\n",
        "srun: error: node-002: task 5: Killed\n",
    ],
)
def test_a_kill_without_a_cause_is_unknown_and_restartable(tmp_path: Path, text: str) -> None:
    v = verdict(tmp_path, steps(9) + text)
    assert (v.outcome, v.reason, v.recoverable, v.decided_by) == (
        Outcome.FAILED,
        "Unknown",
        True,
        "exit-code",
    )
    assert v.root is not None and v.root.line == 11 and "SIGKILL" in v.notes[0]


def test_a_traceback_on_the_line_of_an_open_progress_bar(tmp_path: Path) -> None:
    bar = "Steps:   0%|▏      | 17/6000 [00:58<4:50:05,  2.91s/it, lr=0, loss=1.2]"
    v = verdict(tmp_path, steps(3) + bar + traceback("IndexError: list index out of range", 0))
    assert v.reason == "IndexError" and v.root is not None and v.root.line == 8


def test_a_gradient_that_is_no_number(tmp_path: Path) -> None:
    rows = "".join(
        f"{{'loss': {1.4 if i < 30 else 0.0}, 'grad_norm': {0.5 if i < 30 else 'nan'}, 'learning_rate': 4.5e-06, 'epoch': 0.{i}}}\n"
        for i in range(10, 40)
    )
    v = verdict(tmp_path, rows)
    assert v.reason == "LossSpike" and v.root is not None and v.root.line == 22


def test_hardware_that_took_some_steps_to_show(tmp_path: Path) -> None:
    xid = "May  1 10:00:20 node-001 kernel: NVRM: Xid (PCI:0000:3a:00): 48, pid=7, name=python, DBE\n"
    v = verdict(tmp_path / "a", steps(20) + xid + steps(4, 21) + traceback(CUDA, 2))
    assert v.reason == "ECCError" and v.cordon == ("node-001",)
    late = steps(20) + xid + steps(30, 21) + steps(3, 3600) + traceback("KeyError: 'x'", 2)
    assert verdict(tmp_path / "b", late).reason == "KeyError"


def test_a_person_who_cancels_over_the_loss(tmp_path: Path) -> None:
    bump = "".join(
        f"[2026-05-01 10:00:50] step: {41 + i} loss: {x}\n" for i, x in enumerate((4.0, 9.0, 6.0, 3.0))
    )
    v = verdict(
        tmp_path,
        steps(40)
        + bump
        + steps(9, 45)
        + "[2026-05-01 10:00:55] operator: loss does not look right, scancel 4711\n",
    )
    assert v.reason == "LossSpike" and v.root is not None and v.root.line == 42


ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def test_a_nccl_prefix_tells_a_ranks_node(tmp_path: Path) -> None:
    said = "".join(
        f"[rank{r}]: gpu-host-{r // 8}:{900 + r}:{1900 + r} [{r % 8}] NCCL WARN Call to connect timed out\n"
        for r in (3, 12)
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log.txt").write_text(steps(20) + said + steps(20, 21) + traceback(ECC, 12))
    v = diagnose([tmp_path / "a"])
    assert v.reason == "ECCError" and v.faulty is not None
    assert (v.faulty.node, v.faulty.rank, v.cordon) == ("gpu-host-1", 12, ("gpu-host-1",))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rank-5.log").write_text(
        "gpu-host-7:77:78 [5] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>\n" + steps(20) + traceback(ECC)
    )
    assert diagnose([tmp_path / "b"]).cordon == ("gpu-host-7",)


def test_the_kernels_only_report_tells_the_node_of_the_same_failure(tmp_path: Path) -> None:
    xid = "May  1 10:02:{} {} kernel: NVRM: Xid (PCI:0000:3a:00): 95, pid=7, name=python, Uncontained\n"
    for nodes, cordon in ((("node-a1",), ("node-a1",)), (("node-a1", "node-a2"), ())):
        folder = tmp_path / str(len(nodes))
        folder.mkdir()
        (folder / "log.txt").write_text(
            steps(20) + traceback(ECC, 2) + "".join(xid.format(10 + i, n) for i, n in enumerate(nodes))
        )
        v = diagnose([folder])
        assert (v.reason, v.cordon) == ("ECCError", cordon)


def test_a_memory_fault_asks_for_a_restart_unless_the_program_convicts_itself(tmp_path: Path) -> None:
    illegal = traceback("RuntimeError: CUDA error: an illegal memory access was encountered", 2)
    launch = traceback("RuntimeError: CUDA error: unspecified launch failure", 2)
    init = "node-001:7:8 [2] NCCL INFO comm 0x1 rank 2 nranks 8 cudaDev 2 nvmlDev 2 busId 3a000 - Init COMPLETE\n"
    for code in (13, 31):
        xid = f"May  1 10:00:20 node-001 kernel: NVRM: Xid (PCI:0000:3a:00): {code}, pid=7, name=python, Fault\n"
        for i, (rest, action) in enumerate(((illegal, "stop"), (launch, "restart"), ("", "restart"))):
            v = verdict(tmp_path / f"{code}-{i}", init + steps(20) + xid + rest)
            assert (v.reason, v.decided_by, v.action.value) == ("CUDAError", f"xid-{code}", action)
            assert v.recoverable == (action == "restart") and not v.cordon and v.faulty and v.faulty.rank == 2
