"""``state_dict`` and ``load_state_dict`` themselves: no communication, and torch's own words."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launches import counted
from meshes.compare import whole
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpoint.models import (
    Model,
    State,
    all_ranks,
    assert_equal,
    evaluate,
    is_exact,
    plain_model,
    same_on_all_ranks,
    shard,
    sharded_model,
    structure,
    tensors,
    three_ranks,
    train,
)
from checkpoint.optimizers import INEXACT, OPTIMIZERS, all_optimizers
from composable_shard import (
    CPUOffloadPolicy,
    FSDPModule,
    MaterializationError,
    ShardError,
    StaleParameterError,
    fully_shard,
)
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

TEXTS = {
    name: f"Expected to load parameters of {group} before or after its forward and backward, got "
    "a load_state_dict in the middle of one; load it when that has ended"
    for name, group in {"forward": "group 'outer'", "backward": "the root group"}.items()
}

both_ways = pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])


def evaluate_and_keep(model: nn.Module) -> None:
    """Evaluate; a sharded model then has its sharded parameters registered, whatever it keeps."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(False)
    evaluate(model)
    model.train()
    if isinstance(model, FSDPModule):
        assert all(isinstance(param, DTensor) for param in model.parameters())
        model.set_reshard_after_forward(True)
        model.set_reshard_after_forward(False, recurse=False)


def cut_as(model: nn.Module, state: State) -> State:
    """Return the state with DTensors where the model has them."""
    cut = dict(state)
    for name, tensor in tensors(model.state_dict()).items():
        if isinstance(tensor, DTensor):
            cut[name] = distribute_tensor(state[name], tensor.device_mesh, tensor.placements)
    return cut


# Out ----------------------------------------------------------------------------------------


@all_ranks
@on_ranks("num_ranks")
def test_a_state_dict_is_sharded_and_needs_no_communication() -> None:
    """Take the state before, between and after passes; count what is launched, list events."""
    plain, model = plain_model(0), sharded_model(0)
    optimizers = OPTIMIZERS["adam-foreach"](model)
    plain_optimizers = OPTIMIZERS["adam-foreach"](plain)
    loss = None
    for moment in ("new", "kept", "forward", "backward", "step"):
        if moment == "kept":
            for one in (plain, model):
                evaluate_and_keep(one)
        elif moment == "forward":
            loss, plain_loss = (m(same_on_all_ranks(0)).square().sum() for m in (model, plain))
        elif moment == "backward":
            loss.backward()
            plain_loss.backward()
        elif moment == "step":
            for optimizer in (*optimizers, *plain_optimizers):
                optimizer.step()
        with counted() as launched, record_events(model) as events:
            state = model.state_dict()
            kept = model.state_dict(keep_vars=True)
            below = model.outer.state_dict(prefix="outer.")
        assert launched == []
        assert events == []  # what is unsharded stays so, for other ranks may still count on it
        assert list(state) == list(plain.state_dict())
        for name, tensor in tensors(below).items():
            assert_equal(tensor, state[name], name, exact=True)
        for name, param in model.named_parameters():
            assert kept[name] is param
            assert isinstance(state[name], DTensor) and not state[name].requires_grad
            assert state[name].placements == param.placements
        assert_equal(state, plain.state_dict(), moment, exact=is_exact())


@three_ranks
@on_ranks("num_ranks")
def test_a_state_that_is_held_follows_the_model() -> None:
    plain, model = plain_model(0), sharded_model(0)
    states = []
    for one in (plain, model):
        optimizers = OPTIMIZERS["adam-foreach"](one)
        train(one, optimizers, 0, 1)
        state = one.state_dict()
        train(one, optimizers, 1, 3)
        assert_equal(state, one.state_dict())
        states.append(state)
    assert_equal(states[1], states[0], exact=is_exact())
    for state in states:
        state["wide.weight"].zero_()
    assert torch.equal(full(model.wide.weight).detach(), torch.zeros(6, 7, dtype=torch.float64))
    plain.eval()
    assert torch.equal(evaluate(model), plain(same_on_all_ranks(0))) or not is_exact()


# In -----------------------------------------------------------------------------------------


