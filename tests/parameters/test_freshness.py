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
from nets import Net, assert_parity, full, own_input, train_step, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from training.compare import Comparison, step_both
from training.oracle import OPTIMIZERS, OptimizerFactory, Unsharded
from training.scenarios import STACK_GROUPS, Stack, loss_of
from training.trees import inputs_for

from composable_shard import MixedPrecisionPolicy, StaleParameterError, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import RankError, fake_ranks, run_ranks


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


def trained_while_kept(change: Change, foreach: bool) -> None:
    """Keep parameters gathered over steps of an optimizer that moves no version counter."""
    reference, model = two_nets(2)
    change(model)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        for one in (model, reference)
    ]
    for step in range(3):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            train_step_of_plain_or_sharded(one, step)
            optimizer.step()
            optimizer.zero_grad()
    model.reshard()
    for block in model.blocks:
        block.reshard()
    assert_parity(model, reference)


def train_step_of_plain_or_sharded(model: Net, step: int) -> None:
    model(own_input(step)).square().sum().backward()
    if type(model) is Net:
        for param in model.parameters():
            torch.distributed.all_reduce(param.grad)
            param.grad.div_(torch.distributed.get_world_size())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("change", [as_it_is, assigned, converted_twice, used_before])
def test_optimizer_steps_are_noticed(change: Change, foreach: bool, num_ranks: int) -> None:
    run_ranks(trained_while_kept, num_ranks, change, foreach)


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


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_an_evaluation_before_the_step() -> None:
    """The root, kept by an evaluation before the step, is fresh after it."""
    reference, model = two_nets(1)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(2):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            train_step(one, step, None)
            with torch.no_grad():
                one(own_input(7))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            got, expected = model(own_input(8)), reference(own_input(8))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def gathers_of_unchanged() -> list[str]:
    """What is kept for backward, and has not changed, is not gathered again."""
    _, model = two_nets(1)
    model.set_reshard_after_forward(False)
    model(own_input())
    with record_events(model, "all_gather") as recorded:
        model(own_input(1))
        model(own_input(2))
    return [name for _, name in recorded]


def test_what_has_not_changed_is_not_gathered_again() -> None:
    assert run_ranks(gathers_of_unchanged, 2) == [[]] * 2


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


