"""One training run on one process or many (torchrun): DDP, or FSDP2 for a draft that one device cannot hold.

Each optimizer step has the same packs whatever the number of processes; process r of W takes every W-th. The loss is
divided by the targets of the whole step, which every process knows from the masks, so gradients are summed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class Processes:
    """This process and the others of the run."""

    rank: int
    count: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> "Processes":
        """Read what torchrun sets; one process where it sets nothing."""
        values = (int(os.environ.get(name, default)) for name, default in _TORCHRUN)
        return cls(*values)

    @property
    def first(self) -> bool:
        """Whether this process writes the files and shows the progress."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """Return this process's own device of that kind."""
        return torch.device("cuda", self.local_rank) if device.type == "cuda" else device

    def share(self, packs: list[Any]) -> list[Any]:
        """Return this process's packs; None stands for an empty one, so that all have the same number."""
        turns = -(-len(packs) // self.count)
        own = packs[self.rank :: self.count]
        return own + [None] * (turns - len(own))

    def wrap(self, module: nn.Module, shard: bool) -> nn.Module:
        """Return the module so that the backward pass averages gradients over all processes."""
        if self.count == 1:
            return module
        if shard:
            fully_shard(module)
            return module
        return DistributedDataParallel(module)

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def gathered(self, value: Any) -> list[Any]:
        """Return every process's value."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def wait_for_all(self) -> None:
        """Return when every process has come here; the last thing a run asks of the others.

        A barrier holds no tensors. Gloo's thread may free a finished work's tensors only with the interpreter's lock;
        if the group is torn down at that moment by a thread that has the lock, both wait for ever.
        """
        if self.count > 1:
            dist.barrier()

    def from_first(self, value: Any) -> Any:
        """Return the first process's value."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]


_TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


@contextmanager
def joined(processes: Processes, device: torch.device) -> Iterator[None]:
    """Connect the processes for as long as the block runs; a lost one is reported as such."""
    if processes.count == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    except (dist.DistBackendError, dist.DistNetworkError, RuntimeError) as error:
        if isinstance(error, dist.DistError) or "onnection" in str(error):
            raise DraftsmithError(
                "another process of this training run is gone. Run the same command again: it goes on from the last "
                f"checkpoint. ({str(error).splitlines()[0]})"
            ) from error
        raise
    finally:
        dist.destroy_process_group()


def without_sync(module: nn.Module, last: bool) -> Any:
    """Return a context in which gradients are only summed locally, unless this is the step's last pack."""
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor laid out as `like`."""
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)
