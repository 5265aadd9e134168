"""Parameters that change while gathered ones are kept are gathered again."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Net, assert_parity, average_gradients, full, own_input, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from training.compare import Comparison, step_both
from training.oracle import OPTIMIZERS, Unsharded
from training.scenarios import STACK_GROUPS, Stack, loss_of
from training.trees import inputs_for

from composable_shard import MixedPrecisionPolicy, StaleParameterError, fully_shard
from composable_shard.testing import fake_ranks, run_ranks


def as_it_is(model: Net) -> None:
    pass


def assigned(model: Net) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def converted_twice(model: Net) -> None:
    model.double().float()


def used_before(model: Net) -> None:
    model(own_input()).sum().backward()
    model.reset_iter_state()
    model.zero_grad()
    assigned(model)


Change = Callable[[Net], None]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("change", [as_it_is, assigned, converted_twice, used_before])
@on_ranks("num_ranks")
def test_optimizer_steps_are_noticed(change: Change, foreach: bool) -> None:
    """Keep parameters gathered over steps of an optimizer that moves no version counter."""
    reference, model = two_nets(2)
    change(model)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for one in (model, reference):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        for step in range(3):
            one(own_input(step)).square().sum().backward()
            if one is reference:
                average_gradients(one.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for module in (model, *model.blocks):
        module.reshard()
    assert_parity(model, reference)


def test_a_step_makes_the_groups_of_all_its_parameters_stale() -> None:
    """Also of parameters gathered, added or exchanged between two steps."""
    with fake_ranks(2):
        models = [fully_shard(nn.Linear(4, 4)) for _ in range(3)]
        optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)

        def stale_after_a_step(num_used: int = 3) -> list[int]:
            """Step without gradients, which changes nothing, between forwards and backwards."""
            losses = [model(torch.ones(1, 4)).sum() for model in models[:num_used]]
            optimizer.step()
            stale = []
            for number, loss in enumerate(losses):
                models[number].reshard()  # what is kept would be used as it was in forward
                try:
                    loss.backward()
                except StaleParameterError:
                    stale.append(number)
                models[number].zero_grad()
            return stale

        for num_used, stale in ((1, [0]), (1, [0]), (2, [0, 1]), (3, [0, 1])):
            assert stale_after_a_step(num_used) == stale
        optimizer.add_param_group({"params": models[2].weight})
        assert stale_after_a_step() == [0, 1, 2]
        optimizer.param_groups[0]["params"][:2] = [models[2].bias, models[2].bias]
        assert stale_after_a_step() == [1, 2]


def test_an_optimizer_that_its_parameter_knows_is_let_go() -> None:
    with fake_ranks(2):
        model = fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4))
        model.weight.optimizer = optimizer  # type: ignore[assignment]
        optimizer.step()
        kept = weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
    gc.collect()  # of what was held by what was collected before
    assert kept() is None


# Arrays that share memory ---------------------------------------------------------------------


class Recording(nn.Module):
    """Keeps its weight of each call as an array that shares memory, and a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.arrays: list[Any] = []
        self.copies: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.arrays.append(self.layer.weight.detach().numpy())
        self.copies.append(self.layer.weight.detach().clone())
        return self.layer(x).tanh()


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_memory_that_an_array_shares_is_kept(reshard: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Recording(), Recording())
    reference = copy.deepcopy(model)
    for part in model:
        fully_shard(part, reshard_after_forward=reshard)
    fully_shard(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            for one, optimizer in zip((model, reference), optimizers, strict=True):
                one(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            for ours, theirs in zip(model, reference, strict=True):
                assert torch.allclose(ours.copies[-1], theirs.copies[-1])
                assert torch.equal(torch.from_numpy(ours.arrays[-1]), ours.copies[-1])
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(full(ours), theirs)
    assert {str(one.message) for one in caught} == {
        "Expected to free memory of unsharded parameters, got some that an array shares, as "
        "that of weight.detach().numpy() does; it stays allocated, and the next gather "
        "overwrites it; keep a copy, such as weight.detach().clone().numpy()"
    }


Edit = Callable[[nn.Module, list[nn.Parameter]], None]


def sharded_stack(**options: Any) -> tuple[Stack, list[nn.Parameter]]:
    model = Stack()
    for name in STACK_GROUPS:
        fully_shard(model.get_submodule(name), **options)
    return model, list(model.parameters())


# Fresh weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd_foreach", "adamw_foreach", "adamw_fused", "low"])
@on_ranks("ranks", timeout=20)
def test_weights_are_fresh_after_a_step_without_resharding(optimizer: str, reshard: bool) -> None:
    """Keep everything unsharded from forward to forward; step in between, in bf16 at times."""
    torch.manual_seed(3)
    is_low = optimizer == "low"
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if is_low:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = Stack()
    oracle = Unsharded(model, options.get("mp_policy"))
    for name in STACK_GROUPS:
        fully_shard(model.get_submodule(name), **options)
    model.set_reshard_after_backward(False)
    comparison = Comparison(model, oracle, exact=False)
    make = OPTIMIZERS["sgd_foreach" if is_low else optimizer]
    optimizers = [make(list(model.parameters())), make(oracle.model.parameters())]
    for step in range(4):
        train_both(model, oracle, comparison, step)
        if not is_low or step % 2:
            step_both(optimizers, oracle)
        comparison.params(f"step {step}")
    assert comparison.differences == []


def train_both(model: Stack, oracle: Unsharded, comparison: Comparison, step: int) -> None:
    x = inputs_for(step, dist.get_rank())
    losses = [loss_of(m(x)) for m in (model, oracle)]
    comparison.tensor(f"step {step}: loss", *losses)
    for loss in losses:
        loss.backward()
    oracle.after_backward()
    comparison.grads(f"step {step}")


def add_in_place(model: nn.Module, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.add_(1)


def write_the_local_tensor(model: nn.Module, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            assert isinstance(param, DTensor)
            param.to_local().fill_(0.5)


def load_a_state_dict(model: nn.Module, params: list[nn.Parameter]) -> None:
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})


def load_by_assignment(model: nn.Module, params: list[nn.Parameter]) -> None:
    state = {key: (value + 1).detach() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def stepped_by(name: str) -> Edit:
    def take_a_step(model: nn.Module, params: list[nn.Parameter]) -> None:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = OPTIMIZERS[name](params)
        optimizer.step()
        optimizer.zero_grad()

    return take_a_step


CHANGES: dict[str, Edit] = {
    "in place": add_in_place,
    "local tensor": write_the_local_tensor,
    "load": load_a_state_dict,
    "assign": load_by_assignment,
    **{name: stepped_by(name) for name in ("sgd_foreach", "adamw_fused", "sgd")},
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks("ranks")
def test_the_forward_after_a_change_sees_it(change: str, reshard: bool | None) -> None:
    model, params = sharded_stack(reshard_after_forward=reshard)
    model.set_reshard_after_backward(False)
    x = inputs_for(0, 0)
    with torch.no_grad():
        before = model(x)
    CHANGES[change](model, params)
    fresh = Stack()
    fresh.load_state_dict({key: t.full_tensor() for key, t in model.state_dict().items()})
    with torch.no_grad():
        after = model(x)
        assert torch.equal(after, fresh(x)) and not torch.equal(after, before)


# Stale weights ------------------------------------------------------------------------------


def refused(change: str) -> str:
    """Return the refusal; it leaves the model usable, and what follows is as the oracle does it."""
    model, params = sharded_stack()
    for step in range(2):  # the second time with recorded orders, and gathers under way
        loss = loss_of(model(inputs_for(step, dist.get_rank())))
        if not step:
            loss.backward()
    CHANGES[change](model, params)
    with pytest.raises(StaleParameterError) as caught:
        loss.backward()
    plain = Stack()
    plain.load_state_dict({key: t.full_tensor() for key, t in model.state_dict().items()})
    oracle = Unsharded(plain)
    comparison = Comparison(model, oracle, exact=dist.get_world_size() <= 2)
    for param in model.parameters():
        param.grad = None
    for step in range(2):
        train_both(model, oracle, comparison, step)
    assert comparison.differences == []
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_forward_and_backward_is_refused(change: str, ranks: int) -> None:
    (said,) = set(run_ranks(refused, ranks, change, timeout=20))
    # Loading frees the root too; with one rank its parameters are the sharded ones.
    is_root = ranks == 1 or change in ("load", "assign")
    first = "the root group" if is_root else "group 'blocks.2'"
    assert said.startswith(
        f"Expected the parameters of {first} in backward as they were in forward, got "
    )


# Ranks that keep outputs, and others that do not ----------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
@on_ranks(2, timeout=20)
def test_ranks_unshard_alike_whatever_outputs_they_keep(keeps: bool) -> None:
    """Let rank 0 alone keep an output, if any rank does; another model's optimizer steps."""
    model, _ = sharded_stack()
    model.set_reshard_after_backward(False)
    other = fully_shard(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(2, 3)).sum().backward()
    x = inputs_for(0, dist.get_rank())
    with model.no_sync():
        loss, kept = loss_of(model(x)), model(x)
        if not keeps or dist.get_rank():
            del kept
        loss.backward()
    optimizer.step()
    block = model.blocks[0]
    expected = [full(shard) for shard in block.state_dict().values()]
    block.unshard()
    for got, shard in zip(block.parameters(), expected, strict=True):
        assert torch.equal(got, shard)