def loaded(kind: str, assign: bool, moment: str) -> None:
    """Load another model's values at any moment between passes; train both on."""
    model, other = sharded_model(0), plain_model(1)
    state = {name: t.clone() for name, t in tensors(other.state_dict()).items()}
    state["_extra_state"] = 3
    if kind == "sharded":
        state = cut_as(model, state)
    if moment == "trained":
        train(model, OPTIMIZERS["adam-foreach"](model), 0, 2)
    elif moment == "kept":
        evaluate_and_keep(model)
    with counted() as launched, record_events(model) as events:
        result = model.load_state_dict(state, assign=assign)
    assert launched == []
    assert events == []  # an evaluation has freed what it gathered, whatever is set
    assert result.missing_keys == result.unexpected_keys == []
    assert model.epochs == 3 and model.head.weight is model.tied.weight
    other.epochs = 3
    assert_equal(model.state_dict(), other.state_dict())
    optimizers = [OPTIMIZERS["adam-foreach"](one) for one in (model, other)]
    for one, optimizer in zip((model, other), optimizers, strict=True):
        train(one, optimizer, 0, 2)
    assert_equal(model.state_dict(), other.state_dict(), exact=is_exact())
    assert torch.equal(evaluate(model), evaluate(other)) or not is_exact()


@pytest.mark.brief(2)
@all_ranks
@both_ways
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_load_state_dict(num_ranks: int, assign: bool, kind: str) -> None:
    for moment in ("new", "kept", "trained"):
        run_ranks(loaded, num_ranks, kind, assign, moment)


@both_ways
@on_ranks(2)
def test_what_does_not_fit_is_said_as_torch_says_it(assign: bool) -> None:
    changes: list[Callable[[State], object]] = [
        lambda state: state.pop("first.weight"),
        lambda state: state.update(other=torch.ones(1)),
        lambda state: state.update({"first.weight": torch.ones(6, 5)}),
        lambda state: state.update({"first.weight": torch.ones(6)}),
        lambda state: state.update({"first.weight": "six by four"}),
        lambda state: (state.pop("tied.weight"), state.update({"scale": torch.ones(2)})),
    ]
    texts = []
    for change in changes:
        pair = []
        for model in (plain_model(0), sharded_model(0)):
            state = plain_model(1).state_dict()
            change(state)
            with pytest.raises(RuntimeError) as caught:
                model.load_state_dict(state, assign=assign)
            pair.append(str(caught.value))
        assert pair[1] == pair[0].replace("for Model:", "for FSDPModel:")
        texts.append(pair[1].split("\n\t", 1)[1])
    assert texts[0] == 'Missing key(s) in state_dict: "first.weight". '
    assert texts[1] == 'Unexpected key(s) in state_dict: "other". '
    plain, model, state = plain_model(0), sharded_model(0), plain_model(1).state_dict()
    del state["first.weight"]
    state["other"] = torch.ones(1)
    keys = [m.load_state_dict(dict(state), strict=False, assign=assign) for m in (plain, model)]
    assert keys[0] == keys[1]
    assert keys[1].missing_keys == ["first.weight"] and keys[1].unexpected_keys == ["other"]
    assert_equal(model.state_dict(), plain.state_dict())


@both_ways
@pytest.mark.parametrize("name", ["tied.weight", "head.weight"])
@on_ranks(2)
def test_one_name_of_a_tied_weight_is_enough(name: str, assign: bool) -> None:
    model = sharded_model(0)
    value = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    for state in ({name: value}, {name: 2 * value}):
        model.load_state_dict(state, strict=False, assign=assign)
        for _ in range(2):
            assert model.tied.weight is model.head.weight
            assert_equal(model.tied.weight.detach(), state[name])
            evaluate(model)
            model.reshard()


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2)
def test_dtypes(kind: str) -> None:
    """Copying keeps the parameter's dtype, assigning takes that of the state."""
    for assign in (False, True):
        model, other = sharded_model(0), plain_model(1)
        evaluate(model)
        state = {name: t.float() for name, t in tensors(other.state_dict()).items()}
        other.load_state_dict(dict(state), assign=assign, strict=False)
        if kind == "sharded":
            state = cut_as(model, state)
        model.load_state_dict(state, assign=assign, strict=False)
        expected = torch.float32 if assign else torch.float64
        assert {p.dtype for p in model.parameters()} == {expected}
        assert_equal(tensors(model.state_dict()), tensors(other.state_dict()))
        x = same_on_all_ranks(0).to(expected)
        assert torch.equal(model.eval()(x), other.eval()(x))
        model.reshard()
        assert {p.dtype for p in model.parameters()} == {expected}


