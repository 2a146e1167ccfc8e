"""What may be asked of a Kubernetes cluster: `--cluster kubernetes,image=...,gpus=8`, or `[cluster]` in run.toml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ...units import Bytes, Duration

CORDONS = ("auto", "taint", "own")
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_CPUS = re.compile(r"[0-9]+(\.[0-9]+)?m?")


@dataclass(frozen=True)
class KubernetesOptions:
    """A run needs `image`; everything else has a default."""

    image: str = ""
    """The container image that agents and ranks run in: it has unbroken, and what the script needs."""
    namespace: str = ""
    """Where the pods are made. Default: the context's, or the one that this process runs in."""
    kubeconfig: Path | None = None
    """How the cluster is reached. Default: $KUBECONFIG, ~/.kube/config, or the service account of this pod."""
    context: str = ""
    """The context of the kubeconfig. Default: its current one."""
    python: str = "python3"
    """The interpreter in the image that has unbroken."""
    gpus: int = 0
    """GPUs of each node, for the container of the ranks."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU: amd.com/gpu, nvidia.com/mig-3g.40gb, ..."""
    cpus: str = ""
    """Processors asked for by the container of the ranks, such as 64 or 500m. Default: what the namespace gives."""
    memory: Bytes | None = None
    """Memory of the container of the ranks, asked for and not exceeded. Default: what the namespace gives."""
    keeper_memory: Bytes | None = None
    """Memory of the container of agent and keeper, where the snapshots lie. Default: what the namespace gives."""
    shm: Bytes | None = None
    """Size of /dev/shm, which both containers share. It counts as memory of the container that writes it. Default: up to the
    memory of the pod."""
    mounts: tuple[str, ...] = ()
    """Volumes of both containers: CLAIM:/path for a PersistentVolumeClaim, /of/the/host:/path for a folder of the node."""
    template: Path | None = None
    """A Pod, or the spec of one, in YAML: tolerations, node selectors, pull secrets, environment, anything else."""
    grace: Duration = Duration("2m")
    """So long a pod that is to go may take for the last checkpoint (terminationGracePeriodSeconds)."""
    idle: Duration = Duration("10m")
    """A pod in which nothing of the run has been for so long ends itself: nobody pays for what was forgotten."""
    cordon: str = "auto"
    """How a node is put out of use: taint (for everybody), own (for runs of unbroken in this namespace), auto (taint where allowed)."""
    address: str = ""
    """This host's address as pods reach it. Default: by the routes of this host."""
    autoscaled: bool = False
    """Nodes are made on demand: more may be asked for than there are."""

    def __post_init__(self) -> None:
        if any(c.isspace() for c in self.image):
            raise UsageError(f"'{self.image}' is no image", hint="Write it like: image=registry/name:tag")
        if self.gpus < 0:
            raise UsageError(f"a node cannot have {self.gpus} GPUs")
        if not _RESOURCE.fullmatch(self.gpu_resource):
            raise UsageError(
                f"'{self.gpu_resource}' is no name of a resource", hint="Write it like: nvidia.com/gpu"
            )
        if self.cpus and not _CPUS.fullmatch(self.cpus):
            raise UsageError(
                f"'{self.cpus}' is no number of processors", hint="Write it like: cpus=64, or cpus=500m"
            )
        if self.cordon not in CORDONS:
            raise UsageError(f"the option 'cordon' is one of {', '.join(CORDONS)}, not '{self.cordon}'")
        for mount in self.mounts:
            source, _, place = mount.rpartition(":")
            if not source or not place.startswith("/"):
                raise UsageError(f"a mount is written CLAIM:/path or /of/the/host:/path, not '{mount}'")
        if not 10 <= float(self.grace) <= 86_400:
            raise UsageError("the option 'grace' is between 10s and 1d: the last checkpoint is made in it")
        if float(self.idle) < 10:
            raise UsageError("the option 'idle' is 10s or more: a supervisor may be started again meanwhile")
