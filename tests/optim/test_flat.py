"""Steps over flat buffers: bit by bit those of the stock optimizer over the same DTensors."""

from __future__ import annotations

import copy
import functools
import gc
import io
import re
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from new_objects import seen_alone
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from training.cases import reproducible

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, _torch, fully_shard
from composable_shard.optim import flat
from composable_shard.testing import fake_ranks, run_ranks
from composable_shard.train.grad_scaler import ShardedGradScaler
from optim.flat_pairs import (
    MAKES,
    Make,
    Net,
    differences,
    groups,
    pair,
    sharded,
    stepping,
    train,
    two_ways,
)

optim: Any = torch.optim
LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def check(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[str]:
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pairs = pair(MAKES[name], dtype, **options)
    for net, optimizer in pairs:
        train(net, optimizer, range(7), dtype)
    return differences(pairs)


@pytest.mark.parametrize("name", MAKES)
def test_every_optimizer_of_torch_steps_as_before(name: str) -> None:
    assert run_ranks(check, 2, name) == [[]] * 2


SETTINGS: dict[str, tuple[int, torch.dtype, dict[str, Any]]] = {
    "alone": (1, torch.float32, {}),
    "three ranks": (3, torch.float32, {}),
    "replicas": (4, torch.float32, {"mesh": None}),
    "bf16 compute": (2, torch.float32, {"mp_policy": LOW}),
    "bf16 weights": (2, torch.bfloat16, {}),
    "float64": (2, torch.float64, {}),
    "offload": (2, torch.float32, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "kept after forward": (2, torch.float32, {"reshard_after_forward": False}),
}


@pytest.mark.parametrize("name", ["adamw foreach", "momentum", "adamw fused"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_in_every_setting(setting: str, name: str) -> None:
    num_ranks, dtype, options = SETTINGS[setting]
    assert run_ranks(partial(check, name, dtype, **options), num_ranks) == [[]] * num_ranks


class Strided(nn.Module):
    """Parameters that lie in another order than that of their dims, and are stepped as DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv: nn.Module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(6, 6)
        self.turned = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).mean((2, 3))) @ self.turned.t()


@pytest.mark.parametrize("name", ["adamw", "adamw foreach", "adamw fused", "nesterov"])
@on_ranks(2)
def test_beside_parameters_that_lie_in_another_order(name: str) -> None:
    def build() -> nn.Module:
        net = Strided()
        fully_shard(net.conv)
        return fully_shard(net)

    def loss(net: nn.Module, step: int) -> torch.Tensor:
        return net(torch.full((2, 4, 5, 5), 0.1 * step + dist.get_rank())).square().sum()

    assert two_ways(build, MAKES[name], stepping(loss, 4)) == []


# What DTensors do not know -------------------------------------------------------------------


UNKNOWN: dict[str, Make] = {
    "sgd fused": partial(optim.SGD, lr=0.003, momentum=0.9, fused=True),
    "rprop": partial(optim.Rprop, lr=0.01),
}


def assert_steps_like_plain(net: Any, optimizer: Any, make: Make, loss: Any) -> None:
    """Step shards beside plain tensors of the same values, each by itself."""
    plain = [nn.Parameter(param.to_local().detach().clone()) for param in net.parameters()]
    stock = make(plain)
    for step in range(4):
        loss(step).backward()
        for param, own in zip(net.parameters(), plain, strict=True):
            own.grad = param.grad.to_local().clone()
        optimizer.step()
        stock.step()
        optimizer.zero_grad()
    for param, own in zip(net.parameters(), plain, strict=True):
        assert torch.equal(param.to_local(), own)


@pytest.mark.parametrize("name", UNKNOWN)
@on_ranks(2)
def test_what_knows_no_dtensors_steps_as_plain_tensors(name: str) -> None:
    torch.manual_seed(0)
    net = sharded(Net())

    def loss(step: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(step)
        return net(torch.randn(3, 9, generator=random)).square().mean()

    optimizer = flat(UNKNOWN[name](net.parameters()))
    assert_steps_like_plain(net, optimizer, UNKNOWN[name], loss)


# Runs -----------------------------------------------------------------------------------------


def runs_of_steps(net: Any, optimizer: Any, train: Any) -> list[int]:
    """Return how many tensors each step of AdamW steps."""
    seen = list[int]()
    real = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

    def count(self: Any, closure: Any = None) -> Any:
        seen.append(sum(len(group["params"]) for group in self.param_groups))
        return real(self, closure)

    with mock.patch.object(torch.optim.AdamW, "step", count):
        train(net, optimizer)
    return seen


def test_neighbours_are_stepped_as_one_tensor() -> None:
    """A group each, then without a block and the scale, then those by themselves."""
    with fake_ranks(2):
        for name, runs in (("adamw foreach", [3, 2, 4]), ("adamw fused", [10, 5, 10])):  # on CPUs
            net = sharded(Net())
            optimizer = flat(MAKES[name](net.parameters()))
            assert runs_of_steps(net, optimizer, partial(train, steps=range(3))) == runs


FUSED = {
    "adam": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "adamw": partial(optim.AdamW, lr=0.01, fused=True),
    "sgd": partial(optim.SGD, lr=0.003, momentum=0.9, weight_decay=0.1, fused=True),
    "adagrad": partial(optim.Adagrad, lr=0.1, weight_decay=0.1, fused=True),
}
# By ranks, a row each: whole vectors of a CPU, then some more, then too few.
IN_VECTORS = [(4, 16), (2, 8000), (2, 48), (2, 50016), (2, 33), (2, 64), (2, 5), (2, 16)]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", FUSED)
@on_ranks(2)
def test_fused_shards_of_whole_vectors_are_one_tensor(name: str, num_threads: int) -> None:
    """Those behind which there is a rest, of 33 and of 5 elements, are the last of their tensor."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    net: Any = fully_shard(Sum(IN_VECTORS))
    optimizer: Any = flat(FUSED[name](net.parameters()))
    net.used = -1

    def loss(step: int) -> torch.Tensor:
        return net(torch.full((2,), 0.1 * step + dist.get_rank()))

    assert_steps_like_plain(net, optimizer, FUSED[name], loss)
    assert optimizer.num_tensors() == [3]


# States ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_flat", [False, True])
@pytest.mark.parametrize("how", ["state_dict", "dcp"])
@on_ranks(2)
def test_states_move_between_stock_and_flat(how: str, from_flat: bool) -> None:
    """Train, move the states to a new optimizer, stock to flat or back, and train on."""
    pairs, moved = pair(MAKES["adamw"]), []
    for net, optimizer in pairs:
        train(net, optimizer, range(4))
    source = pairs[from_flat]
    for (net, _), is_flat in zip(pairs, (not from_flat, from_flat), strict=True):
        torch.manual_seed(1)
        other = sharded(Net())
        other.load_state_dict(net.state_dict())
        fresh = MAKES["adamw"](groups(other))
        fresh = flat(fresh) if not is_flat else fresh
        if how == "state_dict":
            fresh.load_state_dict(copy.deepcopy(source[1].state_dict()))
        else:
            states = get_optimizer_state_dict(*source)
            set_optimizer_state_dict(other, fresh, copy.deepcopy(states))
        train(other, fresh, range(4, 7))
        moved.append((other, fresh))
    assert differences(moved) == []


@on_ranks(2)
def test_a_saved_state_dict_is_that_of_the_stock_optimizer() -> None:
    net, optimizer = pair(MAKES["adamw foreach"])[1]
    train(net, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    numbers = [state["step"] for state in loaded["state"].values()]
    assert len({number.data_ptr() for number in numbers}) == len(numbers)
    again = copy.deepcopy(optimizer)
    assert type(again) is type(optimizer)
    assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


# What is refused ------------------------------------------------------------------------------


class Normed(torch.optim.Optimizer):
    """Takes the norm of each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class Factored(Normed):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["row"] = torch.zeros(3)


class Signed(Normed):
    """Treats every element by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign(), alpha=group["lr"])


class Counting(Normed):
    """Counts steps by a number of Python's, and makes a state in its second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                if state["count"] == 2:
                    state["average"] = param.grad.clone()
                elif state["count"] > 2:
                    state["average"] = state["average"].lerp(param.grad, 0.5)  # another tensor
                param.sub_(param.grad.sign(), alpha=group["lr"] / state["count"])


def test_what_is_not_known_to_treat_elements_by_themselves_is_refused() -> None:
    for kind in (Normed, torch.optim.Adafactor):
        optimizer = kind([nn.Parameter(torch.ones(3))])
        text = (
            f"Expected an optimizer that treats every element by itself, got {kind.__name__}, of "
            "which that is not known; pass elementwise=True if it takes no norm, product or other "
            "look at a parameter as a whole"
        )
        with pytest.raises(TypeError, match=re.escape(text)):
            flat(optimizer)
    text = "Expected differentiable=False to step flat buffers, got True"
    with pytest.raises(ValueError, match=text):
        flat(torch.optim.Adam([nn.Parameter(torch.ones(3))], differentiable=True))


def test_a_step_that_was_replaced_is_refused() -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    counted = optimizer.step
    optimizer.step = functools.wraps(counted)(lambda: counted())
    text = (
        "Expected an optimizer with the step of its class, got SGD whose step was replaced; call "
        "flat before what replaces it"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        flat(optimizer)
    assert type(optimizer) is torch.optim.SGD


def test_states_that_are_not_elementwise_are_refused() -> None:
    with fake_ranks(2):
        net = sharded(Net())
        optimizer = flat(Factored(net.parameters()), elementwise=True)
        with pytest.raises(TypeError) as caught:
            train(net, optimizer, range(1))
    text = (
        r"Expected states of Factored to be numbers, or plain tensors as large as what is stepped, "
        r"got 'row' of class Tensor and shape \(3,\) for \(\d+,\); it does not treat every element "
        r"by itself, so let Owned step whole tensors by it"
    )
    assert re.fullmatch(text, str(caught.value))


@pytest.mark.parametrize("kind", [Signed, Counting])
@on_ranks(2)
def test_an_optimizer_of_the_users_that_says_so_is_stepped_flat(kind: Any) -> None:
    flat_by_word = partial(flat, elementwise=True)
    run = partial(train, steps=range(5))
    assert two_ways(lambda: sharded(Net()), kind, run, flat_by_word) == []


# Without growth ---------------------------------------------------------------------------------


def test_nothing_grows_from_step_to_step() -> None:
    with fake_ranks(2), seen_alone():
        net = sharded(Net())
        optimizer: Any = flat(torch.optim.AdamW(net.parameters(), lr=0.0))
        sizes = []
        for step in range(12):
            train(net, optimizer, range(step, step + 1))
            gc.collect()
            sizes.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
        assert sizes[-3:] == sizes[3:6]  # the same pattern of gradients returns every third step


@reproducible(12)
@given(
    st.sampled_from(["adamw foreach", "momentum", "nadam", "adamw fused"]),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=6),
    st.lists(st.integers(0, 63), min_size=2, max_size=4),
)
def test_any_shapes_with_any_gradients(
    name: str, num_ranks: int, shapes: list[tuple[int, int]], used: list[int]
) -> None:
    assert run_ranks(follow, num_ranks, name, shapes, used) == [[]] * num_ranks


class Sum(nn.Module):
    """Parameters of some shapes, of which each step uses some."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = [p for index, p in enumerate(self.all) if self.used >> index & 1]
        return torch.stack([(p * x.mean()).sin().sum() for p in some]).sum()


def follow(name: str, shapes: list[tuple[int, int]], used: list[int]) -> list[str]:
    def loss(net: Any, step: int) -> torch.Tensor:
        net.used = used[step] & (1 << len(shapes)) - 1 or 1
        return net(torch.full((2,), 0.1 * step + dist.get_rank()))

    return two_ways(lambda: fully_shard(Sum(shapes)), MAKES[name], stepping(loss, len(used)))


# What users do with optimizers --------------------------------------------------------------------


def loss_of(net: Any) -> torch.Tensor:
    loss: torch.Tensor = net(torch.full((2, 9), 0.1 + dist.get_rank())).square().mean()
    return loss


def with_a_closure(net: Any, optimizer: Any, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


def with_a_scaler(net: Any, optimizer: Any, step: int) -> None:
    scaler = net.__dict__.setdefault("scaler", ShardedGradScaler(device="cpu", init_scale=8.0))
    scaler.scale(loss_of(net) * (float("inf") if step == 2 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


def with_a_schedule(net: Any, optimizer: Any, step: int) -> None:
    schedule = net.__dict__.get("schedule")
    if schedule is None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=9)
        net.__dict__["schedule"] = schedule
    loss_of(net).backward()
    optimizer.step()
    schedule.step()


def thawed_later(net: Any, optimizer: Any, step: int) -> None:
    net.blocks[0].up.weight.requires_grad_(step >= 2)
    loss_of(net).backward()
    optimizer.step()


def with_hooks(net: Any, optimizer: Any, step: int) -> None:
    def shrink(one: Any, *_: Any) -> None:
        for group in one.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)

    handle = optimizer.register_step_pre_hook(shrink)
    loss_of(net).backward()
    optimizer.step()
    handle.remove()


def with_edits(net: Any, optimizer: Any, step: int) -> None:
    """Parameters loaded, states changed in place, another group: all count."""
    loss_of(net).backward()
    if step == 1:
        net.load_state_dict({key: value * 0.5 for key, value in net.state_dict().items()})
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
    if step == 2:
        net.extra = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [net.extra], "lr": 0.5})
    if step > 2:
        net.extra.grad = torch.full((3,), 0.25)
    optimizer.step()


def with_gradients_elsewhere(net: Any, optimizer: Any, step: int) -> None:
    """Gradients of the same description: side by side in storages of their own, or transposed."""
    loss_of(net).backward()
    for param in net.parameters():
        local = param.grad.to_local()
        if step % 2:
            _torch.set_local_tensor(param.grad, _torch.with_own_storage(local))
        elif local.ndim == 2 and not optimizer.param_groups[0].get("fused"):  # which misreads them
            _torch.set_local_tensor(param.grad, local.t().contiguous().t())
    optimizer.step()


WAYS = [
    with_gradients_elsewhere,
    with_a_closure,
    with_a_scaler,
    with_a_schedule,
    thawed_later,
    with_hooks,
    with_edits,
]


@pytest.mark.parametrize("name", ["adamw foreach", "adamw", "adamw fused"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@on_ranks(2)
def test_what_users_do_with_optimizers(way: Any, name: str) -> None:
    pairs = pair(MAKES[name])
    for net, optimizer in pairs:
        for step in range(5):
            way(net, optimizer, step)
            optimizer.zero_grad()
    assert differences(pairs) == []


@on_ranks(2)
def test_flat_after_a_schedule_was_made() -> None:
    """What the scheduler put before the step of the class goes before the flat one."""
    schedules, sizes = [], []

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = optim.AdamW(params, lr=0.01, foreach=True)
        schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        return optimizer

    def run(net: Any, optimizer: Any) -> None:
        for _ in range(3):
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedules[-1].step()

    def count(net: Any, optimizer: Any) -> None:
        sizes.append(runs_of_steps(net, optimizer, run))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Detected call of `lr_scheduler.step")
        assert two_ways(lambda: sharded(Net()), make, count) == []
    assert sizes == [[], [3, 3, 3]]  # the stock one has its step already


@on_ranks(2)
def test_a_step_before_gradients_are_reduced_is_refused_as_before() -> None:
    said = []
    for net, optimizer in pair(MAKES["adamw"]):
        net.set_requires_gradient_sync(False)
        loss_of(net).backward()
        with pytest.raises(RuntimeError, match="placement") as caught:
            optimizer.step()
        said.append(str(caught.value))
    assert said[0] == said[1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@on_ranks(2)
def test_tied_parameters() -> None:
    def build() -> nn.Module:
        net = Tied()
        for layer in (net.first, net.second):
            fully_shard(layer)
        return fully_shard(net)

    def loss(net: nn.Module, step: int) -> torch.Tensor:
        return net(torch.full((2, 6), 0.1 * step + dist.get_rank())).square().mean()

    assert two_ways(build, MAKES["adam"], stepping(loss, 3)) == []