@both_ways
@on_ranks(2)
def test_dtensors_of_other_placements(assign: bool) -> None:
    """DTensors cut in another way become what the parameter is; on another mesh they are told."""
    model, other = sharded_model(0), plain_model(1)
    mesh = model.wide.weight.device_mesh
    state = tensors(other.state_dict())
    for name in dict(model.named_parameters(remove_duplicate=False)):
        placement = Replicate() if state[name].ndim == 1 else Shard(1 - ("wide" in name))
        state[name] = distribute_tensor(state[name], mesh, [placement])
    model.load_state_dict(state, assign=assign, strict=False)
    assert_equal(tensors(model.state_dict()), tensors(other.state_dict()))
    assert model.wide.weight.placements == (Shard(1),)
    assert model.first.weight.placements == (Shard(0),)
    assert torch.equal(evaluate(model), evaluate(other))
    names = ("a", "b")
    other_mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=names)
    weight = distribute_tensor(other.first.weight.detach(), other_mesh, [Replicate(), Shard(0)])
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({"first.weight": weight}, assign=assign, strict=False)
    assert str(caught.value) == (
        'Error(s) in loading state_dict for FSDPModel:\n\tExpected a DTensor for "first.weight" '
        f"on {mesh}, got one on {other_mesh}; pass its full_tensor()."
    )


def onto_meta(assign: bool, emptied: bool, kind: str) -> list[str]:
    """Load into a model without memory, or with memory that holds nothing yet."""
    other = plain_model(1)
    with torch.device("meta"):
        model = shard(Model(7))
    if emptied:
        model.to_empty(device="cpu")
    for name, buffer in model.outer.norm._buffers.items():
        model.outer.norm._buffers[name] = torch.ones_like(buffer, device="cpu")
    model.outer._buffers["scratch"] = torch.ones(2)
    state = {name: t.clone() for name, t in tensors(other.state_dict()).items()}
    if kind == "sharded":
        state = cut_as(model, state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_state_dict(state, assign=assign, strict=False)
    if assign or emptied:
        assert_equal(tensors(model.state_dict()), tensors(other.state_dict()))
        assert model.head.weight is model.tied.weight
        train(model, OPTIMIZERS["adam-foreach"](model), 0, 2)
        train(other, OPTIMIZERS["adam-foreach"](other), 0, 2)
        assert_equal(model.state_dict(), other.state_dict(), exact=is_exact())
    else:
        with pytest.raises(MaterializationError):
            evaluate(model)
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_from_the_meta_device(num_ranks: int, kind: str) -> None:
    for assign, emptied in ((True, False), (False, True), (True, True)):
        assert run_ranks(onto_meta, num_ranks, assign, emptied, kind) == [[]] * num_ranks
    for said_of in run_ranks(onto_meta, num_ranks, False, False, kind):
        assert len(said_of) == len(list(Model().named_parameters(remove_duplicate=False)))
        assert all("copying from a non-meta parameter" in text for text in said_of)


# In the middle ------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize(("num_ranks", "reshard_after_forward"), [(1, False), (2, True)])
@on_ranks("num_ranks")
def test_loading_between_forward_and_backward(assign: bool, reshard_after_forward: bool) -> None:
    """Load after a forward whose backward is to come: the gradients would be of no function."""
    model = sharded_model(0, reshard_after_forward=reshard_after_forward)
    loss = model(same_on_all_ranks(0)).square().sum()
    model.load_state_dict(plain_model(1).state_dict(), assign=assign)
    with pytest.raises(
        StaleParameterError, match="Expected the parameters of the root group in backward"
    ):
        loss.backward()


@pytest.mark.parametrize(("num_ranks", "when"), [(1, "forward"), (2, "forward"), (2, "backward")])
@on_ranks("num_ranks")
def test_loading_in_the_middle_is_refused(when: str) -> None:
    model, plain = sharded_model(0), plain_model(0)
    state = plain_model(1).state_dict()
    if when == "forward":
        part, prefix = model.outer, "outer."
        part.norm.register_forward_hook(lambda *_: part.load_state_dict(own(state, prefix)))
        with pytest.raises(ShardError) as caught:
            model(same_on_all_ranks(0))
        part.norm._forward_hooks.clear()
    else:
        out = model(same_on_all_ranks(0))
        out.register_hook(lambda _: model.load_state_dict(state))
        with pytest.raises(ShardError) as caught:
            out.square().sum().backward()
    assert str(caught.value) == TEXTS[when]
    # Nothing was loaded, and the next step is an ordinary one.
    model.zero_grad()
    assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    model.load_state_dict(plain.state_dict())
    for one in (model, plain):
        train(one, OPTIMIZERS["adam-foreach"](one), 0, 1)
    assert_equal(model.state_dict(), plain.state_dict())


def own(state: State, prefix: str) -> State:
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


@on_ranks(2)
def test_loading_a_group_before_its_forward() -> None:
    """Load a group in the forward of another, before its own: what it computes with is new."""
    model, other = sharded_model(0), plain_model(1)
    inner = model.outer.inner
    state = own(other.state_dict(), "outer.inner.")
    expected = plain_model(0)
    expected.outer.inner.load_state_dict(state)
    model.register_forward_pre_hook(lambda *_: inner.load_state_dict(state) and None)
    for _ in range(2):  # in the second forward the group has been gathered ahead
        assert torch.equal(evaluate(model), evaluate(expected))


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2)
def test_parameters_that_are_swapped(kind: str) -> None:
    """``torch.__future__.set_swap_module_params_on_conversion`` exchanges what a parameter is."""
    model, other = sharded_model(0), plain_model(1)
    state = tensors(other.state_dict())
    if kind == "sharded":
        state = cut_as(model, state)
    params = dict(model.named_parameters())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state, strict=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(param is params[name] for name, param in model.named_parameters())
    assert_equal(tensors(model.state_dict()), tensors(other.state_dict()))
    assert torch.equal(evaluate(model), evaluate(other))


