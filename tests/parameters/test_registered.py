"""Which form of the parameters is registered between passes, and what an edit of it does."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Block, Net, assert_parity, average_gradients, full, own_input, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import MixedPrecisionPolicy, ShardError, fully_shard, unsharded
from composable_shard.insight.events import record_events
from composable_shard.testing import RankError, run_ranks

Reshard = bool | int | None
RESHARD: list[Reshard] = [None, True, False, 2]


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    loss: torch.Tensor = model(own_input(step)).square().sum()
    return loss


def forms(model: nn.Module) -> set[bool]:
    """Whether each parameter is a DTensor, wherever users look."""
    found = {isinstance(param, DTensor) for param in model.parameters()}
    found |= {isinstance(module.weight, DTensor) for module in (model.inp, model.blocks[0].up)}
    assert {isinstance(tensor, DTensor) for tensor in model.state_dict().values()} == {True}
    return found


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


WINDOWS: list[Callable[[Net], None]] = [
    after_backward,
    after_backward_without_sync,
    after_backward_that_is_not_the_last,
    after_forward_under_no_grad,
    after_forward_under_inference_mode,
    after_forward_while_frozen,
    after_a_step_that_follows_an_unused_output,
    after_an_evaluation_within_accumulation,
]


def forms_in(window: Callable[[Net], None], reshard: Reshard, after: bool) -> list[set[bool]]:
    _, model = two_nets(2, reshard_after_forward=reshard)
    model.set_reshard_after_backward(after)
    found = []
    for _ in range(3):
        window(model)
        found.append(forms(model))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
def test_sharded_parameters_are_registered(
    window: Callable[[Net], None], after: bool, num_ranks: int
) -> None:
    for reshard in RESHARD[: 3 if num_ranks == 1 else 4]:
        found = run_ranks(forms_in, num_ranks, window, reshard, after)
        assert found == [[{True}] * 3] * num_ranks, reshard


def forms_with_a_number() -> list[set[bool]]:
    """A number of ranks that is neither one nor all."""
    found = []
    for window in WINDOWS:
        _, model = two_nets(2, reshard_after_forward=2)
        model.set_reshard_after_backward(False)
        window(model)
        window(model)
        found.append(forms(model))
    return found


def test_sharded_parameters_are_registered_with_a_number() -> None:
    assert run_ranks(forms_with_a_number, 4) == [[{True}] * len(WINDOWS)] * 4


def form_of_a_head() -> list[float]:
    """Between forward and backward a loss may use the weight of a head, also in accumulation."""
    reference, model = two_nets(1)
    model.set_reshard_after_backward(False)
    losses = []
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        pair = []
        for one in (model, reference):
            loss = one(own_input(step)).square().sum() + one.out.weight.square().sum()
            loss.backward()
            pair.append(loss.item())
        assert pair[0] == pair[1]
        losses += pair
    average_gradients(reference.parameters())
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad, rtol=1e-5, atol=1e-6)
    return losses


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_may_use_a_weight_between_forward_and_backward(num_ranks: int) -> None:
    run_ranks(form_of_a_head, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_a_head_stands_there_for_the_loss_of_a_second_forward() -> None:
    """With two forwards before their backwards, the second loss is made after the first backward.

    Kept within an accumulation, the head still stands there for it.
    """
    reference, model = two_nets(1, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    with model.no_sync():
        for one in (model, reference):
            outputs = [one(own_input(step)) for step in range(2)]
            for output in outputs:
                (output @ one.out.weight).square().sum().backward()
    model.synchronize_gradients()
    average_gradients(reference.parameters())
    for module in (model, *model.blocks):
        module.reshard()
    assert_parity(model, reference)


def held_by_the_user(reshard: Reshard) -> list[set[bool]]:
    """An explicit unshard() shows the unsharded parameters until reshard()."""
    reference, model = two_nets(1, reshard_after_forward=reshard)
    groups = [model, *model.blocks]
    found = []
    for _ in range(2):
        for module in groups:
            module.unshard()
        found.append(forms(model))
        for (name, param), expected in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert torch.equal(param, expected), name
        if reshard is False:
            after_forward_under_no_grad(model)
            found.append(forms(model))
            model(own_input())
            found.append(forms(model))
        for module in groups:
            module.reshard()
        found.append(forms(model))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_unshard_shows_the_unsharded_ones_until_reshard(num_ranks: int) -> None:
    plain, sharded = {False}, {True}
    found = run_ranks(held_by_the_user, num_ranks, None)
    assert found == [[plain, sharded] * 2] * num_ranks
    found = run_ranks(held_by_the_user, num_ranks, False)
    assert found == [[plain, plain, plain, sharded] * 2] * num_ranks


def gathers_while_held() -> list[list[str]]:
    """What is held by unshard() is not gathered by forwards, unless it was changed."""
    _, model = two_nets(1, reshard_after_forward=False)
    for module in (model, *model.blocks):
        module.unshard()
    found = []
    with torch.no_grad():
        for step in range(3):
            with record_events(model, "all_gather") as recorded:
                model(own_input(step))
            found.append([name for _, name in recorded])
            if step == 1:
                model.blocks[0].down.bias.mul_(2)  # the unsharded one: lost, as in torch
                sharded = model.state_dict()["out.bias"]
                sharded.mul_(2)
    return found


def test_what_is_held_is_not_gathered_by_forwards() -> None:
    assert run_ranks(gathers_while_held, 2) == [[[], [], [""]]] * 2


# What an edit does --------------------------------------------------------------------------

Params = list[nn.Parameter]
Edit = Callable[[Params], None]


def by_copy(params: Params) -> None:
    for param in params:
        param.copy_(param * 0.5)


def by_clamping(params: Params) -> None:
    for param in params:
        param.clamp_(-0.1, 0.1)


def by_clamping_data(params: Params) -> None:
    for param in params:
        param.data.clamp_(-0.1, 0.1)


def by_foreach(params: Params) -> None:
    torch._foreach_mul_(params, 0.75)


def by_foreach_lerp(params: Params) -> None:
    torch._foreach_lerp_(params, [torch.zeros_like(param) for param in params], 0.25)


def by_foreach_of_data(params: Params) -> None:
    torch._foreach_mul_([param.data for param in params], 0.75)


def by_numpy(params: Params) -> None:
    for param in params:
        local = param.to_local() if isinstance(param, DTensor) else param
        array = local.detach().numpy()
        array *= 0.5


def by_local_data(params: Params) -> None:
    for param in params:
        local = param._local_tensor if isinstance(param, DTensor) else param
        local.data.mul_(0.5)


EDITS = [
    by_copy,
    by_clamping,
    by_clamping_data,
    by_foreach,
    by_foreach_lerp,
    by_foreach_of_data,
    by_numpy,
    by_local_data,
]


def between_backward_and_forward(model: nn.Module, step: int) -> None:
    loss_of(model, step).backward()


def after_an_evaluation(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        model(own_input(step))


def after_inference(model: nn.Module, step: int) -> None:
    with torch.inference_mode():
        model(own_input(step))


def after_an_unused_output(model: nn.Module, step: int) -> None:
    model(own_input(step))


def after_an_output_that_is_alive(model: nn.Module, step: int) -> None:
    model.kept_output = [model(own_input(step))]


def edited_in(window: Callable[[nn.Module, int], None], reshard: Reshard, after: bool) -> list[str]:
    """Edit the registered parameters in a window; the next forward and backward see it."""
    wrong = []
    for edit in EDITS:
        reference, model = two_nets(2, reshard_after_forward=reshard)
        model.set_reshard_after_backward(after)
        for step in range(3):
            for one in (model, reference):
                window(one, step)
                with torch.no_grad():
                    edit(list(one.parameters()))
                one.zero_grad()
            losses = [loss_of(one, step) for one in (model, reference)]
            if not torch.equal(*losses):
                wrong.append(f"{edit.__name__}, step {step}")
            for loss in losses:
                loss.backward()
            average_gradients(reference.parameters())
            assert_parity(model, reference)
    return wrong


@pytest.mark.brief(4)
@pytest.mark.parametrize(
    ("num_ranks", "reshard"), [*product([1], RESHARD[:3]), *product([2], RESHARD)]
)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize(
    "window",
    [between_backward_and_forward, after_an_evaluation, after_inference],
)
def test_edits_count(
    window: Callable[[nn.Module, int], None], after: bool, num_ranks: int, reshard: Reshard
) -> None:
    assert run_ranks(edited_in, num_ranks, window, reshard, after) == [[]] * num_ranks


def edited_shards_after(window: Callable[[nn.Module, int], None], reshard: Reshard) -> list[str]:
    """Edit the sharded parameters, as an optimizer has them, after an output nobody uses."""
    wrong = []
    for edit in EDITS:
        reference, model = two_nets(2, reshard_after_forward=reshard)
        params = list(model.parameters())
        for step in range(3):
            for one, its in ((model, params), (reference, list(reference.parameters()))):
                window(one, step)
                with torch.no_grad():
                    edit(its)
            losses = [loss_of(one, step) for one in (model, reference)]
            if not torch.equal(*losses):
                wrong.append(f"{edit.__name__}, step {step}")
    return wrong


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("window", [after_an_unused_output, after_an_output_that_is_alive])
def test_a_forward_trusts_nothing_that_it_kept_by_default(
    window: Callable[[nn.Module, int], None], num_ranks: int, reshard: bool | None
) -> None:
    wrong = run_ranks(edited_shards_after, num_ranks, window, reshard)
    assert wrong == [[]] * num_ranks, reshard


def averaged(watches: bool, edit: str) -> None:
    """Average a student's weights into a teacher that stays gathered, after the student's step."""
    reference, model = two_nets(1)
    teachers = two_nets(1, reshard_after_forward=False)
    if not watches:
        for one in teachers:
            one.requires_grad_(False)
    pairs = [(reference, teachers[0]), (model, teachers[1])]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one, _ in pairs]
    averaged = [list(teacher.parameters()) for _, teacher in pairs]
    for step in range(4):
        losses = []
        for index, (student, teacher) in enumerate(pairs):
            target = teacher(own_input(step)).detach()
            loss = (student(own_input(step)) - target).square().sum()
            loss.backward()
            if student is reference:
                average_gradients(student.parameters())
            optimizers[index].step()
            optimizers[index].zero_grad()
            with torch.no_grad():
                if edit == "lerp":
                    torch._foreach_lerp_(averaged[index], list(student.parameters()), 0.5)
                else:
                    for param, source in zip(averaged[index], student.parameters(), strict=True):
                        param.data.mul_(0.5).add_(source.data, alpha=0.5)
            losses.append(loss.item())
        assert losses[0] == losses[1], step
    state = teachers[1].state_dict()
    for name, expected in teachers[0].state_dict().items():
        assert torch.equal(full(state[name]), expected), name


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("edit", ["lerp", "data"])
@pytest.mark.parametrize("watches", [True, False])
def test_averages_are_fresh_though_gradients_may_be_asked_for(
    watches: bool, edit: str, num_ranks: int
) -> None:
    run_ranks(averaged, num_ranks, watches, edit)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("how", ["foreach", "data"])
@pytest.mark.parametrize("order", ["zero after", "zero between"])
@on_ranks("num_ranks")
def test_a_step_by_hand_trains(order: str, how: str, reshard: Reshard) -> None:
    """Step by hand, without torch.optim, while parameters are kept after backward."""
    reference, model = two_nets(2, reshard_after_forward=reshard)
    model.set_reshard_after_backward(False)
    for step in range(4):
        losses = []
        for one in (model, reference):
            loss = loss_of(one, step)
            losses.append(loss.item())
            if order == "zero between":
                for param in one.parameters():
                    param.grad = None
                one.zero_grad()
            loss.backward()
            if one is reference:
                average_gradients(one.parameters())
            params = list(one.parameters())
            torch.nn.utils.clip_grad_norm_(params, 0.5)
            with torch.no_grad():
                if how == "foreach":
                    torch._foreach_add_(params, [param.grad for param in params], alpha=-0.1)
                else:
                    for param in params:
                        param.data.add_(param.grad.data, alpha=-0.1)
            if order == "zero after":
                for param in one.parameters():
                    param.grad = None
        assert losses[0] == losses[1], step
        tolerances = {"rtol": 1e-6, "atol": 1e-7}
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(param), expected, **tolerances)
            with torch.no_grad():
                expected.copy_(full(param))


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_clipping_clips_and_clamping_lasts() -> None:
    """Clip by torch's function, step, clamp: each acts, with everything kept after backward."""
    reference, model = two_nets(2, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(4):
        norms, losses = [], []
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            loss = loss_of(one, step)
            loss.backward()
            if one is reference:
                average_gradients(one.parameters())
            norms.append(full(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)))
            optimizer.step()
            with torch.no_grad():
                for param in one.parameters():
                    param.data.clamp_(-0.3, 0.3)
            for param in one.parameters():
                param.grad = None
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("how", ["converted", "loaded", "assigned"])
@on_ranks("num_ranks")
def test_what_is_replaced_while_kept_counts(how: str) -> None:
    """Converted or replaced parts of a group that is kept are gathered as they are then."""
    reference, model = two_nets(1)
    model.set_reshard_after_backward(False)
    for one in (model, reference):
        with one.no_sync() if one is model else torch.enable_grad():
            loss_of(one).backward()
        one.zero_grad()
    with torch.no_grad():
        for one in (model, reference):
            if how == "converted":
                one.out.double()
            elif how == "loaded":
                state = {name: value * 2 for name, value in one.out.state_dict().items()}
                one.out.load_state_dict(state, assign=True)
            else:
                one.out.weight = nn.Parameter(one.out.weight.detach() * 2)
            one.out.float()
        assert torch.equal(model(own_input(1)), reference(own_input(1)))


