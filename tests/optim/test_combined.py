"""Optimizers of layouts beside what else there is: tensor parallelism, offload, flat steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_shard.optim import Owned, Rows, Sharded, flat, with_layout
from optim.whole import adamw, momentum, muon


class Net(nn.Module):
    """Matrices whose rows, or columns, tensor parallelism cuts; a fused one; the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.split = nn.Linear(6, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.split(self.down(self.up(x).tanh())).square().mean()


def layouts() -> dict[Any, Any]:
    return {
        "split.weight": Rows(momentum, split_sizes=(4, 6)),
        "up.weight": Rows(muon, split_sizes=(3, 5)),  # of all rows, it would not mind their order
        "*.weight": Owned(muon),
        "*": Sharded(adamw),
    }


def plain_optimizers(net: Net) -> Callable[[], None]:
    """Return what steps an unsharded net as ``layouts`` do."""
    split = {net.split.weight: (4, 6), net.up.weight: (3, 5)}
    blocks = {
        weight: [nn.Parameter(part.clone()) for part in weight.detach().split(sizes)]
        for weight, sizes in split.items()
    }
    optimizers = [
        momentum(blocks[net.split.weight]),
        muon([*blocks[net.up.weight], net.down.weight]),
        adamw([net.up.bias, net.down.bias]),
    ]

    def step() -> None:
        for weight, parts in blocks.items():
            assert weight.grad is not None
            for part, grad in zip(parts, weight.grad.split(split[weight]), strict=True):
                part.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for weight, parts in blocks.items():
                weight.copy_(torch.cat(parts))

    return step


def nets() -> tuple[Net, Any]:
    torch.manual_seed(0)
    plain = Net()
    model = Net()
    model.load_state_dict(plain.state_dict())
    return plain, model


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.to(torch.float32)


def follow(plain: Net, model: Any, step: Callable[[], Any], num_micro: int = 1) -> None:
    """Train both; the plain one has the gradients of the other, whatever the order of sums."""
    plain_step = plain_optimizers(plain)
    data_rank = dist.get_rank() if model.up.weight.device_mesh.ndim == 1 else 0
    for index in range(3):
        for micro in range(num_micro):
            model.set_requires_gradient_sync(micro == num_micro - 1)
            model(torch.full((2, 6), 0.3 * index + 0.1 * micro + data_rank)).backward()
        for param, own in zip(model.parameters(), plain.parameters(), strict=True):
            own.grad = full(param.grad)
        step()
        plain_step()
        for (name, param), own in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(param), own), name
            param.grad = None


# Tensor parallelism -------------------------------------------------------------------------------


def parallel(placement: Any = None, shape: tuple[int, int] = (2, 2)) -> tuple[Net, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))
    plain, model = nets()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["model"], plan)
    return plain, fully_shard(model, mesh=mesh["data"], shard_placement_fn=placement)


def rows_or_columns(param: torch.Tensor) -> Shard:
    """Cut the dim that tensor parallelism does not cut, where there is one."""
    return Shard(1 if param.shape == (8, 6) else 0)


@pytest.mark.parametrize("placement", [rows_or_columns, None], ids=["", "rows that both cut"])
@pytest.mark.parametrize(
    ("shape", "num_ranks"), [((2, 2), 4), ((1, 2), 2), ((2, 1), 2), ((3, 2), 6)]
)
@on_ranks("num_ranks")
def test_tensor_parallelism(shape: tuple[int, int], placement: Any) -> None:
    plain, model = parallel(placement, shape)
    follow(plain, model, with_layout(model, layouts()).step)


@on_ranks(4)
def test_states_of_rows_that_both_cut() -> None:
    """Step twice, or once, save, load, and once again: all ends the same."""
    ends = []
    for is_reloaded in (False, True):
        _, model = parallel()
        optimizer = with_layout(model, layouts())
        for step in range(2):
            if step == 1 and is_reloaded:
                states = optimizer.state_dict()
                optimizer = with_layout(model, layouts())
                optimizer.load_state_dict(states)
            model(torch.full((2, 6), 0.3 + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = get_optimizer_state_dict(model, optimizer)["state"]
        assert saved["up.weight"]["momentum_buffer"].placements == model.up.weight.placements
        ends.append([full(saved[f"{name}.weight"]["momentum_buffer"]) for name in ("up", "down")])
        ends[-1] += map(full, model.parameters())
    assert all(map(torch.equal, *ends))
    assert all(end.any() for end in ends[0])


# Offload, low precision, accumulation -------------------------------------------------------------


SETTINGS: dict[str, dict[str, Any]] = {
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "offload of some": {"offload_policy": {"up.weight": CPUOffloadPolicy(pin_memory=False)}},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "kept after forward": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks("num_ranks")
def test_settings_of_sharding(setting: str) -> None:
    plain, model = nets()
    fully_shard(model, **SETTINGS[setting])
    follow(plain, model, with_layout(model, layouts()).step, num_micro=2)


# Beside flat steps --------------------------------------------------------------------------------


@on_ranks(2)
def test_several_optimizers_of_one_tree() -> None:
    """Optimizers of some matrices beside one of flat buffers, or flat steps within a layout."""
    plain, model = nets()
    fully_shard(model.split)
    fully_shard(model)
    matrices = with_layout(nn.ModuleList([model.split]), {"*": Rows(momentum, split_sizes=(4, 6))})
    up = with_layout(nn.ParameterList([model.up.weight]), {"*": Rows(muon, split_sizes=(3, 5))})
    down = with_layout(nn.ParameterList([model.down.weight]), {"*": Owned(muon)})
    rest = flat(adamw([model.up.bias, model.down.bias]))
    several = (matrices, up, down, rest)
    follow(plain, model, lambda: [optimizer.step() for optimizer in several])
    plain, model = nets()
    fully_shard(model)
    chosen = {**layouts(), "*": Sharded(lambda groups: flat(adamw(groups)))}
    follow(plain, model, with_layout(model, chosen).step)
