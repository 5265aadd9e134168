"""Modules and state dicts that are pickled, or saved by torch: they train on as the originals."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
from nets import both
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import shard_layers, two_tensor_hooks, two_tensor_mlp

from checkpoint.models import (
    OPTIMIZERS,
    State,
    all_ranks,
    assert_equal,
    evaluate,
    plain_model,
    shard,
    sharded_model,
    tensors,
    three_ranks,
    train,
)
from composable_shard import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    explain,
    fully_shard,
)
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks, run_ranks, stop_ranks


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 4, generator=generator, dtype=torch.float64)


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def halved(grad: torch.Tensor) -> None:
    grad /= 2


# How it is sharded ----------------------------------------------------------------------------


def hybrid() -> nn.Module:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return sharded_model(mesh=mesh)


def with_settings() -> nn.Module:
    model: Any = sharded_model()
    model.set_gradient_divide_factor(3.0)
    model.set_reshard_after_backward(False)
    model.outer.inner.set_reshard_after_forward(False)
    model.set_separate_reduce_scatter_group(True)
    model.outer.set_all_reduce_hook(halved)
    return model  # type: ignore[no-any-return]


def with_hooks() -> nn.Module:
    model = plain_model(0)
    model.outer.inner.register_forward_hook(double)
    model.first.weight.tag = "before"  # type: ignore[attr-defined]
    shard(model)
    model.outer.register_forward_hook(double)
    model.register_forward_hook(double)
    model.outer.inner.down.weight.grad_dtype = None
    return model


KINDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "alone": (sharded_model, 1),
    "nested": (sharded_model, 3),
    "mixed": (
        partial(
            sharded_model, mp_policy=MixedPrecisionPolicy(torch.float32, buffer_dtype=torch.float32)
        ),
        2,
    ),
    "offloaded": (partial(sharded_model, offload_policy=CPUOffloadPolicy(pin_memory=False)), 2),
    "kept": (partial(sharded_model, reshard_after_forward=False), 2),
    "to_two": (partial(sharded_model, reshard_after_forward=2), 4),
    "hybrid": (hybrid, 4),
    "with_settings": (with_settings, 2),
    "with_hooks": (with_hooks, 2),
}


# Both train on --------------------------------------------------------------------------------


def train_on(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for microbatch in range(2):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(microbatch == 1)
            loss = model(batch(2 * step + microbatch)).square().sum()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=0.03)


def facts(model: nn.Module) -> list[Any]:
    """Return what has to be the same of a module that was loaded."""
    found: list[Any] = [[type(module) for module in model.modules()]]
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        placements = getattr(param, "placements", None)
        kept = (param.grad_dtype, param.requires_grad, getattr(param, "tag", None))
        found.append((name, placements, local.detach().clone(), kept))
    found += [(name, buffer.clone()) for name, buffer in model.named_buffers()]
    found += [
        [len(hooks) for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        for module in model.modules()
    ]
    return [*found, *explain(model).groups]


def events_of(model: Any, optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    tree = next(module for module in model.modules() if isinstance(module, FSDPModule))
    with record_events(tree) as events:
        train_on(model, optimizer, range(6, 7))
    return list(events)


BEFORE, WITHIN, AFTER = "before the first forward", "within an iteration", "after training"
TIMES = [
    *((kind, ranks, AFTER) for kind, (_, ranks) in KINDS.items()),
    *((kind, 2, when) for kind in ("nested", "kept") for when in (BEFORE, WITHIN)),
]


@pytest.mark.brief(5)
@pytest.mark.parametrize("way", ["torch.save", "pickle"])
@pytest.mark.parametrize(("kind", "ranks", "when"), TIMES)
@on_ranks("ranks")
def test_what_is_loaded_trains_on_as_the_original(
    tmp_path: Path, kind: str, way: str, when: str
) -> None:
    """Train a model and what was loaded of it, in turns; compare all along, bit by bit."""
    model: Any = KINDS[kind][0]()
    optimizer = optimizer_of(model)
    if when != BEFORE:
        train_on(model, optimizer, range(2))
    if when == WITHIN:
        loss = model(batch(9)).square().sum()
    both, file = {"model": model, "optimizer": optimizer}, tmp_path / f"{dist.get_rank()}.pt"
    if way == "torch.save":
        torch.save(both, file)
        loaded = torch.load(file, weights_only=False)
    else:
        loaded = again(both)
    if when == WITHIN:
        loss.backward()
        optimizer.zero_grad()
        model.zero_grad()
    other, its_optimizer = loaded["model"], loaded["optimizer"]
    assert_equal(facts(other), facts(model))
    held = [id(p) for group in its_optimizer.param_groups for p in group["params"]]
    assert held == [id(p) for p in other.parameters() if p.requires_grad]
    for steps in (range(2, 4), range(4, 6)):
        assert train_on(model, optimizer, steps) == train_on(other, its_optimizer, steps)
        assert_equal(facts(other), facts(model), f"after {steps}")
    assert events_of(other, its_optimizer) == events_of(model, optimizer)


# In another process ---------------------------------------------------------------------------


def save(folder: Path) -> list[float]:
    model = hybrid()
    optimizer = optimizer_of(model)
    train_on(model, optimizer, range(2))
    torch.save((model, optimizer), folder / f"{dist.get_rank()}.pt")
    return train_on(model, optimizer, range(2, 5))


def load(folder: Path) -> list[float]:
    dist.new_group([0])  # groups of the same mesh have other numbers here
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, optimizer = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    later: list[int] = []
    for module in model.modules():  # hooks of others do not take the places of those loaded
        module.register_forward_hook(lambda *_: later.append(1))
        module.register_forward_pre_hook(lambda *_: later.append(1))
    losses = train_on(model, optimizer, range(2, 5))
    assert later
    return losses


def test_another_process_with_the_same_mesh_trains_on(tmp_path: Path) -> None:
    expected = run_ranks(save, 2, tmp_path)
    stop_ranks()
    try:
        assert run_ranks(load, 2, tmp_path) == expected
    finally:
        stop_ranks()


@on_ranks(2)
def test_a_file_of_another_rank_is_refused(tmp_path: Path) -> None:
    own = dist.get_rank()
    torch.save(sharded_model(), tmp_path / f"{own}.pt")
    dist.barrier()
    if own == 0:
        torch.load(tmp_path / "0.pt", weights_only=False)
        return
    with pytest.raises(ValueError) as caught:
        torch.load(tmp_path / "0.pt", weights_only=False)
    assert str(caught.value) == (
        "Expected a module that rank 1 has saved, got one of rank 0; let each rank save and load "
        "a file of its own"
    )


def test_a_module_is_not_loaded_without_its_process_groups() -> None:
    with fake_ranks(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        saved = pickle.dumps(sharded_model(mesh=mesh))
    with pytest.raises(ValueError) as caught:
        pickle.loads(saved)
    assert str(caught.value) == (
        "Expected the saved mesh, got no process group; make it before loading"
    )
    with fake_ranks(4, rank=1):
        with pytest.raises(ValueError) as caught:
            pickle.loads(saved)
        assert str(caught.value) == (
            "Expected a process group of ranks [1, 3], got none; create its mesh"
        )


# What else hangs on modules -------------------------------------------------------------------


def again(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def test_parts_of_a_model_are_pickled_alone() -> None:
    """What is above, or beside, is not in the pickle, though settings refer to it."""
    with fake_ranks(2):
        model: Any = sharded_model()
        inner, model.big = model.outer.inner, nn.Linear(500, 500)
        inner.set_modules_to_forward_prefetch([model.outer, model])
        inner.note = "a value"
        data = pickle.dumps(inner)
        assert len(data) < 100_000
        other = pickle.loads(data)
        assert other.note == "a value"
        with record_events(other, "all_gather") as events:
            other(torch.ones(2, 6, dtype=torch.float64))
        assert events == [("all_gather", "")]


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_tensor_subclasses_are_pickled() -> None:
    with two_tensor_hooks():
        model = shard_layers(two_tensor_mlp(alike=False))
        x = torch.randn(4, 8)
        model(x).sum().backward()
        other = again(model)
        for one in (model, other):
            one.zero_grad()
            one(x).sum().backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            for inner in "ab":
                for pair in ((mine, theirs), (mine.grad, theirs.grad)):
                    assert torch.equal(*(getattr(one.to_local(), inner) for one in pair))


def test_the_bytes_are_those_of_the_shards() -> None:
    sizes = []
    for ranks in (1, 4):
        with fake_ranks(ranks):
            sizes.append(len(pickle.dumps(fully_shard(nn.Linear(512, 512)))))
    assert sizes[0] > 512 * 512 * 4
    assert sizes[1] < 512 * 512 * 4 / 3


# State dicts as things ----------------------------------------------------------------------------


WAYS: dict[str, dict[str, Any]] = {
    "anything": {"weights_only": False},
    "weights-only": {"weights_only": True},
}


@all_ranks
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@on_ranks("num_ranks")
def test_shards_are_pickled(tmp_path: Path, way: dict[str, Any]) -> None:
    model = sharded_model(0)
    optimizers = OPTIMIZERS["groups"](model)
    train(model, optimizers, 0, 2)
    evaluate(model)
    file = tmp_path / f"{dist.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizers[0].state_dict()}, file)
    for assign in (False, True):
        target = sharded_model(5)
        target_optimizers = OPTIMIZERS["groups"](target)
        state = torch.load(file, **way)
        assert all(isinstance(state["model"][n], DTensor) for n, _ in target.named_parameters())
        target.load_state_dict(state["model"], assign=assign)
        assert_equal(target.state_dict(), model.state_dict())
        if assign:
            target_optimizers = OPTIMIZERS["groups"](target)
        target_optimizers[0].load_state_dict(state["optimizer"])
        assert_equal(target_optimizers[0].state_dict(), optimizers[0].state_dict())
        pairs = ((model, optimizers), (target, target_optimizers)) if assign else ()
        for one, its_optimizers in pairs:
            train(one.train(), its_optimizers, 2, 3)
        assert_equal(target.state_dict(), model.state_dict())


def size_of(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer().nbytes


@on_ranks(2)
def test_shards_of_one_group_are_written_without_their_neighbours() -> None:
    state = {n: t for n, t in sharded_model(0).state_dict().items() if isinstance(t, DTensor)}
    one = {"wide.weight": state["wide.weight"]}
    assert size_of(one) == size_of({"wide.weight": one["wide.weight"].clone()})
    assert size_of(one) < size_of(state) < 1.1 * size_of({n: t.clone() for n, t in state.items()})


@three_ranks
@on_ranks("num_ranks")
def test_shards_are_contiguous_rows() -> None:
    """What writes local tensors itself (safetensors) finds this rank's rows, contiguous."""
    expected = tensors(plain_model(0).state_dict())
    for name, tensor in tensors(sharded_model(0).state_dict()).items():
        local, own = both(tensor, expected[name])
        assert torch.equal(local, own), name
        if isinstance(tensor, DTensor):
            assert local.is_contiguous() and type(local) is torch.Tensor
            assert tensor.storage_offset() == 0  # of the DTensor, which has no memory of its own
            written = bytes(local.view(torch.uint8).flatten().tolist())
            assert written == bytes(own.contiguous().view(torch.uint8).flatten().tolist())


