"""The tensors of a model that a checkpoint has, their names, and memory for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.arguments import check_module
from composable_shard.core.hooks import groups_in
from composable_shard.core.storage import sharded_form
from composable_shard.core.tree import check_at_rest

# The tensors in a checkpoint: each once, with all of its names ------------------------------------

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Modules around modules, which the names in a checkpoint do not mention."""


@dataclass
class Entry:
    """A parameter or buffer.

    Attributes:
        names: Under which names the model has it, in the order of its modules; several if tied.
        tensor: The tensor.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def local(self) -> torch.Tensor:
        """The part of this rank."""
        if isinstance(self.tensor, DTensor):
            return _torch.local_tensor(self.tensor)
        return self.tensor.detach()

    @property
    def plain(self) -> torch.Tensor | None:
        """The one plain tensor that ``local`` is or wraps; ``None`` if it is made of several."""
        local = self.local
        leaves = _torch.leaves(local)
        if len(leaves) != 1:
            return None
        (leaf,) = leaves
        return leaf if leaf.shape == local.shape and leaf.dtype == local.dtype else None

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return any(leaf.is_meta for leaf in _torch.leaves(self.local))

    def fact(self) -> str:
        """Describe what must be the same on all ranks."""
        tensor, names = self.tensor, " = ".join(f"'{name}'" for name in self.names)
        kind = f", {tensor.placements}" if isinstance(tensor, DTensor) else ""
        place = ", on meta" if self.is_meta else ""
        return f"{names} of shape {list(tensor.shape)}, {tensor.dtype}{kind}{place}"


def contents_of(module: nn.Module, doing: str) -> list[Entry]:
    """List the parameters and persistent buffers of a model, those of sharded modules as shards.

    Args:
        module: The model.
        doing: The function that was called, for messages.

    Raises:
        TypeError: If it is not a module.
        ShardError: If a forward or backward of it runs, within ``unsharded`` or ``parked``, and on
            a rank that ``move`` has left without it.

    Collective: none.
    """
    check_module("model", module)
    reshard(module, doing)
    return listed_in(module)


def reshard(module: nn.Module, doing: str) -> None:
    """Let a model have its sharded parameters; see :func:`contents_of`. Collective: none."""
    groups = groups_in(module.modules())
    for group in groups:
        check_at_rest(group, doing)
        group.check_awake(f"for {doing}()")
    for group in groups:
        group.reshard()


def listed_in(module: nn.Module) -> list[Entry]:
    """List the tensors of a model as it is; of what is gathered, the shards. Collective: none."""
    found: dict[object, Entry] = {}
    for name, tensor, is_persistent in registered(module):
        if is_persistent:
            entry = found.setdefault(_identity(tensor), Entry((), tensor))
            entry.names += (name,)
    return [*found.values()]


def registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield names, tensors and whether a checkpoint has them; tied ones under each name."""
    for path, inner in module.named_modules(remove_duplicate=False):
        steps = [step for step in path.split(".") if step and step not in WRAPPERS]
        volatile = _torch.non_persistent_buffers(inner)
        for attribute, param in inner._parameters.items():
            if param is not None:
                yield ".".join([*steps, attribute]), sharded_form(param), True
        for attribute, buffer in inner._buffers.items():
            if buffer is not None:
                yield ".".join([*steps, attribute]), buffer, attribute not in volatile


def _identity(tensor: torch.Tensor) -> object:
    """Return what tells a tensor from others: where it lies, as two may be one in memory."""
    if isinstance(tensor, DTensor) or tensor.is_meta or _torch.is_wrapper_subclass(tensor):
        return id(tensor)
    if not tensor.numel() or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


# Names --------------------------------------------------------------------------------------------

Rename = Callable[[str], str | None]

SHOWN = 20
"""How many names a message lists before it only counts them."""


def listed(names: Sequence[str]) -> str:
    """Write names one after another, up to some number."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


# Memory for tensors that a model was built without, on the meta device ----------------------------


def materialize(module: nn.Module, entries: Iterable[Entry]) -> None:
    """Give memory, without values, to what is on the meta device; parameters stay the same objects.

    Sharded parameters get it where they belong, offloaded ones on the CPU; everything else where
    the model computes.

    Args:
        module: The model.
        entries: The tensors of it that need memory, among others.
    """
    params = [param for group in groups_in(module.modules()) for param in group.params]
    homes = {id(param.sharded): param.device for param in params}
    computing = [param.mesh.device for param in params]
    computing += [p.device for p in module.parameters() if not p.is_meta]
    anywhere = computing[0] if computing else torch.get_default_device()
    for entry in entries:
        if not entry.is_meta:
            continue
        old = entry.tensor
        home = torch.device(old.device_mesh.device_type) if isinstance(old, DTensor) else anywhere
        device = homes.get(id(old), home)
        new = _torch.without_values(torch.empty_like(old, device=device, requires_grad=False))
        if not isinstance(old, nn.Parameter):
            entry.tensor = new
        register_instead(module, old, new)


def register_instead(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Give a parameter the memory of ``new``, or register that wherever a buffer is."""
    if isinstance(old, nn.Parameter):
        exchange(old, nn.Parameter(new, requires_grad=old.requires_grad))
        return
    for inner in module.modules():  # views of a buffer may exist, so it is not exchanged
        for attribute, buffer in inner._buffers.items():
            if buffer is old:
                inner._buffers[attribute] = new


def exchange(old: nn.Parameter, new: nn.Parameter) -> None:
    """Give a parameter the memory of another one; it stays the object that optimizers hold."""
    _torch.share_hooks(old, new)
    new.__dict__.update(old.__dict__)
    torch.utils.swap_tensors(old, new)
