"""Gradients whose tensor types decide what travels: exact if nothing is lost, and agreed on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.models import Net, assert_same, average_gradients, full, own_input, shard_net
from near import Apart
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from composable_shard import (
    CommunicationError,
    CPUOffloadPolicy,
    ExtensionError,
    MixedPrecisionPolicy,
    fully_shard,
)
from composable_shard.core.params.extension import has_grad_extension
from composable_shard.testing import RankError, fake_ranks, run_ranks
from int8_gradients import BLOCK, Int8Gradients, send_int8_gradients

PRE, POST = "fsdp_pre_reduce_scatter", "fsdp_post_reduce_scatter"


class Lossless(Int8Gradients):
    """Sends every other element in a tensor of its own; counts calls in its metadata."""

    num_calls = 0

    def fsdp_pre_reduce_scatter(self, grad: torch.Tensor, mesh: Any) -> Any:
        assert grad.ndim == 2 and len(grad) == mesh.size(mesh.ndim - 1)
        self.num_calls += 1
        return (grad[:, ::2], grad[:, 1::2].double()), self.num_calls

    def fsdp_post_reduce_scatter(self, received: Any, metadata: Any, out: torch.Tensor) -> None:
        assert metadata == (self.num_calls or None)
        even, odd = received
        out[::2], out[1::2] = even.sum(0, dtype=out.dtype), odd.sum(0)


def as_type(model: nn.Module, kind: type[Int8Gradients]) -> nn.Module:
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(kind(param.detach())))
    return model


@contextmanager
def wire() -> Iterator[list[int]]:
    """Count the bytes that this rank sends all to all, and refuse every reduce-scatter."""
    nbytes: list[int] = []
    send = dist.all_to_all_single

    def count(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
        nbytes.append(source.nbytes)
        return send(output, source, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", count):
        yield nbytes


# What arrives ----------------------------------------------------------------------------------


def on_columns(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def trains_alike(kwargs: dict[str, Any], columns: bool, replicas: int, accumulates: bool) -> None:
    """Compare three steps with those of the plain model, bit by bit on two ranks."""
    if columns:
        kwargs["shard_placement_fn"] = on_columns
    if replicas > 1:
        shape = (replicas, dist.get_world_size() // replicas)
        kwargs["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    plain = Net()
    model = shard_net(as_type(copy.deepcopy(plain), Lossless), **kwargs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(3):
        with wire() as sent:
            for micro in range(1 + accumulates):
                batch = own_input(10 * step + micro)
                model.set_requires_gradient_sync(micro == accumulates)
                for each in (plain, model):
                    each(batch).square().sum().backward()
        assert len(sent) == (3 if dist.get_world_size() > replicas else 0)
        average_gradients(plain.parameters())
        for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert type(other.grad._local_tensor) is torch.Tensor
            if columns:  # what is gathered has other strides, and is multiplied in another order
                torch.testing.assert_close(full(other.grad), param.grad, rtol=1e-5, atol=1e-5)
            else:
                assert_same(full(other.grad), param.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("num_ranks", "kwargs", "columns", "replicas", "accumulates"),
    [
        (1, {}, False, 1, False),
        (2, {}, False, 1, False),
        (3, {}, False, 1, True),
        (2, {"reshard_after_forward": False}, True, 1, True),
        (3, {}, True, 1, False),
        (4, {}, False, 2, True),
        (2, {}, False, 2, False),
        (2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, False, 1, True),
    ],
)
def test_what_loses_nothing_trains_as_the_plain_model(
    num_ranks: int, kwargs: dict[str, Any], columns: bool, replicas: int, accumulates: bool
) -> None:
    run_ranks(trains_alike, num_ranks, kwargs, columns, replicas, accumulates)


def test_ranks_that_exchange_messages() -> None:
    run_ranks(Apart(trains_alike), 3, {}, False, 1, False)


def scaled(divisor: float | None, sums_only: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradients of a weight, and what they are by hand."""
    layer = nn.Linear(3, 4, bias=False)
    weight = layer.weight.detach().clone()
    as_type(layer, Lossless)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype=torch.float16))
    if divisor is not None:
        layer.set_gradient_divide_factor(divisor)
    layer.set_force_sum_reduction_for_comms(sums_only)
    x = torch.full((1, 3), 300.0, dtype=dtype)  # the sum of squares of two overflows in fp16
    (layer(x) * 100).sum().backward()
    assert weight.shape == (4, 3)
    return [layer.weight.grad.full_tensor()]


