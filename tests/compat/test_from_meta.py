"""Models on the meta device: what is initialized, how often, in which order, and what is not.

The oracles are FullyShardedDataParallel of torch and the model that was never on the meta device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from on_ranks import on_ranks
from seeds.models import CPU
from torch import nn

from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from composable_shard.compat.fsdp1 import ModuleWrapPolicy


class Block(nn.Module):
    """A weight of its own, drawn by the function that also a wrapper of it would hand out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def deep() -> nn.Sequential:
    """Deep modules come before shallow ones."""
    inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Block()), Block(), nn.LayerNorm(4))
    return nn.Sequential(inner, nn.Linear(4, 4), Block(), nn.Linear(4, 2))


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


# As FSDP1 of torch does -------------------------------------------------------------------------


def initialized(
    wrapper: Any, policy: Any, kinds: set[type[nn.Module]], by_function: bool
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the modules that the function was called with, and the values of all parameters."""
    called: list[str] = []

    def init_fn(module: nn.Module) -> None:
        called.append(type(module).__name__)
        if hasattr(module, "reset_parameters"):
            module.to_empty(device=CPU, recurse=False)
            module.reset_parameters()

    plain = on_meta(deep)
    torch.manual_seed(7)
    model = wrapper(
        plain,
        auto_wrap_policy=policy(kinds) if kinds else None,
        param_init_fn=init_fn if by_function else None,
        device_id=CPU,
    )
    return called, {name: value.clone() for name, value in model.state_dict().items()}


KINDS: dict[str, set[type[nn.Module]]] = {
    "none": set(),
    "blocks": {Block},
    "linear": {nn.Linear},
    "leaves": {Block, nn.Linear, nn.LayerNorm},
    "nested": {Block, nn.Sequential},
}


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("wrapped", KINDS)
@on_ranks(2)
def test_modules_are_initialized_as_by_fsdp1_of_torch(wrapped: str, by_function: bool) -> None:
    kinds = KINDS[wrapped]
    ours = initialized(FSDP, ModuleWrapPolicy, kinds, by_function)
    theirs = initialized(
        torch_fsdp.FullyShardedDataParallel, torch_wrap.ModuleWrapPolicy, kinds, by_function
    )
    assert ours[0] == theirs[0]
    assert bool(ours[0]) == by_function
    assert list(ours[1]) == list(theirs[1])
    for name, value in ours[1].items():
        assert torch.equal(value, theirs[1][name]), name
