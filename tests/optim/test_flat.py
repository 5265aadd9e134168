"""Steps over flat buffers: bit by bit those of the stock optimizer over the same DTensors."""

from __future__ import annotations

import copy
import functools
import gc
import io
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
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
from optim.flat_pairs import MAKES, Make, Net, differences, groups, pair, sharded, train

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


def step_strided(name: str) -> list[str]:
    pairs: list[tuple[Any, Any]] = []
    for wraps in (lambda one: one, flat):
        torch.manual_seed(0)
        net: Any = Strided()
        fully_shard(net.conv)
        fully_shard(net)
        optimizer = wraps(MAKES[name](net.parameters()))
        for step in range(4):
            x = torch.full((2, 4, 5, 5), 0.1 * step + dist.get_rank())
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs.append((net, optimizer))
    return differences(pairs)


@pytest.mark.parametrize("name", ["adamw", "adamw foreach", "adamw fused", "nesterov"])
def test_beside_parameters_that_lie_in_another_order(name: str) -> None:
    assert run_ranks(step_strided, 2, name) == [[]] * 2


# What DTensors do not know -------------------------------------------------------------------


UNKNOWN: dict[str, Make] = {
    "sgd fused": partial(optim.SGD, lr=0.003, momentum=0.9, fused=True),
    "rprop": partial(optim.Rprop, lr=0.01),
}


def steps_like_plain(net: Any, optimizer: Any, make: Make, loss: Callable[[int], Any]) -> bool:
    """Step shards beside plain tensors of the same values; return whether they stay equal."""
    plain = [nn.Parameter(param.to_local().detach().clone()) for param in net.parameters()]
    stock = make(plain)
    for step in range(4):
        loss(step).backward()
        for param, own in zip(net.parameters(), plain, strict=True):
            own.grad = param.grad.to_local().clone()
        optimizer.step()
        stock.step()
        optimizer.zero_grad()
    pairs = zip(net.parameters(), plain, strict=True)
    return all(torch.equal(param.to_local(), own) for param, own in pairs)