def optimizers_alone(make: str) -> None:
    """``Optimizer.state_dict`` and ``load_state_dict`` are as those of torch's sharded model."""
    states = []
    for sharder in (None, torch_fully_shard, fully_shard):
        torch.manual_seed(0)
        model = Model()
        if sharder is not None:
            shard(model, sharder)
        optimizers = OPTIMIZERS[make](model)
        train(model, optimizers, 0, 2)
        states.append([optimizer.state_dict() for optimizer in optimizers])
    plain, theirs, ours = states
    exact = is_exact() and make not in INEXACT
    assert structure(ours) == structure(theirs)
    assert_equal(ours, plain, exact=exact)
    torch.manual_seed(0)
    target = shard(Model())
    target.load_state_dict(model.state_dict())
    target_optimizers = OPTIMIZERS[make](target)
    for optimizer, state in zip(target_optimizers, copy.deepcopy(ours), strict=True):
        optimizer.load_state_dict(state)
    assert_equal([optimizer.state_dict() for optimizer in target_optimizers], ours)
    for one, its_optimizers in ((model, optimizers), (target, target_optimizers)):
        train(one, its_optimizers, 2, 4)
    assert_equal(target.state_dict(), model.state_dict())


@pytest.mark.brief(2)
@all_optimizers
def test_optimizers(make: str) -> None:
    run_ranks(optimizers_alone, 2, make)
    run_ranks(optimizers_alone, 3, make)


@both_ways
@on_ranks(2)
def test_channels_last_and_offloaded(assign: bool) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Conv2d(5, 4, 2))
        models.append(model.to(memory_format=torch.channels_last))
    model, other = models
    expected = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    fully_shard(model[0])
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for state in (expected, {name: t.contiguous() for name, t in expected.items()}):
        model.load_state_dict(state, assign=assign)
        assert_equal(model.state_dict(), expected)
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(x), other(x))
        assert_equal(model.state_dict(), expected)
        sharded = model.state_dict()
        model.load_state_dict(sharded, assign=assign)
        assert_equal(model.state_dict(), expected)
        torch.testing.assert_close(model(x), other(x))


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_full_tensors_are_not_shared() -> None:
    for assign in (False, True):
        model, state = sharded_model(0), plain_model(1).state_dict()
        expected = copy.deepcopy(state)
        model.load_state_dict(state, assign=assign)
        for name, param in model.named_parameters():
            state[name].zero_()
            assert_equal(param.detach(), expected[name], name)
            with torch.no_grad():
                param.fill_(7.0)
            assert not state[name].any(), name


