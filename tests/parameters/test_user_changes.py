"""Which form of the parameters is registered between passes, and what an edit of it does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from nets import Block, Net, assert_parity, average_gradients, full, own_input, shard_net, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import MixedPrecisionPolicy, ShardError, fully_shard, unsharded
from composable_shard.insight.events import record_events
from composable_shard.testing import RankError, run_ranks

Reshard = bool | int | None
one_or_two = pytest.mark.parametrize("num_ranks", [1, 2])


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    loss: torch.Tensor = model(own_input(step)).square().sum()
    return loss


def forms(model: nn.Module) -> set[bool]:
    """Whether each parameter is a DTensor, wherever users look."""
    found = {isinstance(param, DTensor) for param in model.parameters()}
    found |= {isinstance(module.weight, DTensor) for module in (model.inp, model.blocks[0].up)}
    assert {isinstance(tensor, DTensor) for tensor in model.state_dict().values()} == {True}
    return found


def gathers(model: nn.Module, step: int = 0) -> list[str]:
    """Run forward; return the groups that it gathers."""
    with record_events(model, "all_gather") as recorded:
        model(own_input(step))
    return [name for _, name in recorded]


def reduce_and_compare(model: Net, reference: Net) -> None:
    average_gradients(reference.parameters())
    for module in (model, *model.blocks):
        module.reshard()
    assert_parity(model, reference)


# Which form ---------------------------------------------------------------------------------


def after_backward(model: Net) -> None:
    loss_of(model).backward()


def after_backward_without_sync(model: Net) -> None:
    with model.no_sync():
        loss_of(model).backward()


def after_backward_that_is_not_the_last(model: Net) -> None:
    model.set_is_last_backward(False)
    loss_of(model).backward()


def after_forward_under_no_grad(model: Net) -> None:
    with torch.no_grad():
        model(own_input())


def after_forward_under_inference_mode(model: Net) -> None:
    with torch.inference_mode():
        model(own_input())


def after_forward_while_frozen(model: Net) -> None:
    model.requires_grad_(False)
    model(own_input())


def after_a_step_that_follows_an_unused_output(model: Net) -> None:
    loss_of(model).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model(own_input())
    optimizer.step()


def after_an_evaluation_within_accumulation(model: Net) -> None:
    after_backward_without_sync(model)
    after_forward_under_no_grad(model)


def after_a_failed_backward(model: Net) -> None:
    handle = model.blocks[0].up.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model).backward()
    handle.remove()


def after_a_backward_of_later_layers(model: Net) -> None:
    model.inp.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    loss_of(model).backward()


WINDOWS: list[Callable[[Net], None]] = [
    after_backward,
    after_backward_without_sync,
    after_backward_that_is_not_the_last,
    after_forward_under_no_grad,
    after_forward_under_inference_mode,
    after_forward_while_frozen,
    after_a_step_that_follows_an_unused_output,
    after_an_evaluation_within_accumulation,
    after_a_failed_backward,
    after_a_backward_of_later_layers,
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "reshard"), [(4, 2), *product([2], [None, True, False]), (1, None), (1, False)]
)
@on_ranks("num_ranks")
def test_sharded_parameters_are_registered(reshard: Reshard, after: bool) -> None:
    for window in WINDOWS:
        model = shard_net(Net(2), reshard_after_forward=reshard)
        model.set_reshard_after_backward(after)
        for _ in range(2):
            window(model)
            assert forms(model) == {True}, window


@one_or_two
@on_ranks("num_ranks")
def test_unshard_shows_the_unsharded_ones_until_reshard() -> None:
    for reshard in (None, False):
        reference, model = two_nets(1, reshard_after_forward=reshard)
        groups = [model, *model.blocks]
        for _ in range(2):
            for module in groups:
                module.unshard()
            assert forms(model) == {False}
            for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(param, expected)
            for run in (after_forward_under_no_grad, loss_of) if reshard is False else ():
                run(model)
                assert forms(model) == {False}
            for module in groups:
                module.reshard()
            assert forms(model) == {True}


@pytest.mark.parametrize(
    ("reshard", "trainable", "groups"),
    [(False, True, []), (False, False, ["", "blocks.0"]), (None, True, ["", "blocks.0"])],
)
@on_ranks(2)
def test_a_second_forward_trusts_only_what_users_said_stays(
    reshard: Reshard, trainable: bool, groups: list[str]
) -> None:
    _, model = two_nets(1, reshard_after_forward=reshard)
    model.requires_grad_(trainable)
    model(own_input())
    assert gathers(model, 1) == gathers(model, 2) == groups


# What an edit does --------------------------------------------------------------------------

Params = list[nn.Parameter]


def local_of(param: nn.Parameter) -> torch.Tensor:
    return param._local_tensor if isinstance(param, DTensor) else param


def halve_by_numpy(param: nn.Parameter) -> None:
    array = local_of(param).detach().numpy()
    array *= 0.5


def each(edit: Callable[[nn.Parameter], object]) -> Callable[[Params], object]:
    return lambda params: [edit(param) for param in params]


EDITS: dict[str, Callable[[Params], object]] = {
    "copy": each(lambda p: p.copy_(p * 0.5)),
    "clamp": each(lambda p: p.clamp_(-0.1, 0.1)),
    "clamp data": each(lambda p: p.data.clamp_(-0.1, 0.1)),
    "foreach": lambda params: torch._foreach_mul_(params, 0.75),
    "lerp": lambda params: torch._foreach_lerp_(params, [torch.zeros_like(p) for p in params], 0.2),
    "foreach of data": lambda params: torch._foreach_mul_([p.data for p in params], 0.75),
    "numpy": each(halve_by_numpy),
    "local data": each(lambda p: local_of(p).data.mul_(0.5)),
}


def between_backward_and_forward(model: nn.Module, step: int) -> None:
    loss_of(model, step).backward()


def after_an_evaluation(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        model(own_input(step))


def after_inference(model: nn.Module, step: int) -> None:
    with torch.inference_mode():
        model(own_input(step))


@pytest.mark.brief(3)
@pytest.mark.parametrize(
    ("num_ranks", "reshard"), [(2, None), (2, False), (2, True), (1, None), (1, False)]
)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize(
    "window", [between_backward_and_forward, after_an_evaluation, after_inference]
)
@on_ranks("num_ranks")
def test_edits_count(window: Callable[..., None], after: bool, reshard: Reshard) -> None:
    """Edit the registered parameters in a window; the next forward and backward see it."""
    reference, model = two_nets(2, reshard_after_forward=reshard)
    model.set_reshard_after_backward(after)
    for step, name in enumerate([*EDITS, *EDITS]):
        for one in (model, reference):
            window(one, step)
            with torch.no_grad():
                EDITS[name](list(one.parameters()))
            one.zero_grad()
        losses = [loss_of(one, step) for one in (model, reference)]
        assert torch.equal(*losses), (name, step)
        for loss in losses:
            loss.backward()
        average_gradients(reference.parameters())
        assert_parity(model, reference)


# Loops of users -----------------------------------------------------------------------------


def built(layers: bool = True, root: bool = True, keeps: bool = False, **kwargs: Any) -> nn.Module:
    """Layers whose root has no parameters of its own, sharded as asked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Block(6), nn.Linear(6, 3)).double()
    for layer in model if layers else ():
        fully_shard(layer, **kwargs)
    if not root:
        return model
    fully_shard(model, **kwargs).set_reshard_after_backward(not keeps)
    return model


