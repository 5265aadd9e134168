"""Parameters with a mesh of their own, such as experts, beside the others of their group."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from composable_shard import ShardPlacementResult, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks
from meshes.compare import mean_over_ranks

WIDTH = 6


class Experts(nn.Module):
    """Weights of which each expert-parallel rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(5, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.up.T) @ self.down.T


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.gate(x))


def expert_layers(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """Two layers whose experts differ by expert-parallel rank, and a plain copy of them."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), Layer())
        torch.manual_seed(100 + mesh["ep"].get_local_rank())
        for name, param in model.named_parameters():
            if "experts" in name:
                nn.init.normal_(param)
        models.append(model)
    return models[0], models[1]


def train(kind: str, reshard: bool | int) -> list[str]:
    """Experts live on the axis beside the expert-parallel one; all else on both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everywhere = init_device_mesh("cpu", (4,))
    model, plain = expert_layers(mesh)

    def place(param: nn.Parameter) -> object:
        if tuple(param.shape) not in ((5, WIDTH), (WIDTH, 5)):
            return None
        if kind == "mesh":
            return mesh["dp"]
        return ShardPlacementResult(Shard(1) if kind == "inner dim" else None, mesh["dp"])

    for layer in model:
        fully_shard(layer, mesh=everywhere, shard_placement_fn=place, reshard_after_forward=reshard)
    fully_shard(model, mesh=everywhere)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=generator)
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            for either in (model, plain):
                either(x * (microbatch + 1)).square().sum().backward()
        ep = mesh["ep"].get_local_rank()
        own = {n: p.grad for n, p in plain.named_parameters() if "experts" in n}
        shared = {n: p.grad for n, p in plain.named_parameters() if "experts" not in n}
        tagged = mean_over_ranks({f"{ep}:{name}": grad for name, grad in own.items()}, 2)
        means = mean_over_ranks(shared, 4)
        for name, param in model.named_parameters():
            wanted = tagged[f"{ep}:{name}"] if "experts" in name else means[name]
            plain.get_parameter(name).grad = wanted
            got = full(param.grad)
            if not torch.allclose(got, wanted, rtol=1e-5, atol=1e-5):
                found.append(f"step {step}: {name} {(got - wanted).abs().max()}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.named_parameters():
        if not torch.allclose(full(param), plain.get_parameter(name), rtol=1e-5, atol=1e-5):
            found.append(f"value of {name}")
    return found


@pytest.mark.brief(2)
@pytest.mark.parametrize("kind", ["mesh", "result", "inner dim"])
@pytest.mark.parametrize("reshard", [True, False])
def test_training_with_experts_on_a_mesh_of_their_own(kind: str, reshard: bool) -> None:
    assert run_ranks(train, 4, kind, reshard, timeout=30) == [[]] * 4


def test_experts_and_others_stay_sharded_over_as_many_neighbours() -> None:
    assert run_ranks(train, 4, "result", 2, timeout=30) == [[]] * 4


@on_ranks(4)
def test_one_group_gathers_over_both_meshes_at_once() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    layer = Layer()
    fully_shard(
        layer,
        mesh=init_device_mesh("cpu", (4,)),
        shard_placement_fn=lambda p: mesh["dp"] if p.shape[0] == 5 else None,
    )
    with record_events(layer, "all_gather", "reduce_scatter") as events:
        layer(torch.ones(2, WIDTH)).sum().backward()
    up, gate, rank = layer.experts.up, layer.gate.weight, dist.get_rank()
    assert tuple(up.to_local().shape) == ((3, 6) if rank < 2 else (2, 6))
    assert tuple(gate.to_local().shape) == ((2, 6) if rank < 3 else (0, 6))
    assert up.device_mesh.size() == 2
    assert events == [("all_gather", ""), ("reduce_scatter", "")]


@on_ranks(2)
def test_equal_meshes_keep_their_process_groups() -> None:
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]
    assert meshes[0] == meshes[1]
    models = [fully_shard(nn.Linear(4, 4), mesh=mesh) for mesh in meshes]
    assert [
        each.weight.device_mesh.get_group() is mesh.get_group()
        for model, mesh in zip(models, meshes, strict=True)
        for each in (model, copy.deepcopy(model))
    ] == [True] * 4
