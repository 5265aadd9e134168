"""The tensors of a model in a checkpoint, their names, and memory for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.arguments import check_module
from composable_shard.core.hooks import groups_in
from composable_shard.core.storage import as_sharded
from composable_shard.core.tree import check_at_rest

# The tensors in a checkpoint: each once, with all of its names ------------------------------------

# Names of wrapper modules, which a checkpoint leaves out of its names.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass(eq=False)
class Entry:
    """A parameter or buffer.

    Attributes:
        names: Its names in the model, in the order of modules; several if it is tied.
        tensor: The tensor.
        is_persistent: Whether a checkpoint has it.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    is_persistent: bool = True

    @property
    def local(self) -> torch.Tensor:
        """The part of this rank."""
        tensor = self.tensor
        return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()

    @property
    def plain(self) -> torch.Tensor | None:
        """``local`` as a single plain tensor; ``None`` if it consists of several."""
        local, leaves = self.local, _torch.leaves(self.local)
        kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
        return leaves[0] if kinds == [(local.shape, local.dtype)] else None

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return any(leaf.is_meta for leaf in _torch.leaves(self.local))

    def fact(self) -> str:
        """Describe the properties that must be the same on all ranks."""
        tensor, names = self.tensor, " = ".join(f"'{name}'" for name in self.names)
        kind = f", {tensor.placements}" if isinstance(tensor, DTensor) else ""
        place = ", on meta" if self.is_meta else ""
        return f"{names} of shape {list(tensor.shape)}, {tensor.dtype}{kind}{place}"


def contents_of(module: nn.Module, doing: str, *, has_volatile: bool = False) -> list[Entry]:
    """List the parameters and persistent buffers of a model; sharded parameters as shards.

    Args:
        module: The model.
        doing: The function that was called, for messages.
        has_volatile: Whether to list non-persistent buffers too.

    Raises:
        TypeError: If ``module`` is not a module.
        ShardError: In a forward or backward, within ``unsharded`` or ``parked``, and on a rank that
            ``move`` has left without the model.

    Collective: none.
    """
    check_module("model", module)
    reshard(module, doing)
    found: dict[int, Entry] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        steps = [step for step in path.split(".") if step and step not in WRAPPERS]
        volatile = _torch.non_persistent_buffers(inner)
        for attribute, registered in (inner._parameters | inner._buffers).items():
            is_persistent = attribute not in volatile
            if registered is not None and (is_persistent or has_volatile):
                tensor = as_sharded(registered)
                entry = found.setdefault(id(tensor), Entry((), tensor, is_persistent))
                entry.names += (".".join([*steps, attribute]),)
    return [*found.values()]


def reshard(module: nn.Module, doing: str) -> None:
    """Free the unsharded parameters of a model; see :func:`contents_of`. Collective: none."""
    groups = groups_in(module.modules())
    for group in groups:
        check_at_rest(group, doing)
        group.check_in_memory(f"for {doing}()")
    for group in groups:
        group.reshard()


# Names --------------------------------------------------------------------------------------------

Rename = Callable[[str], str | None]

SHOWN = 20  # names that a message lists; it counts the rest


def listed(names: Sequence[str]) -> str:
    """List names, up to some number."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


# Memory for meta tensors --------------------------------------------------------------------------


def materialize(module: nn.Module, entries: Iterable[Entry]) -> None:
    """Allocate memory for meta tensors, without values; parameters stay the same objects.

    Sharded parameters get it on their device, offloaded parameters on the CPU, and all other
    tensors on the device of compute.

    Args:
        module: The model.
        entries: Tensors of the model; those on the meta device get memory.
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
        new = _torch.poison_uninitialized(torch.empty_like(old, device=device, requires_grad=False))
        entry.tensor = register_instead(module, old, new)


def register_instead(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Give a parameter the memory of ``new``, or replace a buffer by ``new`` everywhere.

    Return the tensor in the model: a parameter stays the same object for optimizers.
    """
    if isinstance(old, nn.Parameter):
        made = _torch.parameter_of(new, old.requires_grad)
        _torch.share_hooks(old, made)
        made.__dict__.update(old.__dict__)
        torch.utils.swap_tensors(old, made)
        return old
    for inner in module.modules():  # a buffer may have views, so it is replaced
        for attribute, buffer in inner._buffers.items():
            if buffer is old:
                inner._buffers[attribute] = new
    return new
