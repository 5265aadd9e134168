"""One parameter: the shard that the optimizer sees and the tensor that compute sees.

The tensors a parameter goes through:

- original: what the module held when it was sharded; gone afterwards
- sharded: a DTensor parameter on the module outside of compute; its local tensor is the local
  shard, usually a view of a flat bucket
- unsharded: a plain parameter on the module during compute, the leaf of autograd. The object lives
  as long as the group; only its storage comes and goes, so that saved tensors stay valid
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.tensor import Partial, Shard

from composable_shard import _torch
from composable_shard.core.layout import ParamLayout
from composable_shard.mesh import ShardMesh


class Slot(NamedTuple):
    """A place where a parameter is registered; tied parameters have several."""

    module: nn.Module
    attribute: str

    def put(self, param: nn.Parameter) -> None:
        self.module._parameters[self.attribute] = param

    def get(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.attribute)


class ShardedParam:
    """The sharded and the unsharded form of one parameter.

    Attributes:
        name: Name within the module that was sharded; for messages.
        slots: Where it is registered.
        layout: How it is cut.
        mesh: Over which ranks.
        spec: Mesh, placement and global shape of the sharded DTensor.
        sharded: The DTensor parameter.
        local: The local tensor of ``sharded``, to notice when somebody replaces it.
        unsharded: The plain parameter, once it was gathered.
        accumulator: The node that accumulates into ``unsharded.grad``; held, so that it is the
            same in every graph. ``None`` while the parameter is frozen.
    """

    def __init__(
        self,
        name: str,
        slots: tuple[Slot, ...],
        original: nn.Parameter,
        dim: int,
        mesh: ShardMesh,
    ) -> None:
        self.name = name
        self.slots = slots
        self.layout = ParamLayout(tuple(original.shape), dim, mesh.num_shards)
        self.mesh = mesh
        contiguous = torch.empty(original.shape, dtype=original.dtype, device="meta")
        self.spec = _torch.make_spec(mesh.mesh, (Shard(dim),), contiguous)
        self.sharded: nn.Parameter
        self.local: torch.Tensor
        self.unsharded: nn.Parameter | None = None
        self.accumulator: Node | None = None
        self._is_watched = False

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a full tensor, as a view."""
        rank = self.mesh.shard_rank
        return full.detach().narrow(
            self.layout.dim, self.layout.start(rank), self.layout.local_rows(rank)
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.mesh.shard_rank)

    def create_sharded(self, local: torch.Tensor, original: nn.Parameter) -> None:
        """Make the DTensor parameter around ``local``, with what users hung on the original."""
        self.sharded = nn.Parameter(
            _torch.from_local(local, self.spec), requires_grad=original.requires_grad
        )
        if type(original) is nn.Parameter:  # a subclass keeps its inner tensors there
            self.sharded.__dict__.update(original.__dict__)
        if original.grad_dtype != original.dtype:
            self.sharded.grad_dtype = original.grad_dtype
        self.local = _torch.local_tensor(self.sharded)

    def adopt_local(self, local: torch.Tensor) -> None:
        """Let ``local``, which holds the same values, be the local shard from now on."""
        self.spec = _torch.spec_with_dtype(self.spec, local.dtype)
        _torch.set_local_tensor(self.sharded, local)
        self.local = local

    def create_unsharded(self, tensor: torch.Tensor) -> nn.Parameter:
        """Make the leaf of autograd around ``tensor``; once in the life of its storage."""
        with torch.inference_mode(False):
            self.unsharded = nn.Parameter(tensor, requires_grad=self.sharded.requires_grad)
        self.accumulator, self._is_watched = None, False
        return self.unsharded

    def forget_unsharded(self) -> None:
        """Let go of the unsharded parameter; the next gather makes another."""
        self.unsharded, self.accumulator = None, None

    def register_sharded(self) -> None:
        for slot in self.slots:
            slot.put(self.sharded)

    def register_unsharded(self) -> None:
        assert self.unsharded is not None
        for slot in self.slots:
            slot.put(self.unsharded)

    def follow_requires_grad(self, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Give the unsharded parameter the ``requires_grad`` of the sharded one.

        Args:
            on_gradient: Called whenever a backward has accumulated into the parameter.
        """
        assert self.unsharded is not None
        wanted = self.sharded.requires_grad
        if wanted == (self.accumulator is not None):
            return
        self.unsharded.requires_grad_(wanted)
        self.accumulator = _torch.accumulate_node(self.unsharded) if wanted else None
        if wanted and not self._is_watched:
            self.unsharded.register_post_accumulate_grad_hook(on_gradient)
            self._is_watched = True

    def is_intact(self) -> bool:
        """Tell whether module and DTensor still hold what this object put there."""
        return (
            self.slots[0].get() is self.sharded and _torch.local_tensor(self.sharded) is self.local
        )

    def recover(self) -> None:
        """Take over a parameter or local tensor that replaced ours (loading, ``to``, ...)."""
        current = self.slots[0].get()
        if current is not None and current is not self.sharded:
            self.sharded = current
        for slot in self.slots:
            slot.put(self.sharded)
        self.local = _torch.local_tensor(self.sharded)
        self.spec = _torch.spec_with_dtype(self.spec, self.local.dtype)

    def version(self) -> int:
        """Return a number that grows when the sharded values change in place."""
        return self.sharded._version + self.local._version

    def grad_spec(self, dtype: torch.dtype) -> _torch.DTensorSpec:
        """Describe the reduced gradient."""
        return _torch.spec_with_dtype(self.spec, dtype)

    def partial_spec(self, dtype: torch.dtype) -> _torch.DTensorSpec:
        """Describe a gradient that is accumulated but not yet reduced over the ranks."""
        meta = self.spec.tensor_meta
        assert meta is not None
        like = torch.empty(meta.shape, dtype=dtype, device="meta")
        return _torch.make_spec(self.mesh.mesh, (Partial("avg"),), like)

    def __repr__(self) -> str:
        return f"ShardedParam({self.name}, shape={self.layout.shape}, dim={self.layout.dim})"
