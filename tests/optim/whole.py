"""Parameters of any shapes on any mesh, stepped by ``with_layout`` beside stock optimizers.

The oracle has each block as a plain parameter of its own. Gradients are drawn whole and cut, so
that both have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard import fully_shard
from composable_shard.insight.group_steps import Traffic
from composable_shard.optim import Owned, Rows, Sharded, with_layout
from composable_shard.optim.blocks import blocks_of
from composable_shard.optim.exchange import part_of

muon = partial(torch.optim.Muon, lr=0.05)
adamw = partial(torch.optim.AdamW, lr=0.01)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Spec:
    """A parameter. Its layout is "owned", "sharded", or the numbers of rows of its blocks."""

    shape: tuple[int, ...]
    layout: str | tuple[int, ...] = "owned"
    dim: int = 0

    def layout_of(self, stock: Any = muon) -> Owned | Sharded:
        if self.layout == "sharded":
            return Sharded(adamw)
        return Owned(stock) if self.layout == "owned" else Rows(stock, tuple(self.layout))


class Params(nn.Module):
    def __init__(self, specs: Sequence[Spec], seed: int = 0) -> None:
        super().__init__()
        for index, spec in enumerate(specs):
            self.register_parameter(f"p{index}", nn.Parameter(drawn(spec.shape, seed, index)))

    def forward(self) -> torch.Tensor:
        return sum(param.sum() for param in self.parameters())


def drawn(shape: Sequence[int], *seeds: int) -> torch.Tensor:
    seed = sum(number * 1000**place for place, number in enumerate(seeds))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharded(
    specs: Sequence[Spec],
    extents: Sequence[int] = (),
    seed: int = 0,
    ranks: Sequence[Sequence[int]] = (),
) -> Params:
    """Return parameters on a mesh: of all ranks, unless ``extents`` or ``ranks`` say otherwise."""
    extents = tuple(extents) or (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(extents) :]
    if ranks:
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", extents, mesh_dim_names=names)
    model = Params(specs, seed)
    dims = {param: spec.dim for param, spec in zip(model.parameters(), specs, strict=True)}
    return fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(dims[param]))


def optimizer_of(
    model: nn.Module, specs: Sequence[Spec], stock: Any = muon, **options: int
) -> Optimizer:
    names: dict[Any, set[str]] = {}
    for index, spec in enumerate(specs):
        names.setdefault(spec.layout_of(stock), set()).add(f"p{index}")
    layouts = {partial(is_among, some): layout for layout, some in names.items()}
    return with_layout(model, layouts, **options)


def is_among(names: set[str], name: str, param: torch.Tensor) -> bool:
    return name in names


def laid_out(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def set_gradients(model: Params, step: int, without: Sequence[int] = ()) -> None:
    for index, param in enumerate(model.parameters()):
        grad = drawn(param.shape, step + 1, index)
        param.grad = None if index in without else laid_out(grad, param)


class Oracle:
    """The blocks of all parameters as plain parameters of stock optimizers."""

    def __init__(self, specs: Sequence[Spec], stock: Any = muon) -> None:
        self.specs = specs
        model = Params(specs)
        self.blocks: list[list[nn.Parameter]] = []
        self.optimizers: list[Optimizer] = []
        self.fulls = [param.detach().clone() for param in model.parameters()]
        for spec, full in zip(specs, self.fulls, strict=True):
            parts = [nn.Parameter(self.cut(full, box).clone()) for box in self.boxes(spec)]
            self.blocks.append(parts)
            self.optimizers.append(spec.layout_of(stock).optimizer([{"params": parts}]))

    def boxes(self, spec: Spec) -> list[Any]:
        split = spec.layout if isinstance(spec.layout, tuple) else None
        return blocks_of(spec.shape, split)

    def cut(self, full: torch.Tensor, box: Any) -> torch.Tensor:
        part = part_of(full, box)
        return part[(0,) * max(0, part.ndim - 2)]

    def set_gradients(self, step: int, without: Sequence[int] = ()) -> None:
        for index, (spec, parts) in enumerate(zip(self.specs, self.blocks, strict=True)):
            grad = drawn(spec.shape, step + 1, index)
            for box, part in zip(self.boxes(spec), parts, strict=True):
                part.grad = None if index in without else self.cut(grad, box).clone()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def full(self, index: int, state: str | None = None) -> torch.Tensor:
        full, spec = torch.empty(self.specs[index].shape), self.specs[index]
        for box, part in zip(self.boxes(spec), self.blocks[index], strict=True):
            value = part if state is None else self.optimizers[index].state[part][state]
            self.cut(full, box).copy_(value.detach())
        return full


def assert_equal(model: Params, oracle: Oracle) -> None:
    """Assert that this rank holds the bits of the oracle: all ranks together compare everything."""
    for index, param in enumerate(model.parameters()):
        expected = laid_out(oracle.full(index), param)
        assert torch.equal(local(param), local(expected)), f"p{index}"


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def assert_states_equal(states: Mapping[str, Any], oracle: Oracle) -> None:
    for name, state in states.items():
        for key, value in state.items():
            index = int(name.removeprefix("p"))
            if value.ndim == 0:
                continue
            expected = laid_out(oracle.full(index, key), value)
            assert torch.equal(local(value), local(expected)), f"{key} of {name}"


class AllToAlls(TorchDispatchMode):
    """Notes what this rank sends by each all-to-all, and fails at any other collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Traffic] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            assert "alltoall_base" in str(func), func
            splits = args[4]
            self.sent.append(Traffic(1, sum(map(bool, splits)), args[1].nbytes))
        return func(*args, **(kwargs or {}))