@pytest.mark.parametrize("divisor", [None, 8.0])
@pytest.mark.parametrize("sums_only", [False, True])
def test_sums_are_taken_in_fp32_and_divided_before_they_are_narrowed(
    divisor: float | None, sums_only: bool
) -> None:
    ((grad,), _, _) = run_ranks(scaled, 3, divisor, sums_only, torch.float32)
    expected = 3 * 30_000 / (divisor or 3)  # 90,000 is more than a half can hold
    assert torch.equal(grad, torch.full((4, 3), expected).half().float())


class Branches(nn.Module):
    """Uses one of two weights, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(3, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return x * self.weights[which] if which < 2 else x


def partly_used() -> list[list[float | None]]:
    """Return sums of the gradients when ranks use one weight, some or both of them, or none."""
    model = as_type(Branches(), Lossless)
    weights = fully_shard(model).weights
    found = []
    for choice in ((0, 0), (0, 2), (2, 1), (2, 2)):
        x = torch.full((3, 3), 2.0, requires_grad=True)
        model(x, choice[dist.get_rank()]).sum().backward()
        grads = [weight.grad for weight in weights]
        found.append([None if g is None else g.full_tensor().sum().item() for g in grads])
        found.append([weight._local_tensor.num_calls for weight in weights])
        model.zero_grad()
    return found


def test_hooks_are_called_where_there_is_a_gradient_and_none_is_where_nobody_has_one() -> None:
    first, second = run_ranks(partly_used, 2)
    assert first[::2] == second[::2] == [[18.0, None], [9.0, None], [None, 9.0], [None, None]]
    assert first[1::2] == [[1, 0], [2, 0], [2, 0], [2, 0]]
    assert second[1::2] == [[1, 0], [1, 0], [1, 1], [1, 1]]


def trainable_later() -> tuple[list[Any], list[int]]:
    """Return sums of gradients, and how often formats are exchanged, while weights are (un)frozen.

    The second hook of Lossless compares the metadata with what the first one returned last.
    """
    model = as_type(Branches(), Lossless)
    weights = fully_shard(model).weights
    sums, exchanges = [], []
    for choice, trains in (((0, 0), False), ((0, 1), True), ((1, 1), True), ((0, 1), True)):
        weights[1].requires_grad_(trains)
        x = torch.full((3, 3), 2.0, requires_grad=True)
        loss = model(x, choice[dist.get_rank()]).sum()
        with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as said:
            loss.backward()
        grads = [weight.grad for weight in weights]
        sums.append([None if g is None else g.full_tensor().sum().item() for g in grads])
        exchanges.append(said.call_count)
        model.zero_grad()
    return sums, exchanges


def test_what_hooks_returned_is_known_when_more_becomes_trainable() -> None:
    for sums, exchanges in run_ranks(trainable_later, 2):
        assert sums == [[18.0, None], [9.0, 9.0], [None, 18.0], [9.0, 9.0]]
        assert exchanges == [1, 1, 0, 0]


def transposed(dim: int) -> None:
    """A weight whose rows are the columns in memory."""
    plain = nn.Linear(5, 3, bias=False)
    layer = copy.deepcopy(plain)
    layer.weight = nn.Parameter(Lossless(plain.weight.detach().t().contiguous().t()))
    fully_shard(layer, shard_placement_fn=lambda _: Shard(dim))
    for step in range(2):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        for each in (plain, layer):
            each(x).square().sum().backward()
    average_gradients(plain.parameters())
    torch.testing.assert_close(full(layer.weight.grad), plain.weight.grad)
    assert layer.weight._local_tensor.t().is_contiguous()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_weight_that_lies_transposed_in_memory(dim: int) -> None:
    run_ranks(transposed, 2, dim)


def parallel_weight() -> None:
    """A weight that is cut by a model-parallel axis too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    plain = nn.Linear(6, 4, bias=False)
    layer = copy.deepcopy(plain)
    local = Lossless(layer.weight.detach().chunk(2)[mesh["model"].get_local_rank()].clone())
    layer.weight = nn.Parameter(DTensor.from_local(local, mesh["model"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["data"])
    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    x = torch.randn(3, 6, generator=generator)
    layer(DTensor.from_local(x, mesh["model"])).square().sum().backward()
    plain(x).square().sum().backward()
    average_gradients(plain.parameters())  # each part of the data is on two ranks
    torch.testing.assert_close(layer.weight.grad.full_tensor(), plain.weight.grad)


def test_under_tensor_parallelism() -> None:
    run_ranks(parallel_weight, 4)


# What is lost ----------------------------------------------------------------------------------


def rounded(parts: torch.Tensor) -> torch.Tensor:
    """Round as int8 blocks of a row each do, in numbers."""
    scales = parts.abs().amax(1, keepdim=True) / 127
    return (parts / scales.clamp_min(1e-30)).round() * scales


def int8_steps() -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[int]]:
    """Return gradients of steps as they arrive, as each rank has them, and bytes on the wire."""
    layer = nn.Linear(8, 5, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    own, arrived, nbytes = [], [], []
    for step in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        with wire() as sent:
            layer(x).sum().backward()
        own.append(x.sum(0).expand(5, 8).clone())
        arrived.append(layer.weight.grad.full_tensor())
        nbytes += sent
        layer.zero_grad()
    return arrived, own, nbytes


def test_int8_gradients_are_rounded_as_by_hand_and_what_is_lost_comes_later() -> None:
    (arrived, *_, nbytes), (same, *_) = ranks = run_ranks(int8_steps, 2)
    lost = [torch.zeros(2, 24) for _ in ranks]
    for step, grad in enumerate(arrived):
        assert torch.equal(grad, same[step])
        total = torch.zeros(2, 24)  # rows 0 to 2, and rows 3 and 4 with one of padding
        for rank, (_, own, _) in enumerate(ranks):
            exact = nn.functional.pad(own[step], (0, 0, 0, 1)).view(2, 24) + lost[rank]
            sent = rounded(exact)
            lost[rank] = exact - sent
            total += sent
        assert torch.equal(grad, (total / 2).view(6, 8)[:5])
    # two rows of 24 int8, padded to 32 bytes, a scale, padded to 16, a flag, padded to 16
    assert nbytes == [2 * (32 + 16 + 16)] * 4


def overflow() -> list[torch.Tensor]:
    """Return the gradients of a step that overflows, and of the next."""
    layer = nn.Linear(2, 2, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    found = []
    for value in (torch.inf, 1.0):
        layer(torch.tensor([[1.0, value]])).sum().backward()
        found.append(layer.weight.grad.full_tensor())
        layer.zero_grad()
    return found


def test_an_overflow_is_seen_and_does_not_stay() -> None:
    for first, second in run_ranks(overflow, 2):
        assert not first.isfinite().any()
        assert torch.equal(second, torch.ones(2, 2))


def test_int8_gradients_take_little_more_than_a_quarter_of_the_bytes() -> None:
    nbytes, numel = run_ranks(bytes_of_a_big_weight, 2)[0]
    blocks = numel // BLOCK
    assert nbytes == numel + 4 * blocks + 2 * 16
    assert nbytes <= 0.3 * 4 * numel


def bytes_of_a_big_weight() -> tuple[int, int]:
    layer = nn.Linear(256, 128, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    with wire() as sent:
        layer(torch.ones(1, 256)).sum().backward()
    return sum(sent), 256 * 128


def test_tied_weights_send_one_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    send_int8_gradients(model)
    assert model[1].weight is model[0].weight
    assert all(isinstance(param, Int8Gradients) for param in model.parameters())


class Shared(nn.Module):
    """Has one weight twice, a frozen one, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.again = self.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight @ self.again * self.scale + self.frozen


def shared() -> tuple[list[str], float]:
    model = Shared()
    send_int8_gradients(model)
    assert model.again is model.weight
    assert not model.frozen.requires_grad
    kinds = [type(param.detach()).__name__ for param in model.parameters()]
    fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    return kinds, model.scale.grad.full_tensor().item()


def test_ties_within_a_module_and_what_is_frozen_or_scalar_stay_as_they_are() -> None:
    ((kinds, scale), (_, same)) = run_ranks(shared, 2)
    assert kinds == ["Int8Gradients", "Tensor", "Tensor"]
    torch.manual_seed(0)
    weight = Shared().weight
    assert scale == same == pytest.approx((torch.ones(1, 3) @ weight @ weight).sum().item())


# What is refused -------------------------------------------------------------------------------


def broken(pre: Callable[..., Any], post: Any = None, steps: int = 1) -> None:
    """Train a weight whose hooks are those given."""
    names = {PRE: pre, POST: post or Lossless.fsdp_post_reduce_scatter}
    layer = as_type(nn.Linear(2, 4, bias=False), type("Broken", (Lossless,), names))
    fully_shard(layer)
    for _ in range(steps):
        layer(torch.ones(1, 2)).sum().backward()


def no_tuple(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return grad


def one_tensor(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return grad, None


def no_rows(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad, grad.sum()), None


def another_later(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    self.num_calls += 1
    return (grad if self.num_calls == 1 else grad.half(),), None


def fails_on_one(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("no")
    return (grad,), None


def differs(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad if dist.get_rank() == 0 else grad.half(),), None


RETURN = f"Expected {PRE} of weight to return "
REFUSED = {
    no_tuple: f"{PRE} of weight failed: ExtensionError: {RETURN}(tensors, metadata), got Tensor",
    one_tensor: f"{PRE} of weight failed: ExtensionError: {RETURN}a tuple of tensors and metadata, "
    "got Tensor",
    no_rows: f"{PRE} of weight failed: ExtensionError: {RETURN}tensors with a row for each of 2 "
    "ranks, got [[2, 4], []]",
    another_later: f"{RETURN}[torch.float32 [4]] as before, got [torch.float16 [4]]",
    fails_on_one: f"{PRE} of weight failed: ValueError: no",
    differs: f"Expected {PRE} of weight to return the same on all ranks, got [torch.float32 [4]] "
    "on rank 0 and [torch.float16 [4]] on rank 1",
}


@pytest.mark.parametrize("hook", REFUSED, ids=lambda hook: hook.__name__)
def test_what_hooks_must_not_do_is_refused_on_all_ranks(hook: Any) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(broken, 2, hook, summed, 2)
    failure = caught.value.agreed()
    assert failure.exception_type is ExtensionError
    assert failure.message == REFUSED[hook]


def summed(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> None:
    out.copy_(received[0].sum(0))


def gathers_on_one(self: Any, mesh: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("no")
    return (self.full,), None


def broken_gather() -> None:
    kind = type("Broken", (Lossless,), {"fsdp_pre_all_gather": gathers_on_one})
    fully_shard(as_type(nn.Linear(2, 4, bias=False), kind))(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("fn", "args", "hook"),
    [(broken, (fails_on_one,), "fails_on_one"), (broken_gather, (), "gathers_on_one")],
)
def test_the_rank_on_which_a_hook_fails_shows_where(
    fn: Callable[..., None], args: tuple[Any, ...], hook: str
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fn, 2, *args)
    shows = [f", in {hook}" in failure.traceback for failure in caught.value.failures]
    assert shows == [False, True]


def gathers_on_last(self: Any, mesh: Any) -> Any:
    if dist.get_rank() == 3:
        raise ValueError("no")
    return (self.full[: 1 + (dist.get_rank() == 1)].t(),), None


def broken_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    kind = type("Broken", (Lossless,), {"fsdp_pre_all_gather": gathers_on_last})
    fully_shard(as_type(nn.Linear(2, 4, bias=False), kind), mesh=mesh)(torch.ones(1, 2))


def test_ranks_of_replicas_are_numbered_over_the_whole_job() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(broken_replica, 4)
    differs = (
        "Expected fsdp_pre_all_gather of weight to return tensors of the same number, dtypes and "
        "trailing dims on all ranks, got [torch.float32 [2, 1]] on rank 0 and [torch.float32 "
        "[2, 2]] on rank 1"
    )
    fails = "fsdp_pre_all_gather failed on rank 3: ValueError: no"
    assert [failure.message for failure in caught.value.failures] == [differs] * 2 + [fails] * 2


def lost_rank(weight: torch.Tensor, in_forward: bool) -> None:
    """Let the exchange of what hooks return fail, as it does when a rank dies."""
    layer = nn.Linear(2, 4, bias=False)
    layer.weight = nn.Parameter(weight)
    fully_shard(layer)
    failing = mock.patch.object(dist, "all_gather_object", side_effect=RuntimeError("closed"))
    with failing if in_forward else nullcontext():
        loss = layer(torch.ones(1, 2)).sum()
    with failing:
        loss.backward()


@pytest.mark.parametrize(
    ("weight", "in_forward", "act"),
    [
        (Lossless(torch.ones(4, 2)), True, "tensor subclasses send"),
        (Lossless(torch.ones(4, 2)), False, "gradients are on the wire"),
        (TwoTensor(torch.ones(4, 2), torch.ones(4, 2)), False, "gradients are made of"),
    ],
)
def test_a_rank_lost_when_the_ranks_first_agree_is_told_as_such(
    weight: torch.Tensor, in_forward: bool, act: str
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(lost_rank, 2, weight, in_forward)
    assert {failure.exception_type for failure in caught.value.failures} == {CommunicationError}
    assert [failure.message for failure in caught.value.failures] == [
        f"Rank {rank} failed while agreeing on what {act}: closed" for rank in range(2)
    ]


def test_one_hook_alone_is_refused() -> None:
    kind = type("Half", (torch.Tensor,), {PRE: summed})
    tensor = torch.randn(4, 2).as_subclass(kind)
    with pytest.raises(TypeError) as caught:
        has_grad_extension(tensor)
    assert str(caught.value) == (
        f"Expected both {PRE} and {POST} on Half, got only {PRE}; define {POST} too"
    )


class Spreads(Lossless):
    """Makes tensors of its own of all that is computed with it, gradients too."""

    fsdp_pre_all_gather = property()
    fsdp_post_all_gather = property()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain, named = tree_map_only(cls, lambda one: one.full, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, cls, func(*plain, **named))
        return return_and_correct_aliasing(func, args, kwargs, out)


def subclass_gradient() -> None:
    layer = as_type(nn.Linear(2, 4, bias=False), Spreads)
    fully_shard(layer)
    layer(torch.ones(1, 2)).sum().backward()


def test_a_gradient_that_is_a_subclass_is_refused() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(subclass_gradient, 2)
    assert caught.value.agreed().message == (
        f"Expected a plain gradient of weight to pass to {PRE}, got Spreads; let "
        "fsdp_post_all_gather return a plain tensor"
    )


def hooks_on_one_rank() -> None:
    kind = Lossless if dist.get_rank() else Int8Rows
    layer = as_type(nn.Linear(2, 4, bias=False), kind)
    fully_shard(layer)
    layer(torch.ones(1, 2))


class Int8Rows(Int8Gradients):
    """Brings no hooks for gradients."""

    fsdp_pre_reduce_scatter = property()
    fsdp_post_reduce_scatter = property()


def test_hooks_on_one_rank_alone_are_refused_on_all() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(hooks_on_one_rank, 2)
    fact = (
        "parameter 'weight' of the root group: shape [4, 2], torch.float32, Shard(0), trainable, "
    )
    fact += "on cpu, with its own all-gather"
    assert caught.value.agreed().message == (
        f"Expected the same model on all ranks, got on rank 0: {fact}; on rank 1: {fact}, with its "
        "own reduce-scatter"
    )


class Forgets(TwoTensor):
    """Its parts are of another class."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is not torch.ops.aten.split.Tensor:
            return out
        return [TwoTensor(part.a, part.b) for part in out]


class Forgetful(Forgets):
    """With hooks for its gradient."""

    fsdp_pre_reduce_scatter = no_tuple
    fsdp_post_reduce_scatter = summed


class ForgetfulGather(Forgets):
    """With hooks for its gather."""

    fsdp_pre_all_gather = no_tuple
    fsdp_post_all_gather = summed


@pytest.mark.parametrize("kind", [Forgetful, ForgetfulGather])
def test_shards_that_lose_the_hooks_are_refused(kind: type[TwoTensor]) -> None:
    layer = nn.Linear(2, 4, bias=False)
    layer.weight = nn.Parameter(kind(torch.ones(4, 2), torch.ones(4, 2)))
    hook = PRE if kind is Forgetful else "fsdp_pre_all_gather"
    with fake_ranks(2), pytest.raises(ExtensionError) as caught:
        fully_shard(layer)
    assert str(caught.value) == (
        f"Expected a shard of weight to bring {hook} as {kind.__name__} does, got TwoTensor; let "
        f"split and slice of {kind.__name__} return their own kind"
    )
    assert type(layer) is nn.Linear
