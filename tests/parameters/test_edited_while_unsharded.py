"""Between a forward and its backward modules hold full parameters, which users may edit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from nets import full
from on_ranks import on_ranks
from torch import nn

from composable_shard import fully_shard
from composable_shard.compat.fsdp1 import FullyShardedDataParallel
from composable_shard.testing import fake_ranks


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def converts(model: nn.Sequential) -> None:
    model[1].double().float()


def replaces_memory(model: nn.Sequential) -> None:
    for param in model[1].parameters():
        param.data = param.data.clone()


@pytest.mark.parametrize("edit", [converts, replaces_memory])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_parameter_with_other_memory_is_gathered_again(
    edit: Callable[[nn.Sequential], None],
) -> None:
    """Edit the head, which the root owns, after a forward; compare training with the oracle."""
    oracle = layers()
    model = copy.deepcopy(oracle)
    fully_shard(model[0])
    fully_shard(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, oracle)]
    x = torch.ones(2, 4)
    model(x)
    edit(model)
    for _ in range(3):
        for one, optimizer in zip((model, oracle), optimizers, strict=True):
            one(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.allclose(full(got), wanted)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: nn.Sequential(fully_shard(net)),
    "sharded": fully_shard,
    "fsdp1": lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_gradients_are_cleared_between_a_forward_and_its_backward(kind: str, to_none: bool) -> None:
    with fake_ranks(2):
        model = WRAPPERS[kind](layers())
        found = []
        for _ in range(3):
            loss = model(torch.ones(2, 4)).sum()
            model.zero_grad(set_to_none=to_none)
            loss.backward()
            found.append([float(p.grad.sum()) for p in model.parameters() if p.grad is not None])  # type: ignore[arg-type]
    assert len(found[0]) > 0
    assert found == [found[0]] * 3


def test_a_copy_of_a_wrapper_of_fsdp1_is_one() -> None:
    with fake_ranks(2):
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
        copied = copy.deepcopy(model)
        assert type(copied) is FullyShardedDataParallel
        assert type(copied.module) is type(model.module)
        assert copied.module is not model.module


class Registered(nn.Module):
    """Cannot be inherited from without a key."""

    def __init_subclass__(cls, *, key: str | None = None, **kwargs: object) -> None:
        if key is None:
            raise TypeError("give a key")
        super().__init_subclass__(**kwargs)


class One(Registered, key="one"):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def test_a_class_that_cannot_be_inherited_from_stays_as_it_is() -> None:
    with fake_ranks(2):
        model = One()
        expected = model(torch.ones(2, 4))
        with pytest.raises(TypeError, match="give a key"):
            fully_shard(model)
        assert type(model) is One
        assert [type(param) for param in model.parameters()] == [nn.Parameter] * 2
        assert not any(type(p.data).__name__ == "DTensor" for p in model.parameters())
        assert torch.equal(model(torch.ones(2, 4)), expected)
