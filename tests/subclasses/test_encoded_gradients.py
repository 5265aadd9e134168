"""Gradients whose tensor types decide what travels: exact if nothing is lost, and agreed on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from near import Apart
from nets import Net, assert_same, average_gradients, full, own_input, shard_net
from on_ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from training.cases import reproducible

from composable_shard import ExtensionError, MixedPrecisionPolicy, fully_shard
from composable_shard.testing import (
    RankError,
    TreeLoss,
    TreeSpec,
    assert_trains_like_unsharded,
    fake_ranks,
    run_ranks,
)
from composable_shard.testing.strategies import (
    meshes,
    module_trees,
    policies,
    reshard_choices,
    training_programs,
    uses,
)
from int8_gradients import send_int8_gradients
from subclasses.lossless import POST, PRE, Lossless, as_type, shard_encoded, wire

# What arrives ----------------------------------------------------------------------------------


def exchange() -> None:
    """Compare gradients with those of the plain model; each group sends once."""
    plain = Net()
    model = shard_net(as_type(copy.deepcopy(plain), Lossless))
    for step in range(2):
        with wire() as sent:
            for each in (plain, model):
                each.zero_grad()
                each(own_input(step)).square().sum().backward()
        assert len(sent) == 3
        average_gradients(plain.parameters())
        for param, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert type(other.grad._local_tensor) is torch.Tensor
            assert_same(full(other.grad), param.grad)


def test_ranks_that_exchange_messages() -> None:
    run_ranks(exchange, 2)
    run_ranks(Apart(exchange), 3)


@pytest.mark.parametrize("divisor", [None, 8.0])
@pytest.mark.parametrize("sums_only", [False, True])
@on_ranks(3)
def test_sums_are_taken_in_fp32_and_divided_before_they_are_narrowed(
    divisor: float | None, sums_only: bool
) -> None:
    layer = as_type(nn.Linear(3, 4, bias=False), Lossless)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.float32, reduce_dtype=torch.float16))
    if divisor is not None:
        layer.set_gradient_divide_factor(divisor)
    layer.set_force_sum_reduction_for_comms(sums_only)
    (layer(torch.full((1, 3), 300.0)) * 100).sum().backward()
    expected = 3 * 30_000 / (divisor or 3)  # 90,000 is more than a half can hold
    grad = layer.weight.grad.full_tensor()
    assert torch.equal(grad, torch.full((4, 3), expected).half().float())


class Branches(nn.Module):
    """Uses one of two weights, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(3, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return x * self.weights[which] if which < 2 else x


@on_ranks(2)
def test_hooks_are_called_where_there_is_a_gradient_and_none_is_where_nobody_has_one() -> None:
    model = fully_shard(as_type(Branches(), Lossless))
    for choice, sums, num_calls in (
        ((0, 0), [18.0, None], ([1, 0], [1, 0])),
        ((0, 2), [9.0, None], ([2, 0], [1, 0])),
        ((2, 1), [None, 9.0], ([2, 0], [1, 1])),
        ((2, 2), [None, None], ([2, 0], [1, 1])),
    ):
        model.zero_grad()
        model(torch.full((3, 3), 2.0, requires_grad=True), choice[dist.get_rank()]).sum().backward()
        grads = [weight.grad for weight in model.weights]
        assert [None if g is None else g.full_tensor().sum().item() for g in grads] == sums
        calls = [weight._local_tensor.num_calls for weight in model.weights]
        assert calls == num_calls[dist.get_rank()]


@on_ranks(2)
def test_parameters_of_one_name_in_several_modules_of_a_group() -> None:
    """Each rank has a gradient of one of two parameters with the same name."""
    layers = [as_type(nn.Linear(3, 3, bias=False), Lossless) for _ in range(2)]
    fully_shard(layers)
    outputs = [layer(torch.ones(1, 3)).sum() for layer in layers]
    outputs[dist.get_rank()].backward()
    assert [layer.weight.grad.full_tensor().sum().item() for layer in layers] == [4.5, 4.5]


# What is lost ----------------------------------------------------------------------------------


def rounded(parts: torch.Tensor) -> torch.Tensor:
    """Round as int8 blocks of a row each do, in numbers."""
    scales = parts.abs().amax(1, keepdim=True) / 127
    return (parts / scales.clamp_min(1e-30)).round() * scales


@on_ranks(2)
def test_int8_gradients_are_rounded_as_by_hand_and_what_is_lost_comes_later() -> None:
    layer = nn.Linear(8, 5, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    lost = [torch.zeros(2, 24) for _ in range(2)]
    for step in range(4):
        batches = [
            torch.randn(3, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            for rank in range(2)
        ]
        with wire() as sent:
            layer(batches[dist.get_rank()]).sum().backward()
        # two rows of 24 int8, a scale and a flag
        assert sent == [2 * (24 + 4 + 1)]
        total = torch.zeros(2, 24)  # rows 0 to 2, and rows 3 and 4 with one of padding
        for rank, x in enumerate(batches):
            own = x.sum(0).expand(5, 8)
            exact = nn.functional.pad(own, (0, 0, 0, 1)).view(2, 24) + lost[rank]
            lost[rank] = exact - rounded(exact)
            total += rounded(exact)
        assert torch.equal(layer.weight.grad.full_tensor(), (total / 2).view(6, 8)[:5])
        layer.zero_grad()


@on_ranks(2)
def test_an_overflow_is_seen_and_does_not_stay() -> None:
    layer = nn.Linear(2, 2, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    layer(torch.tensor([[1.0, torch.inf]])).sum().backward()
    assert not layer.weight.grad.full_tensor().isfinite().any()
    layer.zero_grad()
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), torch.ones(2, 2))


# Any tree -----------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[TreeSpec, list[str], dict[str, Any]]:
    mesh = draw(meshes())
    spec = draw(module_trees(mesh[-1]))
    loss = TreeLoss(draw(uses(draw(st.integers(1, 3)), spec.num_params)))
    program = draw(training_programs(without=["fail_backward"]))
    reshard = draw(reshard_choices(mesh[-1]))
    return spec, program, {"mesh": mesh, "loss": loss, "reshard_after_forward": reshard}


@reproducible(20)
@given(cases(), policies([torch.float64]))
def test_any_tree_with_encoded_gradients_follows_any_program(
    case: tuple[TreeSpec, list[str], dict[str, Any]], policy: MixedPrecisionPolicy
) -> None:
    spec, program, options = case
    assert_trains_like_unsharded(
        spec, program, shard=shard_encoded, policy=policy, timeout=30, **options
    )


# What hooks must not do is refused on all ranks ---------------------------------------------------


def broken(name: str) -> None:
    """Train a weight whose hooks are those given."""
    names = {PRE: HOOKS[name][0], POST: summed}
    layer = as_type(nn.Linear(2, 4, bias=False), type("Broken", (Lossless,), names))
    fully_shard(layer)
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()


def another_later(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    self.num_calls += 1
    return (grad if self.num_calls == 1 else grad.half(),), None


def fails_on_one(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("no")
    return (grad,), None


RETURN = f"Expected {PRE} of weight to return "
PAIR = f"{RETURN}(tensors, metadata), got "
FAILS = f"{PRE} of weight failed: "
HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "no tuple": (lambda self, grad, mesh: grad, f"{PAIR}Tensor"),
    "one tensor": (lambda self, grad, mesh: (grad, None), f"{PAIR}(Tensor, NoneType)"),
    "no rows": (
        lambda self, grad, mesh: ((grad, grad.sum()), None),
        f"{RETURN}tensors with a row for each of 2 ranks, got [[2, 4], []]",
    ),
    "another later": (
        another_later,
        f"{RETURN}[torch.float32 [2, 4]] as before, got [torch.float16 [2, 4]]",
    ),
    "fails on one": (fails_on_one, f"rank 1: {FAILS}ValueError: no"),
    "differs": (
        lambda self, grad, mesh: ((grad if dist.get_rank() == 0 else grad.half(),), None),
        f"{RETURN}tensors of the same number, dtypes and trailing dims on all ranks, got "
        "[torch.float32 [2, 4]] on rank 0 and [torch.float16 [2, 4]] on rank 1",
    ),
}


def summed(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> None:
    out.copy_(received[0].sum(0))


def gathers_on_one(self: Any, mesh: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("no")
    return (self.full,), None


def broken_gather(name: str) -> None:
    kind = type("Broken", (Lossless,), {"fsdp_pre_all_gather": gathers_on_one})
    fully_shard(as_type(nn.Linear(2, 4, bias=False), kind))(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("fn", "name"), [*((broken, name) for name in HOOKS), (broken_gather, "gathers_on_one")]
)
def test_what_hooks_must_not_do_is_refused_on_all_ranks(fn: Callable[..., None], name: str) -> None:
    """And the rank on which a hook fails shows where."""
    with pytest.raises(RankError) as caught:
        run_ranks(fn, 2, name)
    failure = caught.value.agreed()
    assert failure.exception_type is ExtensionError
    if name in HOOKS:
        assert failure.message == HOOKS[name][1]
    if name in ("fails on one", "gathers_on_one"):
        hook = name.replace(" ", "_")
        shows = [f", in {hook}" in failure.traceback for failure in caught.value.failures]
        assert shows == [False, True]


def test_one_hook_alone_is_refused() -> None:
    kind = type("Half", (torch.Tensor,), {PRE: summed})
    layer = as_type(nn.Linear(2, 4, bias=False), kind)
    with fake_ranks(2), pytest.raises(TypeError) as caught:
        fully_shard(layer)
    assert str(caught.value) == (
        f"Expected both {PRE} and {POST} on Half, got only {PRE}; define {POST} too"
    )


class Spreads(Lossless):
    """Makes tensors of its own of all that is computed with it, gradients too."""

    fsdp_pre_all_gather = property()
    fsdp_post_all_gather = property()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain, named = tree_map_only(cls, lambda one: one.full, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, cls, func(*plain, **named))
        return return_and_correct_aliasing(func, args, kwargs, out)


@on_ranks(2)
def test_a_gradient_that_is_a_subclass_is_refused() -> None:
    layer = fully_shard(as_type(nn.Linear(2, 4, bias=False), Spreads))
    with pytest.raises(ExtensionError) as caught:
        layer(torch.ones(1, 2)).sum().backward()
    assert str(caught.value) == (
        f"Expected a plain gradient of weight to pass to {PRE}, got Spreads; let "
        "fsdp_post_all_gather return a plain tensor"
    )