@on_ranks(2)
def test_after_an_interrupt() -> None:
    states = []
    for one in (plain_model(0), sharded_model(0)):
        optimizers = OPTIMIZERS["adam-foreach"](one)
        train(one, optimizers, 0, 1)
        with (
            mock.patch.object(one.outer.inner.down, "forward", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            one(same_on_all_ranks(1))
        states.append(get_state_dict(one, optimizers))
    assert_equal(states[1], states[0])


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_the_state_of_a_copied_model() -> None:
    model, other = sharded_model(0), plain_model(1)
    before, expected = model.state_dict(), evaluate(model)
    evaluate_and_keep(model)
    copied = copy.deepcopy(model)
    with record_events(model) as events:
        copied.load_state_dict(other.state_dict())
        state = copied.state_dict()
    assert events == []
    evaluate(copied)
    for name, value in tensors(other.state_dict()).items():
        assert_equal(state[name], value, name)
    for name, param in plain_model(0).named_parameters():
        assert_equal(model.state_dict()[name], param, name)
    # Averaged weights are put in for an evaluation, and the trained ones back, by assignment.
    values = {name: full(t).clone() for name, t in tensors(before).items()}
    for state, output in ((other.state_dict(), evaluate(other)), (before, expected)):
        model.load_state_dict(state, assign=True)
        assert torch.equal(evaluate(model), output)
    assert_equal(tensors(model.state_dict()), values)


# States that one rank takes alone, and those of scalars -------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_rank_may_take_its_state_alone(reshard: bool) -> None:
    model: Any = fully_shard(nn.Linear(4, 4), reshard_after_forward=reshard)
    with record_events(model, "all_gather") as gathers:
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(1, 4))
            if dist.get_rank() == 0:
                assert all(isinstance(value, DTensor) for value in model.state_dict().values())
                assert all(isinstance(param, DTensor) for param in model.parameters())
            output = model(torch.ones(1, 4))
            if dist.get_rank() == 0:
                model.state_dict()
            output.sum().backward()
    model.reshard()
    counts = [0, 0]
    dist.all_gather_object(counts, len(gathers))
    assert counts[0] == counts[1]
    assert torch.equal(whole(model.weight.grad), torch.full((4, 4), 2.0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_a_scalar_may_come_as_one_element(assign: bool) -> None:
    plain, model = Scaled(), fully_shard(Scaled())
    rest = {
        name: value.clone() for name, value in plain.linear.state_dict(prefix="linear.").items()
    }
    for scale in (torch.tensor([3.0]), torch.tensor(4.0)):
        for one in (plain, model):
            one.load_state_dict({**rest, "scale": scale}, assign=assign and one is model)
        assert whole(model.scale.detach()).item() == plain.scale.item()
        assert torch.equal(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_the_full_optimizer_state_of_a_scalar_is_loaded() -> None:
    torch.manual_seed(0)
    model = fully_shard(Scaled())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(one: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).square().sum().backward()
        one.step()
        one.zero_grad()

    step(optimizer)
    options = StateDictOptions(full_state_dict=True)
    model.reshard()
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    before = [whole(param.detach()).clone() for param in model.parameters()]
    step(optimizer)
    model.reshard()
    wanted = [whole(param.detach()).clone() for param in model.parameters()]
    with torch.no_grad():
        for param, value in zip(model.parameters(), before, strict=True):
            local = value.chunk(dist.get_world_size())[dist.get_rank()] if value.ndim else value
            param.to_local().copy_(local)  # type: ignore[attr-defined]
    other = torch.optim.Adam(model.parameters(), lr=0.1)
    set_optimizer_state_dict(model, other, state, options=options)
    step(other)
    model.reshard()
    got = [whole(param.detach()) for param in model.parameters()]
    assert [torch.equal(a, b) for a, b in zip(got, wanted, strict=True)] == [True] * 3
