"""Full parameters for a while: what they are, where edits go, what is left behind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nets import Net, assert_parity, assert_trains_alike, full, own_input, train_step, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import two_tensor_hooks, two_tensor_mlp

from composable_shard import MixedPrecisionPolicy, ShardError, fully_shard, unsharded
from composable_shard.insight.events import record_events
from composable_shard.train.weights import gathering


class Odd(nn.Module):
    """One row, uneven rows, a tied weight, a frozen one, a module that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one_row = nn.Linear(4, 1)
        self.uneven = nn.Linear(1, 5)
        self.first = nn.Linear(5, 5, bias=False)
        self.act = nn.Tanh()
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.first(self.uneven(self.one_row(x))))
        return self.frozen(self.second(hidden))


def first_dim(param: nn.Parameter) -> Shard:
    return Shard(0)


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def odd_pair(dim: Callable[[nn.Parameter], Shard], **kwargs: object) -> tuple[Odd, Odd]:
    reference = Odd()
    model = copy.deepcopy(reference)
    fully_shard(model.frozen, shard_placement_fn=dim, **kwargs)
    return reference, fully_shard(model, shard_placement_fn=dim, **kwargs)


def assert_full(model: nn.Module, reference: nn.Module) -> None:
    pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    for (name, param), (other_name, other) in pairs:
        assert name == other_name
        assert isinstance(param, nn.Parameter) and not isinstance(param, DTensor), name
        assert param.requires_grad == other.requires_grad and param.is_leaf, name
        assert param.dtype == other.dtype and torch.equal(param, other), name


def assert_sharded(model: nn.Module, reference: nn.Module) -> None:
    pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    for (name, param), (_, other) in pairs:
        assert isinstance(param, DTensor), name
        assert torch.equal(full(param.detach()), other), name


def edit(module: Odd, grads: bool = False) -> None:
    """Change values in all the ways there are, and gradients."""
    for index, param in enumerate(module.parameters()):
        with torch.no_grad():
            param.add_(index + 1)
        param.data.mul_(2)
        param.data = param.data + 0.5
        if grads and param.grad is not None:
            param.grad = param.grad + 1
    if grads:
        module.one_row.bias.grad = None


@pytest.mark.brief(6)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dim", [first_dim, last_dim])
@pytest.mark.parametrize("way", ["everywhere", "offloaded", "first rank"])
@pytest.mark.parametrize("writeback", [False, True])
@on_ranks("num_ranks")
def test_full_parameters_and_their_edits(
    dim: Callable[[nn.Parameter], Shard], way: str, writeback: bool
) -> None:
    """The first rank alone has the gradients, too, and edits them."""
    reference, model = odd_pair(dim)
    objects, is_alone = list(model.parameters()), way == "first rank"
    for one in (model, reference):  # the root stays unsharded
        one(torch.ones(2, 4)).sum().backward()
    how = {"offload_to_cpu": way == "offloaded", "rank0_only": is_alone, "with_grads": is_alone}
    for _ in range(2):
        with unsharded(model, writeback=writeback, **how):
            if dist.get_rank() == 0 or not is_alone:
                assert_full(model, reference)
                assert model.first.weight is model.second.weight
                assert is_alone or all(param.grad is None for param in model.parameters())
                edit(model, is_alone)
            else:
                assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
        if writeback:
            edit(reference, is_alone)
        assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
        assert_sharded(model, reference)
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None)
            if param.grad is not None:
                assert param.grad.placements == param.placements
                torch.testing.assert_close(full(param.grad), other.grad)
        # What is written is used.
        assert torch.equal(model(torch.ones(2, 4)), reference(torch.ones(2, 4)))


# What is opened ------------------------------------------------------------------------------


@on_ranks(2)
def test_which_modules_are_opened() -> None:
    reference, model = two_nets(2)
    model.inp.weight.tag = "mine"  # type: ignore[attr-defined]
    every = [name for name, _ in model.named_parameters()]
    nested = {name for name in every if name.startswith("blocks")}
    first = {name for name in nested if name.startswith("blocks.0.")}
    for opened, recurse, expected in (
        (model, False, {*every} - nested),
        (model.blocks[0], True, first),
        (model.blocks, True, nested),  # a container of sharded modules
        (model.blocks, False, set()),
        (model.inp, True, {"inp.weight", "inp.bias"}),  # a part of the root group
    ):
        with unsharded(opened, recurse=recurse), torch.no_grad():
            kinds = dict(model.named_parameters())
            assert {n for n, p in kinds.items() if not isinstance(p, DTensor)} == expected
            if opened is model.inp:
                model.inp.weight.fill_(1)
                assert model.inp.weight.tag == "mine"  # what users hung on a parameter
    reference.inp.weight.data.fill_(1)
    assert_sharded(model, reference)
    plain = nn.Linear(2, 2)
    before = plain.weight
    with unsharded(plain):
        assert plain.weight is before


