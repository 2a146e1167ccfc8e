"""The process groups of a layout, as torch's device meshes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..planning.layout import Coordinate, ParallelLayout


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the groups it is in."""

    layout: ParallelLayout
    here: Coordinate
    device: torch.device
    storage: DeviceMesh
    """Axes: pipeline, replicate, optimizer, gradients, shard, tensor."""
    reading: DeviceMesh
    """Axes: pipeline, data, context, tensor."""

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share each matrix."""
        return self.storage["tensor"]

    @property
    def shard(self) -> DeviceMesh:
        """The ranks that share one copy of the parameters."""
        return self.storage["shard"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks along one axis."""
        mesh = self.reading if axis in ("data", "context") else self.storage
        return mesh.get_group(axis)

    @cached_property
    def state(self) -> tuple[DeviceMesh, ...]:
        """For each pipeline rank the ranks that hold its stages, in the order in which a tensor's first dimension is cut:
        tensor, shard, gradients, optimizer. They only describe where things lie: they have no groups."""
        names = ("replicate", "tensor", "shard", "gradients", "optimizer")
        return tuple(
            # Of another device's kind it would copy what it describes.
            DeviceMesh(
                self.device.type, ranks.permute(0, 4, 3, 2, 1), mesh_dim_names=names, _init_backend=False
            )
            for ranks in self.storage.mesh
        )


def open_mesh(layout: ParallelLayout, rank: int, device: torch.device) -> Mesh:
    """Makes the groups; every rank calls it. A single process becomes a group of its own."""
    if not dist.is_initialized():
        from torch._C._distributed_c10d import HashStore

        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=rank, world_size=layout.world)
    storage = init_device_mesh(
        device.type,
        layout.storage,
        mesh_dim_names=("pipeline", "replicate", "optimizer", "gradients", "shard", "tensor"),
    )
    reading = init_device_mesh(
        device.type,
        (layout.pipeline, layout.data, layout.context, layout.tensor),
        mesh_dim_names=("pipeline", "data", "context", "tensor"),
    )
    return Mesh(layout, layout.coordinate(rank), device, storage, reading)
