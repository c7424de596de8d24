"""Several processes as one: each learns from its own rows, all hold the same memory after every step.

The readers' gradients are few and dense: one all-reduce. The table's gradient is a handful of rows: each process owns
a range of rows, gets what everyone learned about them, updates them with an optimiser that knows no others, and tells
everyone the new values. So a row's optimiser state is in one place, and the table's gradient is never dense.

Shapes: R rows of the table, N some of them, w row width, W processes.
"""

import dataclasses
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memoryathena.backbone.fingerprint import backbone_fingerprint
from memoryathena.backbone.model import AthenaModel
from memoryathena.errors import AthenaError


@dataclasses.dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> "World":
        """As torchrun or accelerate launched it; alone where nobody did."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @classmethod
    def join(cls) -> "World":
        """Meet the other processes where torchrun or accelerate launched several; each is given its device."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            PartialState()
        return cls.current()

    @property
    def main(self) -> bool:
        """The one that writes files and talks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def share(self, error: AthenaError | None) -> None:
        """Raise on all processes what the main one met: the others would wait for it for ever."""
        message = [str(error) if error is not None else None]
        if self.size > 1:
            dist.broadcast_object_list(message, src=0)
        if message[0] is not None:
            raise AthenaError(message[0])

    def gather(self, values: Tensor) -> Tensor | None:
        """Tensors that may differ in their first dimension, one behind the other, on the main process alone."""
        if self.size == 1:
            return values
        counts, padded = self._padded(values)
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.main else None
        dist.gather(padded, parts, dst=0)
        return _joined(parts, counts) if parts is not None else None

    def gather_all(self, values: Tensor) -> Tensor:
        """The same, on every process."""
        counts, padded = self._padded(values)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return _joined(parts, counts)

    def _padded(self, values: Tensor) -> tuple[list[int], Tensor]:
        """How many each process has, and these with as many as the one that has most."""
        counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(values)], device=values.device))
        numbers = torch.cat(counts).tolist()
        padded = values.new_zeros(max(numbers), *values.shape[1:])
        padded[: len(values)] = values
        return numbers, padded


def _joined(parts: list[Tensor], counts: list[int]) -> Tensor:
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def broadcast(world: World, parameters: dict[str, nn.Parameter]) -> None:
    """Everyone begins with what the main process has."""
    if world.size > 1:
        for parameter in parameters.values():
            dist.broadcast(parameter.data, src=0)


def reduce_gradients(world: World, parameters: list[nn.Parameter]) -> None:
    """The sum over all processes. A parameter that none has a gradient for keeps none: optimisers pass it over."""
    if world.size == 1 or not parameters:
        return
    device = parameters[0].device
    used = world.sum(torch.tensor([float(p.grad is not None) for p in parameters], device=device))
    learning = [p for p, count in zip(parameters, used.tolist(), strict=True) if count]
    if not learning:
        return
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in learning])
    pieces = world.sum(flat).split([p.numel() for p in learning])
    for parameter, piece in zip(learning, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


class OwnRows:
    """A process's range of the table's rows, as the parameter that its optimiser knows. Alone, the whole table."""

    def __init__(self, weight: nn.Parameter, world: World):
        self.weight, self.world = weight, world
        self.bounds = [len(weight) * rank // world.size for rank in range(world.size + 1)]
        self.start, self.stop = self.bounds[world.rank], self.bounds[world.rank + 1]
        # A view: what the optimiser does to it happens to the table.
        self.parameter = weight if world.size == 1 else nn.Parameter(weight.data[self.start : self.stop])

    def collect(self) -> Tensor:
        """What everyone learned about these rows becomes their gradient; returns the whole table's gradient's norm."""
        weight = self.weight
        gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight, layout=torch.sparse_coo)
        gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        if self.world.size == 1:
            weight.grad = gradient
            return gradient.values().norm()
        rows_N, values_Nw = gradient.indices()[0], gradient.values()
        # Coalesced rows are in order, so each owner's are side by side.
        cuts = torch.searchsorted(rows_N, torch.tensor(self.bounds, device=rows_N.device))
        sent = cuts.diff()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        splits = received.tolist(), sent.tolist()
        own_N = rows_N.new_empty(sum(splits[0]))
        own_Nw = values_Nw.new_empty(len(own_N), values_Nw.shape[1])
        dist.all_to_all_single(own_N, rows_N.contiguous(), *splits)
        dist.all_to_all_single(own_Nw, values_Nw.contiguous(), *splits)
        shape = self.parameter.shape
        found = torch.sparse_coo_tensor(own_N[None] - self.start, own_Nw, shape, check_invariants=False)
        self.parameter.grad = found.coalesce()
        return self.world.sum(self.parameter.grad.values().square().sum()).sqrt()

    def publish(self) -> None:
        """Everyone gets the rows that were updated."""
        if self.world.size == 1 or self.parameter.grad is None:
            return
        own_N = self.parameter.grad.coalesce().indices()[0]
        rows_N = self.world.gather_all(own_N + self.start)
        values_Nw = self.world.gather_all(self.parameter.data[own_N])
        with torch.no_grad():
            self.weight[rows_N] = values_Nw


def shard_backbone(model: AthenaModel) -> None:
    """FSDP2: every process keeps a share of each block and gathers it when its turn comes. All processes call it.

    The frozen backbone has no gradients to reduce. Its head is in the root's group, which stays whole from the end of
    the forward to the end of the backward: `passes.run` calls it in between. A block goes to this process's GPU when
    it is sharded: the whole is loaded on the CPU. What an earlier stage has sharded stays as it is.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    host, blocks = model.host, model._injection.blocks
    if isinstance(host, FSDPModule):
        return
    # Of a sharded embedding no process sees all; the weights are frozen, so who they are is known now.
    host.athena_fingerprint = backbone_fingerprint(host, blocks)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(host, mesh=mesh)
    model._place(blocks)
