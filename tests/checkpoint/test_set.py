"""``set_model_state_dict`` and its kin: what comes back is what was saved, on any option."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch_versions import needs_newer_torch

from checkpoint.models import (
    Model,
    State,
    all_ranks,
    assert_equal,
    is_exact,
    shard,
    structure,
    three_models,
    three_ranks,
    train,
)
from checkpoint.optimizers import INEXACT, OPTIMIZERS, all_optimizers
from composable_shard import fully_shard
from composable_shard.testing import run_ranks

FULL = {"full_state_dict": True}
FROM_RANK_0 = {**FULL, "broadcast_from_rank0": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": FULL,
    "rank-0": FROM_RANK_0,
    "rank-0-cpu": {**FROM_RANK_0, "cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "full-flat": {**FULL, "flatten_optimizer_state_dict": True},
    "rank-0-flat": {**FROM_RANK_0, "flatten_optimizer_state_dict": True},
}


def source(sharder: Callable[..., Any] | None, make: str, columns: int = 6) -> Any:
    """Return a model that was trained for two steps, and its optimizers."""
    torch.manual_seed(1)
    model = Model(columns)
    model.epochs = 4
    if sharder is not None:
        shard(model, sharder)
    optimizers = OPTIMIZERS[make](model)
    train(model, optimizers, 0, 2)
    return model, optimizers


def other(sharder: Callable[..., Any], make: str, columns: int = 6) -> Any:
    """Return a model of other values, and optimizers that have not stepped."""
    torch.manual_seed(2)
    model = shard(Model(columns), sharder)
    return model, OPTIMIZERS[make](model)


def heard(state: Any, options: dict[str, Any]) -> Any:
    """Return what this rank has read of the checkpoint."""
    return {} if options.get("broadcast_from_rank0") and dist.get_rank() else state


def restore(make: str, options: dict[str, Any], columns: int) -> Any:
    """Take the state of one model to another, in one call and in two; return both models' parts."""
    for at_once in (True, False):
        if at_once and options.get("broadcast_from_rank0"):
            continue  # torch: rank 1, whose model state is empty, leaves the model out
        states = get_state_dict(
            *source(fully_shard, make, columns),
            options=StateDictOptions(
                full_state_dict=options.get("full_state_dict", False),
                flatten_optimizer_state_dict=options.get("flatten_optimizer_state_dict", False),
            ),
        )
        model_state, optimizer_state = (heard(state, options) for state in states)
        model, optimizers = other(fully_shard, make, columns)
        # torch cannot load a flat full state when it is told that it is flat; it sees that itself
        told = {key: on for key, on in options.items() if "flat" not in key}
        chosen = StateDictOptions(**told)
        if at_once:
            set_state_dict(
                model,
                optimizers,
                model_state_dict=model_state,
                optim_state_dict=optimizer_state,
                options=chosen,
            )
        else:
            set_model_state_dict(model, model_state, options=chosen)
            set_optimizer_state_dict(model, optimizers, optimizer_state, options=chosen)
        yield model, optimizers


def restored(make: str, options: dict[str, Any], columns: int) -> None:
    exact = is_exact() and make not in INEXACT
    plain, plain_optimizers = source(None, make, columns)
    expected = get_state_dict(plain, plain_optimizers)
    for model, optimizers in restore(make, options, columns):
        got = get_state_dict(model, optimizers)
        assert_equal(got, expected, exact=exact)
        assert model.epochs == 4
        for param in model.parameters():
            for optimizer in optimizers:
                for value in optimizer.state.get(param, {}).values():
                    is_moment = isinstance(value, torch.Tensor) and value.ndim > 0
                    assert not is_moment or value.placements == param.placements
        train(model, optimizers, 2, 4)
    train(plain, plain_optimizers, 2, 4)
    trained = get_state_dict(plain, plain_optimizers)
    assert_equal(get_state_dict(model, optimizers), trained, exact=exact)


@pytest.mark.brief(4)
@all_ranks
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_options(num_ranks: int, options: dict[str, Any]) -> None:
    run_ranks(restored, num_ranks, "adam-foreach", options, 6)


@pytest.mark.brief(2)
@pytest.mark.parametrize("num_ranks", [1, 3])
@all_optimizers
def test_optimizers(num_ranks: int, make: str) -> None:
    # torch cannot spread the full state of an optimizer without state: it has no device
    full_too = ("sharded", "full", "rank-0-flat")
    options = ("sharded",) if make == "sgd-without-state" else full_too
    for option in options:
        run_ranks(restored, num_ranks, make, OPTIONS[option], 6)


