"""Parking: memory of a device goes and comes back with its values; nobody uses it meanwhile.

Memory of the host is taken for that of a device here.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_shard import (
    CPUOffloadPolicy,
    ShardError,
    clip_grad_norm_,
    fully_shard,
    iter_full,
    load_sharded,
    local_shards,
    move,
    parked,
    save_full,
    sync_module_states,
    unsharded,
)
from composable_shard.train.parking import DeviceStorages
from train.moved import OPTIMIZERS, as_device, assert_same_bits, on_mesh, stock, values

BIG = 64 * 1024  # bytes


class Wide(nn.Module):
    """Big parameters, two of them tied, some that are too small to be moved, and a buffer."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.plain = nn.Parameter(torch.ones(width))
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.inp(x)))
        return self.second(x) * self.plain + self.mean[0]


def sharded_pair(**kwargs: Any) -> tuple[Wide, Wide]:
    torch.manual_seed(1)
    one = Wide()
    other = copy.deepcopy(one)
    for model in (one, other):
        fully_shard(model.inp, **kwargs)
        fully_shard(model, ignored_params={model.plain}, **kwargs)
    return one, other


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(5, 8, generator=generator)


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


def all_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    grads = {name: param.grad for name, param in model.named_parameters()}
    return values(model, optimizer) | {
        f"grad of {name}": (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
        for name, grad in grads.items()
        if grad is not None
    }


def what_it_is(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    """Return who the tensors are, where they lie, and what their versions show."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [param.grad for param in model.parameters() if param.grad is not None]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    inner = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [
        *[(id(tensor), tensor._version, type(tensor)) for tensor in tensors],
        *[(id(tensor), tensor._version, tensor.stride()) for tensor in inner],
        *[(id(param), sorted(state)) for param, state in optimizer.state.items()],
    ]


# Training goes on as if nothing had been ----------------------------------------------------------


@pytest.mark.parametrize("make", ["stock", "flat", "layouts"])
@on_ranks(2, timeout=120.0)
def test_a_step_is_what_it_would_have_been(make: str) -> None:
    """Parked at every moment between forward and backward: also with gradients that wait."""
    parked_one, other = sharded_pair()
    first, second = OPTIMIZERS[make](parked_one), OPTIMIZERS[make](other)
    hooked: list[str] = []
    parked_one.first.weight.register_hook(lambda _: hooked.append("grad"))

    def park(*kinds: str) -> None:
        before = what_it_is(parked_one, first)
        earlier = all_values(parked_one, first) if make != "layouts" else {}
        with as_device(), parked(parked_one, first) as memory:
            for kind in ("parameters", *kinds):
                assert getattr(memory, kind) > BIG, kind
        assert what_it_is(parked_one, first) == before
        assert_same_bits(earlier, all_values(parked_one, first) if earlier else {})

    park("buffers")
    for step in range(3):
        states = ("states",) if step and make != "layouts" else ()
        for model in (parked_one, other):
            with model.no_sync():
                backward(model, 10 + step)
        park("gradients", *states)
        for model in (parked_one, other):
            backward(model, step)
        park("gradients", *states)
        for model, optimizer in ((parked_one, first), (other, second)):
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        park("gradients")
        for optimizer in (first, second):
            optimizer.zero_grad()
    assert hooked == ["grad"] * 3
    assert_same_bits(all_values(parked_one, first), all_values(other, second))


# The memory is free -------------------------------------------------------------------------------


@contextlib.contextmanager
def emptied() -> Iterator[list[int]]:
    """Note the bytes of each storage that loses its memory, while its tensors live."""
    resize, nbytes = torch.UntypedStorage.resize_, list[int]()

    def note(storage: torch.UntypedStorage, size: int) -> Any:
        nbytes.append(storage.nbytes() - size)
        return resize(storage, size)

    with mock.patch.object(torch.UntypedStorage, "resize_", note):
        yield nbytes


@pytest.mark.parametrize("kind", ["stock", "flat", "layouts", "offloaded", "held", "unsynced"])
@on_ranks(2, timeout=60.0)
def test_parking_frees_exactly_what_it_names(kind: str) -> None:
    kwargs = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if kind == "offloaded" else {}
    model, _ = sharded_pair(**kwargs)
    optimizer = OPTIMIZERS.get(kind, stock)(model)
    sums, freed = list[int](), list[int]()

    def park() -> None:
        if kind == "held":
            model.inp.unshard()
        with as_device(), emptied() as nbytes:
            with parked(model, optimizer) as memory:
                freed.append(sum(nbytes) - memory.nbytes)
            freed.append(sum(nbytes))
        sums.append(memory.nbytes)

    park()
    for step in range(2):
        if kind == "unsynced":
            with model.no_sync():
                backward(model, 5 + step)
            park()
        backward(model, step)
        park()
        optimizer.step()
        park()
        optimizer.zero_grad()
    assert max(sums) > sums[0]  # gradients and states have come
    # All of it comes back; beside it, what was gathered is freed, for good.
    assert set(freed) == {0} if kind == "stock" else min(freed) >= 0, freed


# When it is refused -------------------------------------------------------------------------------


def park_in_forward(model: Wide) -> None:
    model.inp.register_forward_hook(lambda *_: parked(model).__enter__())
    model(batch(0))


def park_when_full(model: Wide) -> None:
    with unsharded(model), parked(model):
        raise AssertionError("must not get here")


REFUSED: dict[str, Callable[[Wide], None]] = {
    "Expected parked() for the root group outside of forward and backward, got a call inside of "
    "one; use it between iterations": park_in_forward,
    "Expected parked() outside of unsharded(), got a call inside of unsharded() of the root group; "
    "leave that context first": park_when_full,
    "Expected FSDPWide on a device to be parked, got all of it in host memory, which "
    "parked() cannot free; save a checkpoint and load it afterwards": lambda model: parked(
        model, stock(model)
    ).__enter__(),
}


@pytest.mark.parametrize("text", REFUSED)
@on_ranks(2)
def test_when_it_is_refused(text: str) -> None:
    model, _ = sharded_pair()
    with pytest.raises(ShardError) as caught:
        REFUSED[text](model)
    assert str(caught.value) == text


# Faults -------------------------------------------------------------------------------------------


def failing(name: str, rank: int) -> Any:
    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    fails = dist.get_rank() == rank
    return mock.patch.object(DeviceStorages, name, fail) if fails else contextlib.nullcontext()


@on_ranks(2)
def test_one_rank_without_memory_on_its_host_or_later_on_its_device() -> None:
    """The first leaves all as it was; after the second, the model stays parked."""
    model, other = sharded_pair()
    pairs = [(model, stock(model)), (other, stock(other))]
    for one, _ in pairs:
        backward(one, 0)
    before = what_it_is(*pairs[0])
    with pytest.raises(ShardError) as caught, as_device(), failing("copy", 1), parked(*pairs[0]):
        raise AssertionError("must not get here")
    assert str(caught.value) == (
        "Expected no failure while parking FSDPWide, got on rank 1: OutOfMemoryError: no memory"
    )
    assert what_it_is(*pairs[0]) == before
    for _, optimizer in pairs:
        optimizer.step()
    assert_same_bits(all_values(*pairs[0]), all_values(*pairs[1]))

    with pytest.raises(ShardError) as caught, as_device(), failing("come_back", 0), parked(model):
        pass
    assert str(caught.value) == (
        "Expected no failure while parking FSDPWide, got on rank 0: "
        "OutOfMemoryError: no memory; it stays parked, so start all ranks again, from a checkpoint"
    )
    with pytest.raises(ShardError, match="got them parked"):
        model(batch(0))


# What has no shards in memory is not read: parked, or moved to other ranks ------------------------


def uses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    file: Path,
    ranks: dist.ProcessGroup | None = None,
) -> list[tuple[str, Callable[[], Any]]]:
    """Return what reads, writes or computes with shards, by what the error calls it."""
    state, other = model.state_dict(), torch.optim.SGD(model.parameters(), lr=0.1)
    within = {"process_group": ranks}
    return [
        ("to be gathered", lambda: model(torch.ones(1, 64))),
        ("to be gathered", lambda: model.unshard()),
        ("for a state dict", lambda: model.state_dict()),
        ("to load a state dict", lambda: model.load_state_dict(state)),
        ("for unsharded()", lambda: unsharded(model).__enter__()),
        ("for parked()", lambda: parked(model, **within).__enter__()),
        ("for a step of AdamW", optimizer.step),
        ("for a step of SGD", other.step),
        ("to be copied", lambda: copy.deepcopy(model)),
        ("for local_shards()", lambda: list(local_shards(model))),
        ("for iter_full()", lambda: list(iter_full(model, **within))),
        ("for save_full()", lambda: save_full(model, file, overwrite=True, **within)),
        ("for load_sharded()", lambda: load_sharded(model, file, **within)),
        (
            "for sync_module_states()",
            lambda: sync_module_states(model, src_rank=dist.get_rank(), keep_shards=True, **within),
        ),
    ]


def check(cases: list[tuple[str, Callable[[], Any]]], why: str) -> None:
    for purpose, use in cases:
        with pytest.raises(ShardError) as caught:
            use()
        text = f"Expected shards of the root group in memory {purpose}, got them {why}"
        assert str(caught.value) == text


def trained(mesh: DeviceMesh) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = fully_shard(nn.Linear(64, 64), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 64), dist.get_rank() + 1.0)).square().mean().backward()
    optimizer.step()


@on_ranks(2)
def test_a_parked_model_is_not_used(tmp_path: Path) -> None:
    pairs = [trained(on_mesh(0, 1)) for _ in range(2)]
    model, optimizer = pairs[0]
    file = tmp_path / "model.safetensors"
    save_full(model, file)
    cases, states = uses(model, optimizer, file), optimizer.state_dict()
    loss = model(torch.ones(2, 64)).sum()
    with as_device(), parked(model, optimizer):
        why = "parked; leave the context of parked() first"
        check([("to be gathered", loss.backward), *cases], why)
        for use in (optimizer.state_dict, lambda: optimizer.load_state_dict(states)):
            with pytest.raises(ShardError) as caught:
                use()
            assert str(caught.value) == (
                "Expected AdamW in memory, got it parked; leave parked() first"
            )
    for one, its_optimizer in pairs:  # and afterwards all is well
        step(one, its_optimizer)
    assert_same_bits(*(values(*pair) for pair in pairs))
    copied = copy.deepcopy(model)
    assert torch.equal(copied.weight.full_tensor(), model.weight.full_tensor())


@on_ranks(2)
def test_a_rank_that_a_model_has_left_is_told_so(tmp_path: Path) -> None:
    (model, optimizer), first = trained(on_mesh(0, 1)), on_mesh(0)
    alone = dist.new_group([1])
    cases = uses(model, optimizer, tmp_path / "model.safetensors", alone)
    move(model, optimizer, first)
    why = "on other ranks; move() the model to a mesh with this rank first"
    if dist.get_rank() == 1:
        check(cases, why)
        assert list(optimizer.state_dict()) == ["state", "param_groups"]
        for param in model.parameters():
            assert param.to_local().numel() == 0 and param.grad is None
            assert param.device_mesh.mesh.tolist() == [0]
            assert not optimizer.state.get(param)
    else:
        step(model, optimizer)
    text = f"Expected shards of the root group in memory for iter_full(), got them {why}"
    with pytest.raises(ShardError) as caught:
        list(iter_full(model))
    assert str(caught.value) == (
        f"Expected no failure while gathering full weights, got on rank 1: ShardError: {text}"
    )
