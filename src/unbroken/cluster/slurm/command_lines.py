"""The command lines that start something on a node: by srun, in the user's image and environment. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .options import SlurmOptions

NODE_PROGRAM = "unbroken.cluster.slurm.node"


@dataclass(frozen=True)
class StepOrder:
    """A step on one node, or on several with one task each. `gpus` is whether it may use the job's."""

    job: str
    nodes: tuple[str, ...]
    name: str
    gpus: bool = False
    immediate_s: int = 0
    """It fails where it cannot start within so many seconds; 0 waits."""


def srun(order: StepOrder, options: SlurmOptions, program: Sequence[str]) -> list[str]:
    """`srun ... program`. The step shares what the job has (--overlap): it takes nothing from other steps, and waits for none."""
    return [*_srun(order), *_in_pyxis(options), *in_environment(options, program)]


def srun_from_node(order: StepOrder, options: SlurmOptions) -> list[str]:
    """What stands before a program that a node's agent starts in a step of its own: the environment is the agent's already."""
    return [*_srun(order), *_in_pyxis(options), *_in_apptainer(options)]


def _srun(order: StepOrder) -> list[str]:
    argv = [
        "srun", f"--jobid={order.job}", "--overlap", "--mem=0", f"--nodelist={','.join(order.nodes)}",
        f"--nodes={len(order.nodes)}", f"--ntasks={len(order.nodes)}", "--ntasks-per-node=1",
        f"--job-name={order.name}", "--cpu-bind=none", "--mpi=none", "--chdir=/", "--quiet", "--kill-on-bad-exit=0",
    ]  # fmt: skip
    if not order.gpus:
        argv.append("--gres=none")
    if order.immediate_s:
        argv.append(f"--immediate={order.immediate_s}")
    return argv


def in_environment(options: SlurmOptions, program: Sequence[str]) -> list[str]:
    """The program after the site's own set-up lines, and in Apptainer's image where one is asked for."""
    argv = [*_in_apptainer(options), *program]
    if options.setup is None:
        return argv
    # exec: signals and exit codes are the program's own.
    line = f". {shlex.quote(str(options.setup.absolute()))} && exec {shlex.join(argv)}"
    return ["/bin/bash", "-c", line]


def node_program(options: SlurmOptions, *arguments: str) -> list[str]:
    """This package's program on a node, by the node's own interpreter."""
    return [find_python(options), "-m", NODE_PROGRAM, *arguments]


def find_python(options: SlurmOptions) -> str:
    """The interpreter on a node: the one asked for; an image's own; after set-up lines the one that they name; else ours."""
    return options.python or ("python3" if options.image or options.setup else sys.executable)


def _in_pyxis(options: SlurmOptions) -> list[str]:
    """Pyxis adds options to srun itself."""
    if not options.image or options.runtime != "pyxis":
        return []
    argv = [f"--container-image={options.image}", "--no-container-remap-root", "--container-workdir=/"]
    if options.mounts:
        argv.append(f"--container-mounts={','.join(_both_sides(m) for m in options.mounts)}")
    return argv


def _in_apptainer(options: SlurmOptions) -> list[str]:
    if not options.image or options.runtime != "apptainer":
        return []
    # --nv hands in the GPUs and their driver's libraries; where there are none it only warns.
    argv = ["apptainer", "exec", "--nv", "--pwd", "/"]
    for mount in options.mounts:
        argv += ["--bind", _both_sides(mount)]
    return [*argv, options.image]


def _both_sides(mount: str) -> str:
    return mount if ":" in mount else f"{mount}:{mount}"