ROWS = (5, 2)
DIMS = (1, 0)


def plain_pairs(seed: int) -> nn.Sequential:
    """Two layers of five and of two rows, whose weights are pairs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, ROWS[0], bias=False), nn.Linear(ROWS[0], ROWS[1]))
    for layer in model:
        layer.weight = nn.Parameter(
            TwoTensor(layer.weight.detach(), torch.randn_like(layer.weight))
        )
    return model


def sharded_pairs(seed: int) -> nn.Sequential:
    model = plain_pairs(seed)
    for layer, dim in zip(model, DIMS, strict=True):
        fully_shard(layer, shard_placement_fn=lambda p, dim=dim: Shard(dim if p.ndim > 1 else 0))
    return fully_shard(model)


def assert_rows(state: Mapping[str, Any], plain: Mapping[str, torch.Tensor]) -> None:
    assert list(state) == list(plain)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        (placement,), local = tensor.placements, tensor.to_local()
        assert placement == Shard(DIMS[int(name[0])] if name.endswith("weight") else 0)
        kinds = ("a", "b") if name.endswith("weight") else ("data",)
        assert type(local) is (TwoTensor if len(kinds) == 2 else torch.Tensor)
        for kind in kinds:
            whole = getattr(plain[name].detach(), kind)
            chunks = whole.chunk(num_ranks, placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            assert torch.equal(getattr(local, kind), chunks[rank] if rank < len(chunks) else empty)


def copied(plain: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}


@all_ranks
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@on_ranks("num_ranks")
def test_state_dicts_of_pairs(assign: bool) -> None:
    with two_tensor_hooks():
        source, plain = sharded_pairs(0), plain_pairs(0)
        assert_rows(source.state_dict(), plain.state_dict())
        x = torch.ones(2, 3)
        for state in (copied(plain), source.state_dict(), copy.deepcopy(source.state_dict())):
            target = sharded_pairs(1)
            if not assign:
                target(x)
            target.load_state_dict(state, assign=assign)
            assert_rows(target.state_dict(), plain.state_dict())
            out, expected = target(x), plain(x)
            torch.testing.assert_close(out.a, expected.a)
            torch.testing.assert_close(out.b, expected.b)
            assert_rows(target.state_dict(), plain.state_dict())


@all_ranks
@on_ranks("num_ranks")
def test_distributed_checkpoints_of_pairs(tmp_path: Path) -> None:
    def train_pairs(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        one(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def values(one: nn.Module, optimizer: torch.optim.Optimizer) -> list[State]:
        model_state, optimizer_state = get_state_dict(one, optimizer)
        found: list[State] = []
        for state in (model_state, *optimizer_state["state"].values()):
            held = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in state.items()}
            found += [{n: getattr(t, kind, t) for n, t in held.items()} for kind in ("a", "b")]
        return found

    with two_tensor_hooks(), torch.serialization.safe_globals([TwoTensor]):
        made = []
        for seed in (0, 1):
            model = sharded_pairs(seed)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
            made.append((model, optimizer))
        source, target = made
        train_pairs(*source)
        saved, read = (get_state_dict(*one) for one in made)
        dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path)
        dcp.load({"model": read[0], "optimizer": read[1]}, checkpoint_id=tmp_path)
        set_state_dict(*target, model_state_dict=read[0], optim_state_dict=read[1])
        for _ in range(2):
            assert_equal(values(*target), values(*source))
            for one in made:
                train_pairs(*one)
        assert_equal(values(*target), values(*source))
