"""Models and faults that memory without values shows, and training with them."""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard import _torch, fully_shard
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.gloo.exchange import Exchange
from composable_shard.core.transport.gloo.mailbox import Mailbox
from composable_shard.core.transport.gloo.point_to_point import DirectAllGather

STEPS = 3
LR = 0.05
WIDTH = 201  # rows that two ranks share unevenly, and too many bytes to be packed


# The subject ----------------------------------------------------------------------------------


class Scaled(torch.Tensor):
    """Travels in bf16; unsharded it is that and a scale, both of which autograd saves."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor | None = None) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        made.values_, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_"] if self.scale is None else ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, shape: Any, stride: Any) -> Scaled:
        return Scaled(inner["values_"], inner.get("scale"))

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values_.bfloat16(),), (torch.tensor(0.5),)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (values,), (scale,) = outputs, metadata
        if out is None:
            return Scaled(values, scale), (values,)
        out.scale = scale
        return None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Scaled, lambda one: one.values_, args)
        out = func(*plain, **(kwargs or {}))
        if func is torch.ops.aten.detach.default:
            return Scaled(out, args[0].scale)
        aten = torch.ops.aten
        if func in (aten.split.Tensor, aten.slice.Tensor, aten.view.default):
            return torch.utils._pytree.tree_map_only(torch.Tensor, Scaled, out)
        return args[0] if func is torch.ops.aten.add_.Tensor else out


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Scaled) -> torch.Tensor:
        scale = torch.tensor(0.5) if weight.scale is None else weight.scale
        ctx.save_for_backward(x, weight.values_, scale)
        return (x @ weight.values_.bfloat16().float().T) * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, values, scale = ctx.saved_tensors
        return (grad @ values.bfloat16().float()) * scale, (grad.T @ x) * scale


class Block(nn.Module):
    """A weight of a subclass, plain ones of each kind of message, two that rank 0 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(Scaled(torch.randn(64, WIDTH) / 20))
        self.large = nn.Parameter(torch.randn(WIDTH, 64) / 8)
        self.columns = nn.Parameter(torch.randn(WIDTH, WIDTH) / 20)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.extra = nn.Parameter(torch.randn(WIDTH))
        self.wide = nn.Parameter(torch.randn(WIDTH, WIDTH) / 20)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        hidden = Product.apply(x, self.scaled).tanh() @ self.large.T
        out = (hidden @ self.columns + self.bias).tanh()
        if rank == 0:
            out = out @ self.wide + self.extra
        return x + out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, rank)
        return x


def build() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Blocks, rank: int, step: int) -> torch.Tensor:
    return model(batch_of(rank, step), rank).square().mean()


def placement(param: nn.Parameter) -> Shard:
    is_square = type(param) is nn.Parameter and param.shape == (WIDTH, WIDTH)
    return Shard(1 if is_square else 0)


def train_and_compare(reshards: bool | int) -> None:
    """Train; then compare losses, gradients and what a hook saw with the unsharded model."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, whole = build(), build()
    sums: list[float] = []
    pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshards, shard_placement_fn=placement)
        block.set_all_reduce_hook(lambda reduced: sums.append(reduced.double().sum().item()))
    fully_shard(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=LR) for one in (model, whole)]
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        loss.backward()
        losses = [loss_of(whole, place, step) for place in range(num_ranks)]
        (sum(losses) / num_ranks).backward()
        pairs.append((f"loss {step}", loss.detach(), losses[rank].detach()))
        expected = torch.tensor(0.0, dtype=torch.float64)
        for name, param in model.named_parameters():
            full = whole.get_parameter(name)
            assert (param.grad is None) == (full.grad is None), name
            dim = param.placements[0].dim
            pieces = full.grad.chunk(num_ranks, dim)
            mine = pieces[rank] if rank < len(pieces) else full.grad.narrow(dim, 0, 0)
            pairs.append(
                (f"gradient {step} of {name}", param.grad.to_local().clone(), mine.clone())
            )
            expected += mine.double().sum()
        pairs.append((f"sum {step}", torch.tensor(sum(sums), dtype=torch.float64), expected))
        sums.clear()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for what, found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=what)


# The faults -----------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A changed line in a method of the class ``owner``, and the training in which it is seen."""

    owner: type
    method: str
    line: str
    instead: str
    num_ranks: int = 2
    reshards: bool | int = True


