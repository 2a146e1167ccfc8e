"""What may be asked of a Slurm cluster: `--cluster slurm,interface=ib0,setup=env.sh`, or `[cluster]` in run.toml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ...units import Duration

RUNTIMES = ("pyxis", "apptainer")


@dataclass(frozen=True)
class SlurmOptions:
    """Every one has a default: inside an allocation `--cluster slurm` alone is enough."""

    job: str = ""
    """The allocation to use, by its id. Default: the one that this process runs in."""
    interface: str = ""
    """The network interface by which nodes reach the supervisor, such as ib0. Default: by the routes of this host."""
    python: str = ""
    """The interpreter on the nodes, or in the image, that has unbroken. Default: the one that runs this, `python3` in an image."""
    setup: Path | None = None
    """A file of shell lines that every node reads before the agent starts: `module load cuda`, `conda activate train`."""
    image: str = ""
    """The container image that agents and ranks run in."""
    runtime: str = "pyxis"
    """What starts the image: pyxis (srun --container-image) or apptainer."""
    mounts: tuple[str, ...] = ()
    """Folders that the image sees besides the run directory, as /here:/there."""
    cordon: str = "auto"
    """How a node is put out of use: drain (needs an operator's rights), own (for this run alone), auto (drain where allowed)."""
    poll: Duration = Duration("5s")
    """How often the controller is asked for news. A lost node is noticed at once all the same: its srun ends."""
    gpus: int | None = None
    """GPUs that each node must have; asked for where the run submits itself. Default: they need only be as many on each."""
    partition: str = ""
    """Where the run submits itself: the partition."""
    account: str = ""
    """The account that pays."""
    time: str = ""
    """The time limit of each job, as sbatch reads it. The run goes on in the next one."""
    sbatch: tuple[str, ...] = ()
    """More options of sbatch, each with its dashes: --qos=high."""
    requeue: str = "auto"
    """At the time limit and after preemption: requeue (the job keeps its id), successor (another job that waits for this one's
    end), auto (requeue, or a successor where the site forbids it), no."""
    detach: bool = False
    """Submits and returns at once."""

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise UsageError(f"the option 'runtime' is one of {', '.join(RUNTIMES)}, not '{self.runtime}'")
        if self.cordon not in ("auto", "drain", "own"):
            raise UsageError(f"the option 'cordon' is one of auto, drain, own, not '{self.cordon}'")
        if self.requeue not in ("auto", "requeue", "successor", "no"):
            raise UsageError(
                f"the option 'requeue' is one of auto, requeue, successor, no, not '{self.requeue}'"
            )
        for option in self.sbatch:
            if not option.startswith("-") or any(c in option for c in "\n\r"):
                raise UsageError(f"an option of sbatch is written with its dashes, not {option!r}")
        if not 0.2 <= float(self.poll) <= 300:
            raise UsageError("the option 'poll' is between 0.2s and 5m")
        if self.mounts and not self.image:
            raise UsageError("the option 'mounts' needs 'image'")
        for mount in self.mounts:
            if not mount.startswith("/"):
                raise UsageError(f"a mount is written /here:/there, not '{mount}'")