def train_with_arrays(reshard: bool) -> tuple[list[bool], list[str]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Recording(), Recording())
    reference = copy.deepcopy(model)
    for part in model:
        fully_shard(part, reshard_after_forward=reshard)
    fully_shard(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    same = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            for one, optimizer in zip((model, reference), optimizers, strict=True):
                one(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            for ours, theirs in zip(model, reference, strict=True):
                same.append(torch.allclose(ours.copies[-1], theirs.copies[-1]))
                same.append(torch.equal(torch.from_numpy(ours.arrays[-1]), ours.copies[-1]))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    same += [torch.allclose(full(ours), theirs) for ours, theirs in pairs]
    return same, sorted({str(one.message) for one in caught})


@pytest.mark.parametrize("reshard", [True, False])
def test_memory_that_an_array_shares_is_kept(reshard: bool) -> None:
    text = (
        "Expected to free memory of unsharded parameters, got some that an array shares, as "
        "that of weight.detach().numpy() does; it stays allocated, and the next gather "
        "overwrites it; keep a copy, such as weight.detach().clone().numpy()"
    )
    for same, warned in run_ranks(train_with_arrays, 2, reshard):
        assert all(same)
        assert warned == [text]


Edit = Callable[[nn.Module, list[nn.Parameter]], None]


def sharded_stack(**options: Any) -> tuple[Stack, list[nn.Parameter]]:
    model = Stack()
    for name in STACK_GROUPS:
        fully_shard(model.get_submodule(name), **options)
    return model, list(model.parameters())


# Fresh weights ------------------------------------------------------------------------------


def train_without_resharding(
    make_optimizer: OptimizerFactory, options: dict[str, Any], grow_only: bool
) -> list[str]:
    """Keep everything unsharded from forward to forward; step in between."""
    torch.manual_seed(3)
    model = Stack()
    oracle = Unsharded(model, options.get("mp_policy"))
    for name in STACK_GROUPS:
        fully_shard(model.get_submodule(name), **options)
    model.set_reshard_after_backward(False)
    comparison = Comparison(model, oracle, exact=False)
    params = list(model.parameters())
    optimizers = [make_optimizer(params), make_optimizer(oracle.model.parameters())]
    for step in range(4):
        x = inputs_for(step, dist.get_rank())
        losses = [loss_of(m(x)) for m in (model, oracle)]
        comparison.tensor(f"step {step}: loss", *losses)
        for loss in losses:
            loss.backward()
        oracle.after_backward()
        comparison.grads(f"step {step}")
        if not grow_only or step % 2:
            step_both(optimizers, oracle)
        comparison.params(f"step {step}")
    return comparison.differences


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd_foreach", "adamw_foreach", "adamw_fused"])
def test_weights_are_fresh_after_a_step_without_resharding(
    optimizer: str, ranks: int, reshard: bool | None
) -> None:
    options = {"reshard_after_forward": reshard}
    args = (OPTIMIZERS[optimizer], options, False)
    differences = run_ranks(train_without_resharding, ranks, *args, timeout=20)
    assert differences == [[]] * ranks, differences


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_fresh_in_low_precision(ranks: int) -> None:
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    args = (OPTIMIZERS["sgd_foreach"], options, True)
    differences = run_ranks(train_without_resharding, ranks, *args, timeout=20)
    assert differences == [[]] * ranks, differences


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


def step_of(make_optimizer: OptimizerFactory) -> Edit:
    def take_a_step(model: nn.Module, params: list[nn.Parameter]) -> None:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = make_optimizer(params)
        optimizer.step()
        optimizer.zero_grad()

    return take_a_step


def foreach_step(model: nn.Module, params: list[nn.Parameter]) -> None:
    step_of(OPTIMIZERS["sgd_foreach"])(model, params)


def fused_step(model: nn.Module, params: list[nn.Parameter]) -> None:
    step_of(OPTIMIZERS["adamw_fused"])(model, params)


def plain_step(model: nn.Module, params: list[nn.Parameter]) -> None:
    step_of(OPTIMIZERS["sgd"])(model, params)


CHANGES: list[Edit] = [
    add_in_place,
    write_the_local_tensor,
    load_a_state_dict,
    load_by_assignment,
    foreach_step,
    fused_step,
    plain_step,
]
LOADING = [load_a_state_dict, load_by_assignment]


def output_after(change: Edit, options: dict[str, Any]) -> list[bool]:
    """Whether a forward after a change gives what a model that gathers anew gives."""
    model, params = sharded_stack(**options)
    model.set_reshard_after_backward(False)
    x = inputs_for(0, 0)
    with torch.no_grad():
        before = model(x)
    change(model, params)
    fresh = Stack()
    fresh.load_state_dict({key: t.full_tensor() for key, t in model.state_dict().items()})
    with torch.no_grad():
        after = model(x)
        return [torch.equal(after, fresh(x)), not torch.equal(after, before)]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_the_forward_after_a_change_sees_it(change: Edit, ranks: int, reshard: bool | None) -> None:
    options = {"reshard_after_forward": reshard}
    assert run_ranks(output_after, ranks, change, options) == [[True, True]] * ranks


# Stale weights ------------------------------------------------------------------------------


def change_before_backward(change: Edit, options: dict[str, Any]) -> None:
    model, params = sharded_stack(**options)
    for step in range(2):  # the second time with recorded orders, and gathers under way
        loss = loss_of(model(inputs_for(step, dist.get_rank())))
        if step:
            change(model, params)
        loss.backward()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_forward_and_backward_is_refused(change: Edit, ranks: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(change_before_backward, ranks, change, {}, timeout=20)
    failure = caught.value.agreed()
    assert failure.exception_type is StaleParameterError
    # Loading frees the root too; with one rank its parameters are the sharded ones.
    first = "the root group" if ranks == 1 or change in LOADING else "group 'blocks.2'"
    assert failure.message.startswith(
        f"Expected the parameters of {first} in backward as they were in forward, got "
    )


def train_after_a_refusal(change: Edit) -> list[str]:
    """The refusal leaves the model usable: the next iteration is that of the oracle."""
    model, params = sharded_stack()
    loss = loss_of(model(inputs_for(0, dist.get_rank())))
    change(model, params)
    with pytest.raises(StaleParameterError):
        loss.backward()
    plain = Stack()
    plain.load_state_dict({key: t.full_tensor() for key, t in model.state_dict().items()})
    oracle = Unsharded(plain)
    comparison = Comparison(model, oracle, exact=dist.get_world_size() <= 2)
    for param in model.parameters():
        param.grad = None
    for step in range(2):
        x = inputs_for(step, dist.get_rank())
        losses = [loss_of(m(x)) for m in (model, oracle)]
        comparison.tensor(f"step {step}: loss", *losses)
        for loss in losses:
            loss.backward()
        oracle.after_backward()
        comparison.grads(f"step {step}")
    return comparison.differences


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("change", [add_in_place, foreach_step, load_by_assignment])
def test_training_goes_on_after_a_refusal(change: Edit, ranks: int) -> None:
    differences = run_ranks(train_after_a_refusal, ranks, change, timeout=20)
    assert differences == [[]] * ranks, differences


def change_of_what_is_not_needed_again() -> list[str]:
    """Unsharded parameters that backward still has are those of forward: nothing is stale."""
    torch.manual_seed(3)
    model = Stack()
    oracle = Unsharded(model)
    for name in STACK_GROUPS:
        fully_shard(model.get_submodule(name), reshard_after_forward=False)
    comparison = Comparison(model, oracle, exact=True)
    params = list(model.parameters())
    x = inputs_for(0, dist.get_rank())
    losses = [loss_of(m(x)) for m in (model, oracle)]
    with torch.no_grad():
        for param in params:
            param.add_(1)
    for loss in losses:
        loss.backward()
    oracle.after_backward()
    comparison.grads("after")
    return comparison.differences


def test_a_change_is_harmless_where_nothing_is_gathered_again() -> None:
    assert run_ranks(change_of_what_is_not_needed_again, 2) == [[]] * 2


# Ranks that keep outputs, and others that do not ----------------------------------------------


def unsharded_after_a_step_of_another(keeps: bool) -> bool:
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
    return all(map(torch.equal, expected, [param.detach() for param in block.parameters()]))


@pytest.mark.parametrize("keeps", [False, True])
def test_ranks_unshard_alike_whatever_outputs_they_keep(keeps: bool) -> None:
    assert run_ranks(unsharded_after_a_step_of_another, 2, keeps, timeout=20) == [True, True]