def step_like_plain(name: str) -> bool:
    """Step the shards beside plain tensors of the same values, each by itself."""
    torch.manual_seed(0)
    net = sharded(Net())

    def loss(step: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(step)
        return net(torch.randn(3, 9, generator=random)).square().mean()

    return steps_like_plain(net, flat(UNKNOWN[name](net.parameters())), UNKNOWN[name], loss)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_knows_no_dtensors_steps_as_plain_tensors(name: str) -> None:
    assert run_ranks(step_like_plain, 2, name) == [True] * 2


# Runs -----------------------------------------------------------------------------------------


def runs_of_a_step(make: Make) -> list[int]:
    """Return how many tensors are stepped: with all gradients, some, and all again."""
    net = sharded(Net())
    optimizer: Any = flat(make(net.parameters()))
    seen = list[int]()
    real = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

    def count(self: Any, closure: Any = None) -> Any:
        seen.append(sum(len(group["params"]) for group in self.param_groups))
        return real(self, closure)

    with mock.patch.object(torch.optim.AdamW, "step", count):
        train(net, optimizer, range(3))
    return seen


def test_neighbours_are_stepped_as_one_tensor() -> None:
    """A group each, then without a block and the scale, then those by themselves."""
    with fake_ranks(2):
        assert runs_of_a_step(MAKES["adamw foreach"]) == [3, 2, 4]
        assert runs_of_a_step(MAKES["adamw fused"]) == [10, 5, 10]  # on the CPU


FUSED = {
    "adam": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "adamw": partial(optim.AdamW, lr=0.01, fused=True),
    "sgd": partial(optim.SGD, lr=0.003, momentum=0.9, weight_decay=0.1, fused=True),
    "adagrad": partial(optim.Adagrad, lr=0.1, weight_decay=0.1, fused=True),
}
# By ranks, a row each: whole vectors of a CPU, then some more, then too few.
IN_VECTORS = [(4, 16), (2, 8000), (2, 48), (2, 50016), (2, 33), (2, 64), (2, 5), (2, 16)]


def fused_beside_plain(name: str, num_threads: int) -> tuple[bool, list[int]]:
    """Step shards beside plain tensors; return whether they are equal, and how many there are."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    net: Any = fully_shard(Sum(IN_VECTORS))
    optimizer: Any = flat(FUSED[name](net.parameters()))
    net.used = -1

    def loss(step: int) -> torch.Tensor:
        return net(torch.full((2,), 0.1 * step + dist.get_rank()))

    return steps_like_plain(net, optimizer, FUSED[name], loss), optimizer.num_tensors()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", FUSED)
def test_fused_shards_of_whole_vectors_are_one_tensor(name: str, num_threads: int) -> None:
    """Those behind which there is a rest, of 33 and of 5 elements, are the last of their tensor."""
    assert run_ranks(fused_beside_plain, 2, name, num_threads) == [(True, [3])] * 2


# States ---------------------------------------------------------------------------------------


def move_states(how: str, from_flat: bool) -> list[str]:
    """Train, move the states to a new optimizer, stock to flat or back, and train on."""
    pairs = pair(MAKES["adamw"])
    for net, optimizer in pairs:
        train(net, optimizer, range(4))
    moved = []
    for (net, _), is_flat in zip(pairs, (not from_flat, from_flat), strict=True):
        source = pairs[1 if from_flat else 0][1]
        torch.manual_seed(1)
        other = sharded(Net())
        other.load_state_dict(net.state_dict())
        fresh = MAKES["adamw"](groups(other))
        fresh = flat(fresh) if not is_flat else fresh
        if how == "state_dict":
            fresh.load_state_dict(copy.deepcopy(source.state_dict()))
        elif how == "dcp":
            source_net = pairs[1 if from_flat else 0][0]
            states = get_optimizer_state_dict(source_net, source)
            set_optimizer_state_dict(other, fresh, copy.deepcopy(states))
        train(other, fresh, range(4, 7))
        moved.append((other, fresh))
    return differences(moved)


@pytest.mark.parametrize("from_flat", [False, True])
@pytest.mark.parametrize("how", ["state_dict", "dcp"])
def test_states_move_between_stock_and_flat(how: str, from_flat: bool) -> None:
    assert run_ranks(move_states, 2, how, from_flat) == [[]] * 2


def pickle_and_go_on() -> list[bool]:
    pairs = pair(MAKES["adamw foreach"])
    net, optimizer = pairs[1]
    train(net, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    numbers = [state["step"] for state in loaded["state"].values()]
    again = copy.deepcopy(optimizer)
    return [
        len({number.data_ptr() for number in numbers}) == len(numbers),
        type(again) is type(optimizer),
        again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys(),
    ]


def test_a_saved_state_dict_is_that_of_the_stock_optimizer() -> None:
    assert run_ranks(pickle_and_go_on, 2) == [[True] * 3] * 2


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


def steps_of_our_own(kind: Callable[[Any], torch.optim.Optimizer]) -> list[str]:
    nets = []
    for wraps in (lambda one: one, partial(flat, elementwise=True)):
        torch.manual_seed(0)
        net = sharded(Net())
        optimizer = wraps(kind(net.parameters()))
        train(net, optimizer, range(5))
        nets.append((net, optimizer))
    return differences(nets)


@pytest.mark.parametrize("kind", [Signed, Counting])
def test_an_optimizer_of_the_users_that_says_so_is_stepped_flat(
    kind: Callable[[Any], torch.optim.Optimizer],
) -> None:
    assert run_ranks(steps_of_our_own, 2, kind) == [[]] * 2


# Without growth ---------------------------------------------------------------------------------


def test_nothing_grows_from_step_to_step() -> None:
    with fake_ranks(2):
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
    pairs: list[tuple[Any, Any]] = []
    for wraps in (lambda one: one, flat):
        torch.manual_seed(0)
        net: Any = fully_shard(Sum(shapes))
        optimizer = wraps(MAKES[name](net.parameters()))
        for step, chosen in enumerate(used):
            net.used = chosen & (1 << len(shapes)) - 1 or 1
            net(torch.full((2,), 0.1 * step + dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs.append((net, optimizer))
    return differences(pairs)


# What users do with optimizers --------------------------------------------------------------------


def with_a_closure(net: Any, optimizer: Any, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.full((2, 9), 0.1 + dist.get_rank())).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


def with_a_scaler(net: Any, optimizer: Any, step: int) -> None:
    scaler = net.__dict__.setdefault("scaler", ShardedGradScaler(device="cpu", init_scale=8.0))
    x = torch.full((2, 9), 0.1 + dist.get_rank())
    loss = net(x).square().mean() * (float("inf") if step == 2 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def with_a_schedule(net: Any, optimizer: Any, step: int) -> None:
    schedule = net.__dict__.get("schedule")
    if schedule is None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=9)
        net.__dict__["schedule"] = schedule
    net(torch.full((2, 9), 0.1 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    schedule.step()


def thawed_later(net: Any, optimizer: Any, step: int) -> None:
    net.blocks[0].up.weight.requires_grad_(step >= 2)
    net(torch.full((2, 9), 0.1 + dist.get_rank())).square().mean().backward()
    optimizer.step()


def with_hooks(net: Any, optimizer: Any, step: int) -> None:
    def shrink(one: Any, *_: Any) -> None:
        for group in one.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)

    handle = optimizer.register_step_pre_hook(shrink)
    net(torch.full((2, 9), 0.1 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    handle.remove()


def with_edits(net: Any, optimizer: Any, step: int) -> None:
    """Parameters loaded, states changed in place, another group: all count."""
    net(torch.full((2, 9), 0.1 + dist.get_rank())).square().mean().backward()
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
    net(torch.full((2, 9), 0.1 + dist.get_rank())).square().mean().backward()
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


def use(way: Callable[[Any, Any, int], None], name: str) -> list[str]:
    pairs = pair(MAKES[name])
    for net, optimizer in pairs:
        for step in range(5):
            way(net, optimizer, step)
            optimizer.zero_grad()
    return differences(pairs)


@pytest.mark.parametrize("name", ["adamw foreach", "adamw", "adamw fused"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_users_do_with_optimizers(way: Callable[[Any, Any, int], None], name: str) -> None:
    assert run_ranks(use, 2, way, name) == [[]] * 2


def flat_after_a_schedule() -> tuple[list[str], list[int]]:
    """Return what differs from a stock optimizer, and how many tensors each flat step stepped."""
    pairs, sizes = [], list[int]()
    for wraps in (lambda one: one, flat):
        torch.manual_seed(0)
        net = sharded(Net())
        optimizer = optim.AdamW(net.parameters(), lr=0.01, foreach=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        wraps(optimizer)
        real = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

        def count(self: Any, closure: Any = None, real: Any = real) -> Any:
            sizes.append(sum(len(group["params"]) for group in self.param_groups))
            return real(self, closure)

        with mock.patch.object(torch.optim.AdamW, "step", count), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Detected call of `lr_scheduler.step")
            for _ in range(3):
                net(torch.full((2, 9), 0.1 + dist.get_rank())).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        pairs.append((net, optimizer))
    return differences(pairs), sizes


def test_flat_after_a_schedule_was_made() -> None:
    """What the scheduler put before the step of the class goes before the flat one."""
    assert run_ranks(flat_after_a_schedule, 2) == [([], [3, 3, 3])] * 2


def errors_before_gradients_are_reduced() -> list[str]:
    """Return what stock and flat say of gradients that are sums of this rank alone."""
    said = []
    for net, optimizer in pair(MAKES["adamw"]):
        net.set_requires_gradient_sync(False)
        net(torch.full((2, 9), 0.1)).square().mean().backward()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        said.append(str(caught.value))
    return said


def test_a_step_before_gradients_are_reduced_is_refused_as_before() -> None:
    for stock, ours in run_ranks(errors_before_gradients_are_reduced, 2):
        assert stock == ours
        assert "placement" in stock


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def tie() -> list[str]:
    pairs: list[tuple[Any, Any]] = []
    for wraps in (lambda one: one, flat):
        torch.manual_seed(0)
        net: Any = Tied()
        for layer in (net.first, net.second):
            fully_shard(layer)
        fully_shard(net)
        optimizer = wraps(MAKES["adam"](net.parameters()))
        for step in range(3):
            net(torch.full((2, 6), 0.1 * step + dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs.append((net, optimizer))
    return differences(pairs)


def test_tied_parameters() -> None:
    assert run_ranks(tie, 2) == [[]] * 2