class Plant(NamedTuple):
    """A fault that ``plant`` makes by patches; the other attributes are those of `Fault`."""

    plant: Callable[[], contextlib.AbstractContextManager[object]]
    num_ranks: int = 2
    reshards: bool | int = True


class Instead(TorchDispatchMode):
    """Calls something else instead of one operation."""

    def __init__(self, op: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self._op, self._call = op, call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self._call if func is self._op else func
        return call(*args, **(kwargs or {}))


@contextlib.contextmanager
def spoiled_arrivals(
    spoil: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
) -> Iterator[None]:
    """Copy what a gather has brought out of its messages in another way."""
    arrived, gather = set[int](), Channel.gather

    def note(self: Channel, outputs: Any, *rest: Any) -> Any:
        arrived.update(map(_torch.storage_number, outputs))
        return gather(self, outputs, *rest)

    def copy(into: list[torch.Tensor], sources: list[torch.Tensor], *rest: Any) -> None:
        is_arrival = arrived.issuperset(map(_torch.storage_number, sources))
        (spoil if is_arrival else torch._foreach_copy_)(into, sources)

    noting = mock.patch.object(Channel, "gather", note)
    with noting, Instead(torch.ops.aten._foreach_copy_.default, copy):
        yield


def copy_too_late(into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for source in sources:
        source.fill_(torch.nan)
    torch._foreach_copy_(into, sources)


@contextlib.contextmanager
def inner_tensors(*kinds: Any) -> Iterator[None]:
    """Let classes call all that they are made of inner tensors, which are freed with a gather."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            real = kind.fsdp_post_all_gather

            def post(self: Any, *args: Any, real: Any = real, out: Any = None) -> Any:
                result = real(self, *args, out=out)
                if out is not None:
                    return result
                return result[0], (*result[1], *_torch.leaves(result[0]))

            stack.enter_context(mock.patch.object(kind, "fsdp_post_all_gather", post))
        yield


def unset_zeros(applies: Callable[[int], bool]) -> Instead:
    """Leave new tensors unset instead of zero if they have such a number of rows."""

    def call(like: torch.Tensor, size: list[int], **kwargs: Any) -> torch.Tensor:
        return like.new_full(size, torch.nan if applies(size[0]) else 0.0, **kwargs)

    return Instead(torch.ops.aten.new_zeros.default, call)


@contextlib.contextmanager
def no_regather() -> Iterator[None]:
    """Leave out the gathers of parts that neighbours have kept."""
    gather = Channel.gather

    def call(self: Channel, outputs: Any, inputs: Any, *count: int) -> Any:
        return [] if count else gather(self, outputs, inputs)

    with mock.patch.object(Channel, "gather", call):
        yield


FAULTS: dict[str, Fault | Plant] = {
    "saved scales are freed": Plant(lambda: inner_tensors(Scaled)),
    "a rank's own part of a gather is left out": Fault(
        DirectAllGather, "launch", "[rank, *local]", "local"
    ),
    "what is packed is not copied out": Plant(lambda: spoiled_arrivals(lambda *_: None)),
    "what is packed is overwritten before it is copied out": Plant(
        lambda: spoiled_arrivals(copy_too_late)
    ),
    "padding is not cleared": Plant(lambda: unset_zeros(lambda rows: rows == 2)),
    "a missing gradient is not cleared": Plant(lambda: unset_zeros(lambda rows: rows == WIDTH)),
    "a regather is left out": Plant(no_regather, 4, 2),
    "parts that are regathered were freed": Plant(
        lambda: mock.patch.object(
            _torch, "poison_when_unused", lambda part: torch.full_like(part, 255)
        ),
        *(4, 2),
    ),
    "a slab is free before all have read it": Fault(
        Mailbox,
        "_reclaim_slabs",
        "if not published.ranks and not published.slab.is_held:",
        "if True:",
    ),
    "what is published is not filled in": Fault(
        Exchange, "__init__", "zip(tensors or (), layout.offsets, strict=False)", "()"
    ),
}


@contextlib.contextmanager
def planted(fault: Fault | Plant) -> Iterator[None]:
    if isinstance(fault, Plant):
        with fault.plant():
            yield
        return
    method = inspect.getattr_static(fault.owner, fault.method)
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(fault.line) >= 1, fault
    scope = dict(vars(sys.modules[method.__module__]))
    exec(compile(source.replace(fault.line, fault.instead), "<planted>", "exec"), scope)
    with mock.patch.object(fault.owner, fault.method, scope[fault.method]):
        yield