@pytest.mark.brief(1)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_uneven_columns(num_ranks: int) -> None:
    for option in ("sharded", "full"):
        run_ranks(restored, num_ranks, "groups", OPTIONS[option], 7)


@needs_newer_torch("a gathered tensor of uneven columns has strides that broadcasting overlooks")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_uneven_columns_from_rank_0(num_ranks: int) -> None:
    run_ranks(restored, num_ranks, "groups", OPTIONS["rank-0"], 7)


FROZEN = "outer.inner.up.weight"


def not_strict(options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Load a state that lacks the frozen weight and has one too many, into ours and torch's."""
    torch.manual_seed(1)
    state = Model().state_dict()
    state["extra"] = state.pop(FROZEN)
    found = []
    for sharder in (torch_fully_shard, fully_shard):
        model, _ = other(sharder, "adam-foreach")
        before = full(model.get_parameter(FROZEN)).detach().clone()
        chosen = StateDictOptions(**options, strict=False)
        keys = set_model_state_dict(model, heard(dict(state), options), options=chosen)
        found.append((keys.missing_keys, keys.unexpected_keys))
        assert torch.equal(full(model.get_parameter(FROZEN)), before)
        assert torch.equal(full(model.wide.weight), state["wide.weight"])
    assert found[0] == found[1]
    return found[1]


@three_ranks
def test_not_strict(num_ranks: int) -> None:
    # With full states torch fills in what is missing from the model, so nothing is.
    for first, *others in (run_ranks(not_strict, num_ranks, FULL),):
        assert [first, *others] == [([], ["extra"])] * num_ranks
    first, *others = run_ranks(not_strict, num_ranks, FROM_RANK_0)
    assert first == ([], ["extra"]) and others == [([], [])] * (num_ranks - 1)


@three_ranks
@pytest.mark.parametrize("options", [{}, FULL], ids=["sharded", "full"])
@on_ranks("num_ranks")
def test_without_frozen_parameters(options: dict[str, Any]) -> None:
    """A state without what is frozen is enough for a model that has it already."""
    model, _ = source(fully_shard, "adam-foreach")
    how = StateDictOptions(ignore_frozen_params=True, **options)
    state = get_model_state_dict(model, options=how)
    target, _ = other(fully_shard, "adam-foreach")
    before = full(target.get_parameter(FROZEN)).detach().clone()
    keys = set_model_state_dict(
        target, state, options=StateDictOptions(strict=False, ignore_frozen_params=True, **options)
    )
    assert keys.missing_keys == ([] if options else [FROZEN]) and keys.unexpected_keys == []
    expected = {**model.state_dict(), FROZEN: before}
    assert_equal(target.state_dict(), expected)


@three_ranks
@pytest.mark.parametrize("options", [FULL, FROM_RANK_0], ids=["full", "rank-0"])
@on_ranks("num_ranks")
def test_a_model_on_the_meta_device(options: dict[str, Any]) -> None:
    plain, plain_optimizers = source(None, "adam-foreach")
    expected = get_state_dict(plain, plain_optimizers)
    states = copy.deepcopy(expected)  # assigned buffers and step counts would be shared
    with torch.device("meta"):
        model = shard(Model())
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = torch.ones(
            buffer.shape, dtype=buffer.dtype
        )
    chosen = StateDictOptions(**options)
    set_model_state_dict(model, heard(states[0], options), options=chosen)
    assert_equal(get_model_state_dict(model), expected[0])
    assert model.head.weight is model.tied.weight
    optimizers = OPTIMIZERS["adam-foreach"](model)
    set_optimizer_state_dict(model, optimizers, heard(states[1], options), options=chosen)
    assert_equal(get_optimizer_state_dict(model, optimizers), expected[1])
    train(model, optimizers, 2, 4)
    train(plain, plain_optimizers, 2, 4)
    assert_equal(get_model_state_dict(model), get_model_state_dict(plain), exact=is_exact())


class Tokens(nn.Module):
    """An embedding that saves itself without the name that it has here."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.added = nn.Embedding(3, 4)
        self.register_state_dict_post_hook(_leave_name_out)
        self.register_load_state_dict_pre_hook(_put_name_in)

    def names(self) -> dict[str, str]:
        return {"weight": "embedding"}

    _fqn_modifiers = names


def _leave_name_out(module: nn.Module, state: State, prefix: str, *_: object) -> None:
    state[f"{prefix}weight"] = state.pop(f"{prefix}embedding.weight")


def _put_name_in(module: nn.Module, state: State, prefix: str, *_: object) -> None:
    state[f"{prefix}embedding.weight"] = state.pop(f"{prefix}weight")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("method", ["_fqn_modifiers", "names"])
@pytest.mark.parametrize("options", [FULL, FROM_RANK_0], ids=["full", "rank-0"])
@on_ranks("num_ranks")
def test_modules_that_rename_their_state(options: dict[str, Any], method: str) -> None:
    chosen = StateDictOptions(**options, dsd_fqn_modifiers=method)
    states = []
    for sharder in (torch_fully_shard, fully_shard):
        torch.manual_seed(3)
        model = nn.Sequential()
        model.tokens, model.out = Tokens(), nn.Linear(4, 2)
        sharder(model.tokens.embedding)
        sharder(model.out)
        before = get_model_state_dict(model)
        state = {name: full(tensor).detach() + 1 for name, tensor in before.items()}
        set_model_state_dict(model, heard(dict(state), options), options=chosen)
        assert_equal(dict(get_model_state_dict(model)), state)
        states.append(get_model_state_dict(model))
    assert structure(states[0]) == structure(states[1])
    assert list(states[1]) == ["tokens.added.weight", "tokens.weight", "out.weight", "out.bias"]


@three_ranks
@pytest.mark.parametrize("keep_prefixes", [False, True])
@on_ranks("num_ranks")
def test_submodules(keep_prefixes: bool) -> None:
    model, _ = source(fully_shard, "adam-foreach")
    target, _ = other(fully_shard, "adam-foreach")
    before = {name: full(t).clone() for name, t in target.state_dict().items() if name != EXTRA}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        state: Any = get_model_state_dict(
            model,
            submodules={model.outer.inner},
            options=StateDictOptions(keep_submodule_prefixes=keep_prefixes),
        )
        if not keep_prefixes:
            state = {target.outer.inner: state}
        set_model_state_dict(target, state, options=StateDictOptions(strict=False))
    source_state = model.state_dict()
    for name, tensor in target.state_dict().items():
        if name != EXTRA:
            from_source = name.startswith("outer.inner.")
            assert_equal(tensor, source_state[name] if from_source else before[name], name)


EXTRA = "_extra_state"


GOT_BY: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "cpu": {"cpu_offload": True},
    "full-cpu": {"full_state_dict": True, "cpu_offload": True},
    "without-frozen": {"ignore_frozen_params": True},
    "full-without-frozen": {"full_state_dict": True, "ignore_frozen_params": True},
    "not-strict": {"strict": False},
    "flat": {"flatten_optimizer_state_dict": True},
    "full-flat": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "full-cpu-flat": {
        "full_state_dict": True,
        "cpu_offload": True,
        "flatten_optimizer_state_dict": True,
    },
}


def dtensors(state: Any) -> list[DTensor]:
    if isinstance(state, dict):
        return [one for value in state.values() for one in dtensors(value)]
    return [state] if isinstance(state, DTensor) else []


@all_ranks
@pytest.mark.parametrize("options", GOT_BY.values(), ids=list(GOT_BY))
@on_ranks("num_ranks")
def test_options_of_getting(options: dict[str, Any]) -> None:
    states = []
    for model in three_models():
        optimizers = OPTIMIZERS["adam-foreach"](model)
        train(model, optimizers, 0, 2)
        chosen = StateDictOptions(**options)
        both = get_state_dict(model, optimizers, options=chosen)
        model_state = get_model_state_dict(model, options=chosen)
        optimizer_state = get_optimizer_state_dict(model, optimizers, options=chosen)
        assert_equal(both, (model_state, optimizer_state))
        states.append(both)
    plain, ours, theirs = states
    assert structure(ours) == structure(theirs)
    assert_equal(ours, theirs, exact=is_exact())
    assert_equal(ours, plain, exact=is_exact())
    is_full = options.get("full_state_dict", False)
    if is_full and options.get("cpu_offload") and dist.get_rank() > 0:
        assert ours == ({}, {})
        return
    assert bool(dtensors(ours[0])) == bool(dtensors(ours[1])) != is_full
    assert (FROZEN in ours[0]) != options.get("ignore_frozen_params", False)


@three_ranks
@pytest.mark.parametrize("full_state", [False, True])
@on_ranks("num_ranks")
def test_submodules_alone(full_state: bool) -> None:
    for keep in (False, True):
        options = StateDictOptions(keep_submodule_prefixes=keep, full_state_dict=full_state)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Getting submodules only", FutureWarning)
            plain, ours, theirs = (
                get_model_state_dict(model, submodules={model.outer.inner}, options=options)
                for model in three_models()
            )
        assert structure(ours) == structure(theirs)
        assert_equal(ours, plain)
        names = ("up.weight", "up.bias", "down.weight", "down.bias", "gate.weight")
        assert list(ours) == [f"outer.inner.{name}" if keep else name for name in names]