def follow(
    model: Params, specs: Sequence[Spec], stock: Any = muon, **options: int
) -> list[Traffic]:
    """Step a model and the oracle; return what the second step sends: the first may be special."""
    oracle = Oracle(specs, stock)
    optimizer = optimizer_of(model, specs, stock, **options)
    for step in range(2):
        set_gradients(model, step)
        oracle.set_gradients(step)
        oracle.step()
        with AllToAlls() as counted:
            assert optimizer.step(lambda: 3.0) == 3.0
    assert_equal(model, oracle)
    return counted.sent


# Any parameters on any mesh ----------------------------------------------------------------------

EXTENTS = [(1,), (2,), (3,), (4,), (2, 2), (2, 1), (1, 3)]


def num_ranks_of(extents: Sequence[int]) -> int:
    return torch.Size(extents).numel()


sizes = st.integers(1, 9)
matrices = st.builds(Spec, st.tuples(sizes, sizes), dim=st.integers(0, 1))
stacks = st.builds(Spec, st.tuples(st.integers(1, 4), sizes, sizes), dim=st.integers(0, 2))
rest = st.builds(Spec, st.tuples(sizes, sizes), st.just("sharded"), dim=st.integers(0, 1))


@st.composite
def split_ones(draw: st.DrawFn) -> Spec:
    split = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = (sum(split), draw(sizes))
    if draw(st.booleans()):
        shape = (draw(st.integers(1, 3)), *shape)
    return Spec(shape, split, dim=draw(st.integers(0, len(shape) - 1)))


spec_lists = st.lists(st.one_of(matrices, stacks, rest, split_ones()), min_size=1, max_size=6)


class Rotated(torch.optim.Optimizer):
    """Has states of shapes of their own, as Shampoo, and a value for each block."""

    def __init__(self, params: Any, lr: float = 0.1, keeps: Any = None) -> None:
        super().__init__(params, {"lr": lr, "keeps": keeps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["left"] = torch.zeros(param.shape[0], param.shape[0])
                    state["step"], state["norm"] = torch.tensor(0.0), 0.0
                    if group["keeps"]:
                        state["list"] = [1]
                state["left"] += param.grad @ param.grad.T
                state["step"] += 1
                state["norm"] = float(param.grad.norm())
                param.sub_(state["left"] @ param.grad, alpha=group["lr"] / (1 + state["norm"]))
