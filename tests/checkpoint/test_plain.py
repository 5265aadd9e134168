"""``state_dict`` and ``load_state_dict`` themselves: no communication, and torch's own words."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import counted
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrizations import weight_norm

from checkpoint.models import (
    OPTIMIZERS,
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
    tensors,
    train,
)
from composable_shard import (
    FSDPModule,
    MaterializationError,
    ShardError,
    StaleParameterError,
    fully_shard,
)
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

TEXTS = {
    name: f"Expected load_state_dict of {group} outside of its forward and backward, got a call "
    "during one; call it before or after them"
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
    optimizers = OPTIMIZERS["adam"](model)
    plain_optimizers = OPTIMIZERS["adam"](plain)
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


# In -----------------------------------------------------------------------------------------


def loaded(kind: str, assign: bool, moment: str) -> None:
    """Load another model's values at any moment between passes; train both on."""
    model, other = sharded_model(0), plain_model(1)
    state = {name: t.clone() for name, t in tensors(other.state_dict()).items()}
    state["_extra_state"] = 3
    if kind == "sharded":
        state = cut_as(model, state)
    if moment == "trained":
        train(model, OPTIMIZERS["adam"](model), 0, 2)
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
    optimizers = [OPTIMIZERS["adam"](one) for one in (model, other)]
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
        lambda state: state.update({"first.weight": torch.ones(6, 5)}),
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


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("num_ranks", [1, 3])
@on_ranks("num_ranks")
def test_from_the_meta_device(kind: str) -> None:
    """Load into a model without memory, or with memory that holds nothing yet."""
    for assign, emptied in ((True, False), (False, True), (True, True), (False, False)):
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
        said = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
        if not assign and not emptied:
            assert len(said) == len(list(model.named_parameters(remove_duplicate=False)))
            assert all("copying from a non-meta parameter" in text for text in said)
            with pytest.raises(MaterializationError):
                evaluate(model)
            continue
        assert said == []
        assert_equal(tensors(model.state_dict()), tensors(other.state_dict()))
        assert model.head.weight is model.tied.weight
        train(model, OPTIMIZERS["adam"](model), 0, 2)
        train(other, OPTIMIZERS["adam"](other), 0, 2)
        assert_equal(model.state_dict(), other.state_dict(), exact=is_exact())


# In the middle ------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize(("num_ranks", "reshard_after_forward"), [(1, False), (2, True)])
@on_ranks("num_ranks")
def test_loading_between_forward_and_backward(assign: bool, reshard_after_forward: bool) -> None:
    """Load after a forward whose backward is to come: the gradients would be of no function."""
    model = sharded_model(0, reshard_after_forward=reshard_after_forward)
    loss = model(same_on_all_ranks(0)).square().sum()
    model.load_state_dict(plain_model(1).state_dict(), assign=assign)
    error, said = RuntimeError, "modified by an inplace operation"
    if assign:
        error, said = StaleParameterError, "Expected the parameters of the root group in backward"
    with pytest.raises(error, match=said):
        loss.backward()


@on_ranks(2)
def test_a_graph_of_before_a_load_is_refused_once_another_forward_has_run() -> None:
    model = fully_shard(torch.nn.Linear(4, 1, bias=False))
    loss = model(torch.ones(1, 4)).sum()
    model.load_state_dict({"weight": torch.ones(1, 4)}, assign=True)
    model(torch.ones(1, 4))
    with pytest.raises(StaleParameterError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "Expected no change of parameters between a forward and its backward, got 'weight' "
        "replaced by a load or a conversion in between; run backward before replacing them"
    )


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
        train(one, OPTIMIZERS["adam"](one), 0, 1)
    assert_equal(model.state_dict(), plain.state_dict())


def own(state: State, prefix: str) -> State:
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


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
    assert torch.equal(full(model.weight.grad), torch.full((4, 4), 2.0))


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_the_full_optimizer_state_of_a_scalar_is_loaded() -> None:
    options = StateDictOptions(full_state_dict=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU())
    model[1].weight = nn.Parameter(torch.tensor(1.5))
    model = fully_shard(model)
    first, second = (torch.optim.Adam(model.parameters(), lr=0.1) for _ in range(2))

    def step(optimizer: torch.optim.Optimizer) -> list[float]:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [value for param in model.parameters() for value in full(param).flatten().tolist()]

    step(first)
    state = copy.deepcopy(get_optimizer_state_dict(model, first, options=options))
    values = copy.deepcopy(model.state_dict())
    wanted = step(first)
    model.load_state_dict(values)
    set_optimizer_state_dict(model, second, state, options=options)
    assert step(second) == wanted


# In hooks, and by parametrizations ---------------------------------------------------------------


@pytest.mark.brief(1)
@all_ranks
@on_ranks("num_ranks")
def test_within_compute() -> None:
    """Take the state in every hook of a step: it is sharded, and the step goes on as it was."""
    plain, model, quiet = plain_model(0), sharded_model(0), sharded_model(0)
    values = plain.state_dict()
    seen: list[tuple[str, State]] = []
    launched: list[str] = []

    def look(where: str) -> Any:
        def hook(*_: object) -> None:
            with counted() as here:
                registered = {id(param) for param in model.parameters()}
                seen.append((where, model.state_dict()))
                seen.append((where, model.outer.inner.state_dict(prefix="outer.inner.")))
                assert registered == {id(param) for param in model.parameters()}
            launched.extend(here)

        return hook

    for where in ("outer", "outer.inner", "outer.inner.up", "wide", "head"):
        part = model.get_submodule(where)
        part.register_forward_pre_hook(look(f"before {where}"))
        part.register_forward_hook(look(f"after {where}"))
        part.register_full_backward_hook(look(f"backward of {where}"))
    # A look takes what it finds: what is gathered, freed and reduced is what it would be without.
    # But hooks of backward have nodes of their own, which autograd comes to first.
    recorded = []
    for one in (quiet, model):
        with record_events(one) as events:
            for step in range(3):
                one(same_on_all_ranks(step)).square().sum().backward()
        recorded.append([event for event in events if event[0] != "pre_backward"])
    assert recorded[0] == recorded[1]
    assert launched == []
    assert len(seen) == 2 * 3 * 15
    for where, state in seen:
        for name, tensor in state.items():
            if name in dict(plain.named_parameters(remove_duplicate=False)):
                assert isinstance(tensor, DTensor) and tensor.to_local().is_contiguous(), where
                assert_equal(tensor, values[name], f"{where}: {name}")
    for one in (quiet, model):
        OPTIMIZERS["adam"](one)[0].step()
    assert_equal(model.state_dict(), quiet.state_dict())


@on_ranks(2)
def test_parametrizations() -> None:
    models = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(weight_norm(nn.Linear(3, 5)), nn.Linear(5, 2))
        if sharded:
            fully_shard(model[0])
            fully_shard(model)
        models.append(model)
    plain, model = models
    state = {name: t.clone() + 1 for name, t in plain.state_dict().items()}
    for one in models:
        one.load_state_dict(state)
    assert_equal(model.state_dict(), plain.state_dict())
    assert_equal(get_model_state_dict(model), get_model_state_dict(plain))
    set_model_state_dict(model, get_model_state_dict(model))
    x = torch.ones(2, 3)
    assert torch.equal(model(x), plain(x))