@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(2)
def test_tensor_subclasses(rank0_only: bool) -> None:
    with two_tensor_hooks():
        model = two_tensor_mlp(alike=False)
        reference = {n: (p.a.clone(), p.b.clone()) for n, p in model.named_parameters()}
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        model(torch.ones(2, 8))
        for _ in range(2):
            with unsharded(model, rank0_only=rank0_only), torch.no_grad():
                for name, param in model.named_parameters() if not dist.get_rank() else ():
                    assert type(param.data) is TwoTensor
                    for inner, expected in zip((param.a, param.b), reference[name], strict=True):
                        assert type(inner) is torch.Tensor and torch.equal(inner, expected)
                if not (rank0_only and dist.get_rank()):
                    for param in model.parameters():
                        param.a.add_(1)
                        param.b.mul_(3)
            for a, b in reference.values():
                a.add_(1)
                b.mul_(3)
        for name, param in model.named_parameters():
            for inner, whole in zip("ab", reference[name], strict=True):
                assert torch.equal(
                    getattr(param.to_local(), inner), whole.chunk(2)[dist.get_rank()]
                )


# One rank alone ------------------------------------------------------------------------------


@on_ranks(2)
def test_a_first_rank_that_fails_gets_nothing_old_later() -> None:
    """What the others could have sent for what it never asked for."""
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    for layer in layers:
        fully_shard(layer)
    model = fully_shard(layers)
    is_first, prepare, count = dist.get_rank() == 0, gathering.Bucket.prepare, list[int]()

    def fail(self: gathering.Bucket) -> None:
        count.append(1)
        if is_first and len(count) == 3:
            raise MemoryError("of the first rank")
        prepare(self)

    before = [full(param).clone() for param in model.parameters()]
    with mock.patch.object(gathering, "BUCKET_NBYTES", before[0].nbytes):
        with (
            mock.patch.object(gathering.Bucket, "prepare", fail),
            pytest.raises(ShardError) as caught,
            unsharded(model, rank0_only=True, writeback=False),
        ):
            raise AssertionError("must not get here")
        assert str(caught.value) == (
            "Expected no failure while gathering full weights, got on rank 0: MemoryError: of "
            "the first rank"
        )
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        with unsharded(model, rank0_only=True, writeback=False):
            for param, old in zip(model.parameters(), before, strict=True):
                assert not is_first or torch.equal(param, old + 1)
    assert len(count) == 3


# Gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("writeback", [False, True])
@on_ranks("num_ranks")
def test_gradients_are_full_too(accumulated: bool, writeback: bool) -> None:
    reference, model = two_nets()
    with model.no_sync() if accumulated else contextlib.nullcontext():
        train_step(model, 0, None)
    train_step(reference, 0, None)
    with unsharded(model, with_grads=True, writeback=writeback):
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert type(param.grad) is torch.Tensor
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-6, atol=1e-6)
            param.grad.mul_(2)
        model.out.bias.grad = None
        model.out.weight.grad = torch.ones_like(model.out.weight)
    if not writeback:
        if not accumulated:
            assert_parity(model, reference)
        else:
            assert all(p.grad.placements == (Partial("avg"),) for p in model.parameters())
        return
    for param in reference.parameters():
        param.grad.mul_(2)
    reference.out.bias.grad = None
    reference.out.weight.grad = torch.ones_like(reference.out.weight)
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None)
        if param.grad is not None:
            assert param.grad.placements == param.placements
            torch.testing.assert_close(full(param.grad), other.grad, rtol=1e-6, atol=1e-6)


# State dicts, events, forward ----------------------------------------------------------------


@on_ranks(2)
def test_state_dicts_within_are_full() -> None:
    reference, model = two_nets()
    with unsharded(model, writeback=False):
        state = model.state_dict()
        for name, value in reference.state_dict().items():
            assert type(state[name]) is torch.Tensor and torch.equal(state[name], value)
    other = Net(2)
    with unsharded(model):
        model.load_state_dict(other.state_dict())
    assert_sharded(model, other)
    assert torch.equal(model(own_input()), other(own_input()))


@on_ranks(2)
def test_full_parameters_are_those_of_the_optimizer_and_not_of_compute() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    reference, model = two_nets(1, mp_policy=policy)
    model(own_input())
    assert model.inp.weight.dtype == torch.bfloat16  # the root is still unsharded
    with unsharded(model):
        assert_full(model, reference)


