"""What the module holds outside of compute, and how it is saved, loaded, moved and initialized."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from launches import counted
from nets import Net, assert_parity, own_input, shard_net, train_step, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from composable_shard import MixedPrecisionPolicy, fully_shard


def assert_sharded(name: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert a Shard(0) DTensor whose local rows are this rank's of ``expected``."""
    assert isinstance(tensor, DTensor), name
    assert tensor.placements == (Shard(0),) and tensor.shape == expected.shape, name
    chunks = expected.detach().chunk(dist.get_world_size())
    rank = dist.get_rank()
    own = chunks[rank] if rank < len(chunks) else expected.detach()[:0]
    assert torch.equal(tensor.to_local().detach(), own), name


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_parameters_are_sharded_and_lie_together_for_each_group() -> None:
    reference, model = two_nets(2)
    for _ in range(2):
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in reference.named_parameters()]
        for name, param in model.named_parameters():
            assert isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad
            assert_sharded(name, param, reference.get_parameter(name))
        for params in (
            [*model.inp.parameters(), *model.out.parameters()],
            list(model.blocks[0].parameters()),
            list(model.blocks[1].parameters()),
        ):
            locals_ = [param.to_local() for param in params]
            assert all(local.storage_offset() == 0 for local in locals_)
            places = [local.data_ptr() for local in locals_ if local.numel()]
            nbytes = sum(local.nbytes for local in locals_)
            assert max(places) - min(places) <= 2 * nbytes + 64 * len(places)
        model(own_input()).sum().backward()
    for param in model.parameters():
        assert param.grad.placements == param.placements


@on_ranks(1)
def test_one_rank_communicates_and_copies_nothing() -> None:
    """It computes with the very storage that the optimizer sees."""
    _, model = two_nets(1)
    stored = {name: param.to_local().data_ptr() for name, param in model.named_parameters()}
    used: dict[str, int] = {}

    def note(*_: object) -> None:
        used.update({name: param.data_ptr() for name, param in model.named_parameters()})

    model.blocks[0].up.register_forward_pre_hook(note)
    with counted() as launched:
        model(own_input()).sum().backward()
    assert launched == []
    assert used == stored


@on_ranks(2)
def test_parameters_are_plain_during_compute() -> None:
    reference, model = two_nets(1)
    seen: dict[str, nn.Parameter] = {}
    block = model.blocks[0]
    block.up.register_forward_pre_hook(lambda *_: seen.update(block.named_parameters()))
    model(own_input())
    assert list(seen) == [name for name, _ in reference.blocks[0].named_parameters()]
    for name, param in seen.items():
        assert type(param) is nn.Parameter and param.is_leaf
        assert param.shape == reference.blocks[0].get_parameter(name).shape


def fill(module: nn.Module) -> None:
    """Set initial values that depend on shapes alone."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 1 / max(tensor.shape, default=1))


def stack() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).apply(fill)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_initialization_from_the_meta_device_equals_the_eager_one() -> None:
    reference = stack()
    with torch.device("meta"):
        model = stack()
    for layer in (*model, model):
        fully_shard(layer)
    assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
    model.to_empty(device="cpu").apply(fill)
    assert_parity(model, reference)
    assert all(map(torch.equal, model.buffers(), reference.buffers()))
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(2):
        losses = [
            train_step(one, step, optimizer)
            for one, optimizer in zip((model, reference), optimizers, strict=True)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_parity(model, reference)


@on_ranks(2)
def test_ignored_params_stay_as_they_are() -> None:
    reference = Net(1)
    model = copy.deepcopy(reference)
    ignored = {model.inp.weight, model.blocks[0].norm.bias}
    fully_shard(model.blocks[0], ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    assert model.inp.weight in ignored and type(model.inp.weight) is nn.Parameter
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert plain == ["inp.weight", "blocks.0.norm.bias"]
    for one in (reference, model):
        one(own_input()).square().sum().backward()
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name).grad
        if name in plain:  # this rank's own gradient, reduced by nobody
            assert torch.equal(param.grad, expected), name
        else:
            dist.all_reduce(expected)
            assert torch.equal(param.grad.full_tensor(), expected / 2), name


@on_ranks(2)
def test_state_dict_has_the_storage_dtype_under_mixed_precision() -> None:
    model = shard_net(Net(1), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(own_input())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