# Memory that is kept for backward is no form ------------------------------------------------


def built(layers: bool = True, root: bool = True, **kwargs: Any) -> nn.Module:
    """Layers whose root has no parameters of its own, sharded as asked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Block(6), nn.Linear(6, 3)).double()
    for layer in model if layers else ():
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs) if root else model


SHARDED: dict[str, dict[str, Any]] = {
    "root without parameters": {},
    "explicit": {"reshard_after_forward": True},
    "number": {"reshard_after_forward": 2},
    "no root": {"root": False, "reshard_after_forward": True},
    "one group": {"layers": False, "reshard_after_forward": True},
}
Target = list[torch.Tensor]
Loop = Callable[[nn.Module, torch.Tensor, torch.optim.Optimizer, Target], None]


def average_if_whole(model: nn.Module) -> None:
    if not isinstance(next(model.parameters()), DTensor):
        average_gradients(model.parameters())


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


def clears_by_hand(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, target: Target
) -> None:
    loss = model(x).square().sum()
    for param in model.parameters():
        param.grad = None
    loss.backward()
    average_if_whole(model)
    optimizer.step()


def clamps_after_a_log(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, target: Target
) -> None:
    model(x).square().sum().backward()
    average_if_whole(model)
    optimizer.step()
    optimizer.zero_grad()
    target.append(model(x).sum().detach())
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.1, 0.1)


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


@pytest.mark.parametrize("how", SHARDED)
@on_ranks(2)
def test_every_step_registers_the_same_parameters(how: str) -> None:
    loops: list[Loop] = [
        clips_what_was_listed,
        clears_by_hand,
        clamps_after_a_log,
        interpolates_a_target,
    ]
    for loop in loops:
        model, whole = built(**SHARDED[how]), built(layers=False, root=False)
        before, kept = list(model.parameters()), ([], [])
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, whole)]
        for step in range(4):
            x = own_input(step).double()
            for one, optimizer, target in zip((model, whole), optimizers, kept, strict=True):
                loop(one, x, optimizer, target)
            model(x)
            assert all(map(operator.is_, model.parameters(), before)), (loop.__name__, step)
            pairs = [*zip(before, whole.parameters(), strict=True), *zip(*kept, strict=True)]
            for got, expected in pairs:
                torch.testing.assert_close(full(got), expected, msg=loop.__name__)


@pytest.mark.parametrize(("how", "num_kept"), [*zip(SHARDED, [1, 0, 0, 0, 0], strict=True)])
@on_ranks(2)
def test_what_is_freed_after_forward(how: str, num_kept: int) -> None:
    """The group that ends forward may stay in memory if the root leaves the choice; no others."""
    model = built(**SHARDED[how])
    seen: list[torch.Tensor] = []
    for place in ("0", "1.up", "2"):
        module = model.get_submodule(place)
        module.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    for step in range(3):
        seen.clear()
        loss = model(own_input(step).double()).sum()
        is_kept = [weight.untyped_storage().nbytes() > 0 for weight in seen]
        assert sum(is_kept) == (num_kept if step else 0)
        loss.backward()


@on_ranks(2)
def test_an_edit_beside_kept_memory_counts_in_the_next_forward() -> None:
    """The backward of a group that is kept takes the weights of its forward."""
    model, whole = built(), built(layers=False, root=False)
    for step in range(3):
        x = own_input(step).double()
        loss, expected = model(x).square().sum(), whole(x).square().sum()
        assert torch.equal(loss, expected)
        expected.backward()
        with torch.no_grad():
            for one in (model, whole) if step else ():
                torch._foreach_mul_(list(one[-1].parameters()), 0.5)
        loss.backward()
        average_gradients(whole.parameters())
        assert_parity(model, whole)
        for one in (model, whole):
            one.zero_grad()


# A root of its own parameters stays registered: nothing done to it is lost in silence ----------

ROOT_TEXT = (
    "Expected the unsharded parameters of the root group as their forward left them, got {} "
    "written, which is lost when they are freed; call reshard() first and write the sharded ones, "
    "or write within unsharded()"
)


def halve(model: Net) -> str:
    model.out.weight.mul_(0.5)
    return "'out.weight'"


def halve_data(model: Net) -> str:
    for param in (model.inp.weight, model.out.bias):
        param.data.mul_(0.5)
    return "'inp.weight', 'out.bias'"


def assign_data(model: Net) -> str:
    model.out.bias.data = model.out.bias.data * 0.5
    return "'out.bias'"


def halve_gradient(model: Net) -> str:
    model.out.weight.grad.mul_(0.5)
    return "'out.weight.grad'"


def written_root(write: Callable[[Net], str], reshard: Reshard, use: str) -> str:
    reference, model = two_nets(1, reshard_after_forward=reshard)
    for one in (model, reference):
        loss_of(one).backward()
    loss = loss_of(model)
    with torch.no_grad():
        text = ROOT_TEXT.format(write(model))
    with pytest.raises(ShardError) as caught:
        if use == "backward":
            loss.backward()
        elif use == "forward":
            model(own_input())
        elif use == "state dict":
            model.state_dict()
        else:
            model.reshard()
    assert str(caught.value) == text
    for one in (model, reference):
        one.zero_grad()
        loss_of(one, 1).backward()
    average_gradients(reference.parameters())
    for module in (model, *model.blocks):
        module.reshard()
    assert_parity(model, reference)
    return text


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("use", ["backward", "forward", "state dict", "reshard"])
def test_a_write_to_a_registered_root_is_refused(use: str, reshard: Reshard) -> None:
    for write in (halve, halve_data, assign_data, halve_gradient):
        run_ranks(written_root, 2, write, reshard, use)


def by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def to_zeros_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.detach_()
            param.grad.zero_()


def of_the_module(model: nn.Module) -> None:
    model.zero_grad()


def of_a_part(model: nn.Module) -> None:
    model.get_submodule("out").zero_grad()


def nothing(model: nn.Module) -> None:
    pass


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_clearing_a_registered_root_counts(reshard: Reshard, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for clear in (by_hand, to_zeros_by_hand, of_the_module, of_a_part, nothing):
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
            assert torch.equal(full(param.grad), full(expected.grad)), clear.__name__


@pytest.mark.parametrize("reshard", [None, False])
@on_ranks(2)
def test_a_load_after_an_evaluation_with_gradients_counts(reshard: Reshard) -> None:
    reference, model = two_nets(1, reshard_after_forward=reshard)
    state = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
    loss_of(model)
    model.load_state_dict(state)
    reference.load_state_dict({name: full(value) for name, value in state.items()})
    for one in (model, reference):
        loss_of(one, 1).backward()
    average_gradients(reference.parameters())
    for module in (model, *model.blocks):
        module.reshard()
    assert_parity(model, reference)


# Optimizers that were given unsharded parameters -----------------------------------------------


def filled_by_hand(how: str) -> None:
    _, model = two_nets(1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    if how == "groups":
        loss = loss_of(model)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        loss.backward()
    elif how == "dry run":
        loss_of(model)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        loss_of(model).backward()
    elif how == "unshard":
        model.unshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.reshard()
        loss_of(model).backward()
    else:
        with unsharded(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model).backward()
    optimizer.step()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("how", "num"), [("groups", 4), ("context", 10), ("dry run", 4), ("unshard", 4)]
)
def test_an_optimizer_with_unsharded_parameters_is_refused(
    num_ranks: int, how: str, num: int
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(filled_by_hand, num_ranks, how)
    failure = caught.value.agreed()
    assert failure.type_name == ShardError.__name__
    assert failure.message == (
        f"Expected SGD to have sharded parameters, got {num} unsharded ones, whose changes are "
        "lost; build the optimizer, or fill its groups, of model.parameters() outside of "
        "unsharded(), before a forward or after a backward"
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_within_unsharded_an_optimizer_steps_on_the_copies() -> None:
    """Within unsharded() an optimizer of the copies edits them, and what it edits is written."""
    reference, model = two_nets(1)
    with unsharded(model):
        for one in (model, reference):
            for param in one.parameters():
                param.grad = torch.ones_like(param)
            torch.optim.SGD(one.parameters(), lr=0.5).step()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(param), expected)


def gathers_of_forwards(reshard: Reshard, trainable: bool) -> list[list[str]]:
    """Which groups the second of two forwards gathers before any backward."""
    _, model = two_nets(1, reshard_after_forward=reshard)
    model.requires_grad_(trainable)
    model(own_input())
    with record_events(model, "all_gather") as recorded:
        model(own_input(1))
    return [name for _, name in recorded]


def test_a_second_forward_trusts_only_what_users_said_stays() -> None:
    gathers = functools.partial(run_ranks, gathers_of_forwards, 2)
    assert gathers(False, True) == [[]] * 2
    assert gathers(False, False) == [["", "blocks.0"]] * 2
    assert gathers(None, True) == [["", "blocks.0"]] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_sharded_parts_of_a_plain_module() -> None:
    """Sharded children of a plain module are trees of their own; one is used, one is stepped."""
    model = nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 3)))
    model(own_input()).sum().backward()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [full(param).clone() for param in model.parameters()]
    model[0](own_input())
    optimizer.step()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    for param, was in zip(model.parameters(), before, strict=True):
        expected = was - 0.1 * full(param.grad)
        torch.testing.assert_close(full(param), expected)
    dist.barrier()