@on_ranks(2)
def test_a_look_between_forward_and_backward() -> None:
    reference, model = two_nets()
    loss = model(own_input()).square().sum()
    with unsharded(model):
        assert_full(model, reference)
    loss.backward()
    train_step(reference, 0, None)
    assert_parity(model, reference)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_forward_within_is_that_of_a_plain_module() -> None:
    events = ("pre_forward", "all_gather", "wait_for_all_gather", "post_forward", "reshard")
    for recurse in (True, False):
        reference, model = two_nets(1)
        with unsharded(model, recurse=recurse), torch.no_grad(), record_events(model) as recorded:
            model.inp.weight.mul_(2)
            reference.inp.weight.mul_(2)
            assert torch.equal(model(own_input()), reference(own_input()))
        assert torch.equal(model(own_input()), reference(own_input()))
        assert recorded == ([] if recurse else [(event, "blocks.0") for event in events])


# Failures ------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_exception_writes_nothing_back() -> None:
    reference, model = two_nets()
    objects = list(model.parameters())
    with pytest.raises(KeyError), unsharded(model):
        with torch.no_grad():
            model.inp.weight.add_(1)
        raise KeyError("stop")
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert_sharded(model, reference)
    assert_trains_alike(model, reference)


def open_it(module: nn.Module) -> None:
    with unsharded(module):
        pass


def in_forward(model: Net) -> None:
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: open_it(model.blocks[0]))
    try:
        model(own_input())
    finally:
        handle.remove()


def transposed(model: Net) -> None:
    with unsharded(model):
        model.out.weight.data.add_(1)
        model.inp.weight = nn.Parameter(model.inp.weight.detach().t())


def in_backward(model: Net) -> None:
    loss = model(own_input()).sum()
    hidden = torch.ones((), requires_grad=True) * 1
    hidden.register_hook(lambda _: open_it(model))
    (loss + hidden).backward()


def within(opened: str, use: Callable[[Net], object]) -> Callable[[Net], None]:
    def act(model: Net) -> None:
        with unsharded(model.get_submodule(opened)):
            use(model)

    return act


def edited_forward(model: Net) -> None:
    with torch.no_grad():
        model.inp.weight.mul_(1)
        model(own_input())


SHARDED = (
    "ShardError: Expected full parameters in a forward of the root group inside of unsharded(), "
    "got '{}' sharded; call unsharded() on the sharded module, on all ranks"
)


OUTSIDE = (
    "ShardError: Expected unsharded() for {} outside of forward and backward, got a call inside "
    "of one; use it between iterations"
)
SHAPE = (
    "ValueError: Expected 'weight' of Linear to have shape [6, 4] at the end of unsharded(), got "
    "[4, 6]; edit values only"
)
REFUSED: list[tuple[Callable[[Net], None], str]] = [
    (in_forward, OUTSIDE.format("group 'blocks.0'")),
    (in_backward, OUTSIDE.format("the root group")),
    (
        within("", lambda model: open_it(model.inp)),
        "ShardError: Expected unsharded() outside of unsharded(), got a call inside of unsharded() "
        "of the root group; leave that context first",
    ),
    (
        within("", lambda model: model(own_input())),
        "ShardError: Expected no forward of the root group with gradients inside of unsharded(), "
        "got one; run it under torch.no_grad(), or after the context",
    ),
    (within("inp", edited_forward), SHARDED.format("out.weight")),
    (
        within("", lambda model: model.blocks[0].unshard()),
        "ShardError: Expected no unshard() of group 'blocks.0' inside unsharded(), got one",
    ),
    (transposed, SHAPE),
    (
        lambda model: open_it([model.inp]),  # type: ignore[arg-type]
        "TypeError: Expected module to be an nn.Module, got list: [Linear(in_features=4, "
        "out_features=6, bias=True)]; call it for each",
    ),
    (
        lambda _: open_it(fully_shard(nn.Linear(4, 4, device="meta"))),
        "MaterializationError: Expected materialized parameters, got 'weight' of FSDPLinear on "
        "meta; call init_sharded()",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
@on_ranks(2)
def test_after_a_wrong_use_the_model_goes_on_as_if_nothing_had_happened(case: int) -> None:
    use, text = REFUSED[case]
    reference, model = two_nets(1)
    with pytest.raises(Exception) as caught:
        use(model)
    assert f"{type(caught.value).__name__}: {caught.value}" == text
    model.reset_iter_state()
    model.zero_grad()
    assert_sharded(model, reference)
    assert_trains_alike(model, reference)
