"""Steps over flat buffers: bit by bit those of the stock optimizer over the same DTensors."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import json
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

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


# What is refused ------------------------------------------------------------------------------


class Normed(torch.optim.Optimizer):
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
            f"Expected an elementwise optimizer, got {kind.__name__}, which is not in the list "
            "of known elementwise optimizers; pass elementwise=True if it updates each element "
            "independently of the others, without norms or matrix products"
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
        "Expected an optimizer with the step of its class, got SGD with another step; call flat "
        "before replacing the step"
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
        r"Expected states of Factored to be numbers, or plain tensors as large as the stepped "
        r"tensor, got 'row' of class Tensor and shape \(3,\) for \(\d+,\); it is not elementwise, "
        r"so use Owned to step whole tensors by it"
    )
    assert re.fullmatch(text, str(caught.value))


def test_plain_gradients_of_sharded_parameters_are_refused() -> None:
    with fake_ranks(2):
        layer = fully_shard(nn.Linear(4, 4))
        layer.weight.grad = torch.ones(4, 4)
        with pytest.raises(TypeError) as caught:
            flat(torch.optim.SGD(layer.parameters())).step()
    assert str(caught.value) == (
        "Expected the gradient of a sharded parameter to be a DTensor of plain tensors, got Tensor"
    )


@on_ranks(2)
def test_unsynced_gradients_are_reduced_by_a_step() -> None:
    """Of sharded and of replicated parameters, which the stock step refuses."""

    def run(net: Any, optimizer: Any) -> None:
        with net.no_sync():
            loss_of(net).backward()
        if not hasattr(optimizer, "num_tensors"):
            net.synchronize_gradients()
        optimizer.step()
        optimizer.zero_grad()

    assert two_ways(lambda: sharded(Net()), MAKES["momentum"], run) == []


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
    schedules = []

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

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Detected call of `lr_scheduler.step")
        assert two_ways(lambda: sharded(Net()), make, run) == []


# The benchmark ------------------------------------------------------------------------------------


benchmark = importlib.import_module("optimizer")


def test_each_optimizer_is_measured_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "NUM_GROUPS", 3)
    path = tmp_path / "figures.json"
    assert benchmark.main(["--rounds", "2", "--width", "8", "--json", str(path)]) == 0
    seconds = json.loads(path.read_text())["seconds"]
    assert seconds.keys() == benchmark.MAKES.keys()
    for times in seconds.values():
        assert {way: len(each) for way, each in times.items()} == dict(stock=2, flat=2, plain=2)
        assert all(time > 0 for way in times.values() for time in way)
