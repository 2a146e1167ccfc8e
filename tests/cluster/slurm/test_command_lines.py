"""The command lines that start something on a node."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from unbroken.cluster.slurm.command_lines import StepOrder, find_python, node_program, srun
from unbroken.cluster.slurm.controller.commands import clean_environment
from unbroken.cluster.slurm.options import SlurmOptions
from unbroken.errors import UsageError
from unbroken.units import Duration

ORDER = StepOrder("12", ("n1",), "ub-run-1")


def test_a_step_shares_what_the_job_has_and_takes_no_gpu() -> None:
    argv = srun(ORDER, SlurmOptions(), ["prog", "a b"])
    for word in (
        "--jobid=12",
        "--overlap",
        "--mem=0",
        "--gres=none",
        "--nodelist=n1",
        "--ntasks=1",
        "--job-name=ub-run-1",
    ):
        assert word in argv
    assert argv[-2:] == ["prog", "a b"]
    assert "--gres=none" not in srun(StepOrder("12", ("n1",), "x", gpus=True), SlurmOptions(), ["prog"])
    assert "--ntasks=2" in srun(StepOrder("12", ("n1", "n2"), "x"), SlurmOptions(), ["prog"])


def test_pyxis_adds_to_srun_and_apptainer_goes_before_the_program() -> None:
    pyxis = SlurmOptions(image="nvcr.io/nvidia/pytorch:25.01", mounts=("/data", "/site:/opt/site"))
    argv = srun(ORDER, pyxis, node_program(pyxis, "start"))
    assert "--container-image=nvcr.io/nvidia/pytorch:25.01" in argv
    assert "--container-mounts=/data:/data,/site:/opt/site" in argv
    assert argv[-4:] == ["python3", "-m", "unbroken.cluster.slurm.node", "start"]
    apptainer = SlurmOptions(
        image="/img/torch.sif", runtime="apptainer", mounts=("/data",), python="/venv/bin/python"
    )
    argv = srun(ORDER, apptainer, node_program(apptainer, "end"))
    at = argv.index("apptainer")
    assert argv[at : at + 8] == [
        "apptainer",
        "exec",
        "--nv",
        "--pwd",
        "/",
        "--bind",
        "/data:/data",
        "/img/torch.sif",
    ]
    assert argv[at + 8] == "/venv/bin/python" and not any(w.startswith("--container") for w in argv)


def test_set_up_lines_come_first_and_signals_reach_the_program(tmp_path: Path) -> None:
    options = SlurmOptions(setup=tmp_path / "env file.sh")
    argv = srun(ORDER, options, ["prog", "a b"])
    assert argv[-3:-1] == ["/bin/bash", "-c"]
    assert shlex.split(argv[-1]) == [".", str(tmp_path / "env file.sh"), "&&", "exec", "prog", "a b"]
    assert find_python(options) == "python3" and find_python(SlurmOptions()) == sys.executable


def test_a_step_takes_nothing_from_the_step_that_starts_it() -> None:
    inside = {
        "SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_CONF": "/c", "SBATCH_X": "1", "PMIX_RANK": "0", "PATH": "/bin",
    }  # fmt: skip
    assert clean_environment(inside) == {"SLURM_CONF": "/c", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"runtime": "docker"}, "pyxis, apptainer"),
        ({"cordon": "maybe"}, "auto, drain, own"),
        ({"poll": Duration("1ms")}, "between 0.2s and 5m"),
        ({"mounts": ("/a",)}, "needs 'image'"),
        ({"image": "x", "mounts": ("a:b",)}, "/here:/there"),
    ],
)
def test_options_that_make_no_sense(values: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        SlurmOptions(**values)
