"""What parameters are gathered into, seen from the modules that compute with it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def note_gathered(model: nn.Module) -> list[nn.Parameter]:
    """Return a list that gets each unsharded parameter when it first computes."""
    found: list[nn.Parameter] = []
    for module in model.modules():
        params = module.named_parameters(recurse=False)
        names = [name for name, param in params if isinstance(param, DTensor)]

        def note(module: nn.Module, _: object, names: list[str] = names) -> None:
            params = [module.get_parameter(name) for name in names]
            found.extend(p for p in params if not any(p is known for known in found))

        module.register_forward_pre_hook(note)
    return found


def nbytes_of(gathered: list[nn.Parameter]) -> list[int]:
    """Return the bytes behind each; none where a group has been freed."""
    return [torch.Tensor.untyped_storage(param).nbytes() for param in gathered]
