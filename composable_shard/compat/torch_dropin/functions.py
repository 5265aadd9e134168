"""What takes the place of torch's functions.

Modules that torch's ``fully_shard`` was applied to before keep working: what concerns them goes to
torch's functions. Ours are imported when they are called, since the drop-in may be installed in the
middle of importing this package, which itself imports from torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

_torch_fsdp = importlib.import_module("torch.distributed.fsdp")
_NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
OF_TORCH: dict[str, Callable[..., Any]] = {
    name: getattr(_torch_fsdp, name) for name in _NAMES if hasattr(_torch_fsdp, name)
}  # torch has not had all of them always


# Signature and docstring are torch's, the name is that of the function here: it can be pickled.
@functools.wraps(OF_TORCH["fully_shard"], assigned=("__doc__",), updated=())
def fully_shard(module: Any, **options: Any) -> Any:
    """Shard a module by ours."""
    from composable_shard import api
    from composable_shard.compat.torch_dropin.policies import translated

    return api.fully_shard(module, **translated(options))


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Let another method of a module be called as its forward is, by whose module it is."""
    from composable_shard import api

    if _is_of_torch(module):
        OF_TORCH["register_fsdp_forward_method"](module, method_name)
    else:
        api.register_fsdp_forward_method(module, method_name)


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let roots bound their memory for reductions together, or share streams if torch's."""
    from composable_shard import api

    if any(map(_is_of_torch, modules)):
        OF_TORCH["share_comm_ctx"](modules)
    else:
        api.share_comm_ctx(modules)


# Pipeline schedules ask the function for the state of a module.
fully_shard.state = OF_TORCH["fully_shard"].state  # type: ignore[attr-defined]

OURS: dict[str, Callable[..., Any]] = {
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}


def _is_of_torch(module: Any) -> bool:
    """Tell whether torch's ``fully_shard`` was applied to a module."""
    from composable_shard.module import FSDPModule

    return isinstance(module, _torch_fsdp.FSDPModule) and not isinstance(module, FSDPModule)