SHARDED: dict[str, dict[str, Any]] = {
    "root without parameters": {},
    "explicit": {"reshard_after_forward": True},
    "number": {"reshard_after_forward": 2},
    "no root": {"root": False, "reshard_after_forward": True},
    "one group": {"layers": False, "reshard_after_forward": True},
}
KEPT = {"reshard_after_forward": False, "keeps": True}
Target = list[torch.Tensor]
Loop = Callable[[nn.Module, torch.Tensor, torch.optim.Optimizer, Target], None]


def average_if_whole(model: nn.Module) -> None:
    if not isinstance(next(model.parameters()), DTensor):
        average_gradients(model.parameters())


def clear_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def clips_what_was_listed(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, target: Target
) -> None:
    loss = model(x).square().sum()
    listed = list(model.parameters())
    loss.backward()
    average_if_whole(model)
    target.append(full(torch.nn.utils.clip_grad_norm_(listed, 0.5)))
    optimizer.step()
    optimizer.zero_grad()


def interpolates_a_target(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, target: Target
) -> None:
    loss = model(x).square().sum()
    with torch.no_grad():
        if not target:
            target += [param.detach().clone() for param in model.parameters()]
        torch._foreach_lerp_(target, list(model.parameters()), 0.5)
    loss.backward()
    average_if_whole(model)
    optimizer.step()
    optimizer.zero_grad()


def steps_by_hand(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, target: Target
) -> None:
    """Clear between forward and backward, clip, and step foreach, all without torch.optim."""
    loss = model(x).square().sum()
    target.append(loss.detach())
    clear_by_hand(model)
    model.zero_grad()
    loss.backward()
    average_if_whole(model)
    params = list(model.parameters())
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    with torch.no_grad():
        torch._foreach_add_(params, [param.grad for param in params], alpha=-0.1)


LOOPS: list[Loop] = [
    clips_what_was_listed,
    interpolates_a_target,
    steps_by_hand,
]
LOOPS_OF_KEPT = [steps_by_hand]


@pytest.mark.brief(5)
@pytest.mark.parametrize(
    ("how", "num_ranks"), [*product([*SHARDED, "kept"], [2]), ("kept", 1), ("kept", 3)]
)
@on_ranks("num_ranks")
def test_every_step_registers_the_same_parameters(how: str) -> None:
    """And each loop trains as the unsharded model, also while parameters are kept after backward.

    In between a forward whose output nobody uses.
    """
    for loop in LOOPS if how != "kept" else LOOPS_OF_KEPT:
        model, whole = built(**SHARDED.get(how, KEPT)), built(layers=False, root=False)
        before, kept = list(model.parameters()), ([], [])
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, whole)]
        for step in range(3):
            x = own_input(step).double()
            for one, optimizer, target in zip((model, whole), optimizers, kept, strict=True):
                loop(one, x, optimizer, target)
            if how != "kept":
                model(x)
            assert all(map(operator.is_, model.parameters(), before)), (loop.__name__, step)
            pairs = [*zip(before, whole.parameters(), strict=True), *zip(*kept, strict=True)]
            for got, expected in pairs:
                torch.testing.assert_close(full(got), expected, msg=loop.__name__)


# A root of its own parameters stays registered: nothing done to it is lost in silence ----------

ROOT_TEXT = (
    "Expected the unsharded parameters of the root group as their forward left them, got writes "
    "to {}, which are lost when the memory is freed; call reshard() first and write the sharded "
    "ones, or write within unsharded()"
)


def halve_two(model: Net) -> None:
    for param in (model.inp.weight, model.out.bias):
        param.data.mul_(0.5)


def assign_data(model: Net) -> None:
    model.out.bias.data = model.out.bias.data * 0.5


WRITES: dict[str, Callable[[Net], object]] = {
    "'out.weight'": lambda model: model.out.weight.mul_(0.5),
    "'inp.weight', 'out.bias'": halve_two,
    "'out.bias'": assign_data,
    "'out.weight.grad'": lambda model: model.out.weight.grad.mul_(0.5),
}
USES: dict[str, Callable[[Net, torch.Tensor], object]] = {
    "backward": lambda model, loss: loss.backward(),
    "forward": lambda model, loss: model(own_input()),
    "state dict": lambda model, loss: model.state_dict(),
    "reshard": lambda model, loss: model.reshard(),
}


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_a_write_to_a_registered_root_is_refused(use: str, reshard: Reshard) -> None:
    for names, write in WRITES.items():
        reference, model = two_nets(1, reshard_after_forward=reshard)
        for one in (model, reference):
            loss_of(one).backward()
        loss = loss_of(model)
        with torch.no_grad():
            write(model)
        with pytest.raises(ShardError) as caught:
            USES[use](model, loss)
        assert str(caught.value) == ROOT_TEXT.format(names)
        for one in (model, reference):
            one.zero_grad()
            loss_of(one, 1).backward()
        reduce_and_compare(model, reference)


def zero_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.detach_()
            param.grad.zero_()


CLEARS: dict[str, Callable[[Net], object]] = {
    "by hand": clear_by_hand,
    "to zeros": zero_by_hand,
    "of the module": lambda model: model.zero_grad(),
    "of a part": lambda model: model.out.zero_grad(),
    "not": lambda model: None,
}


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_clearing_a_registered_root_counts(reshard: Reshard, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for name, clear in CLEARS.items():
        models = [two_nets(1, reshard_after_forward=reshard, mp_policy=policy)[1] for _ in "ab"]
        models[1].load_state_dict(models[0].state_dict())
        for step in range(4):
            for one in models:
                one.set_requires_gradient_sync(step != 1)
                if one is models[1]:  # the sharded ones are registered before forward
                    clear(one)
                loss = loss_of(one, step)
                if one is models[0]:
                    clear(one)
                loss.backward()
        for module in (m for one in models for m in (one, *one.blocks)):
            module.reshard()
        for param, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(full(param.grad), full(expected.grad)), name


# Optimizers that were given unsharded parameters -----------------------------------------------


def filled_by_hand(how: str) -> None:
    _, model = two_nets(1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    if how == "groups":
        loss = loss_of(model)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        loss.backward()
        return optimizer.step()
    if how == "dry run":
        loss_of(model)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    elif how == "unshard":
        model.unshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.reshard()
    else:
        with unsharded(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    return optimizer.step()


@one_or_two
@pytest.mark.parametrize(
    ("how", "num"), [("groups", 4), ("context", 10), ("dry run", 4), ("unshard", 4)]
)
def test_an_optimizer_with_unsharded_parameters_is_refused(
    num_ranks: int, how: str, num: int
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(filled_by_hand, num_ranks, how)
    failure = caught.value.agreed()
    assert (failure.type_name, failure.message) == (
        "ShardError",
        f"Expected SGD to have sharded parameters, got {num} full ones; build it after "
        "fully_shard, outside unsharded(), not between a forward and its backward",
    )
