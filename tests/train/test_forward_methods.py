"""Methods that are called as a forward is: what they compute, what happens when, what fails."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nets import Block, assert_parity, average_gradients, own_input
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composable_shard import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from composable_shard.errors import ShardError
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.block = Block(6)
        self.out = nn.Linear(6, 3)
        self.fail: BaseException | None = None

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Encode without the last layer."""
        hidden = self.block(self.inp(x))
        if self.fail is not None:
            raise self.fail
        return hidden * scale

    def decode(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"decoded": self.out(hidden)}

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self(2 * x) + self.out(self.inp(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))["decoded"]

    @torch.no_grad()
    def stream(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(2):
            x = self.step(x)
            yield x

    async def wait(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))["decoded"].repeat(1, 2)[:, :4]


METHODS = ("encode", "decode", "again")


def shard_encoder(model: Encoder, **kwargs: Any) -> Encoder:
    fully_shard(model.block, **kwargs)
    fully_shard(model, **kwargs)
    for name in METHODS:
        register_fsdp_forward_method(model, name)
    return model


def pair(**kwargs: Any) -> tuple[Encoder, Encoder]:
    reference = Encoder()
    return reference, shard_encoder(copy.deepcopy(reference), **kwargs)


Use = Callable[[Encoder, torch.Tensor], torch.Tensor]
USES: dict[str, Use] = {
    "encode": lambda model, x: model.encode(x, scale=3.0),
    "encode twice": lambda model, x: model.encode(x) + model.encode(x=x, scale=0.5),
    "encode and decode": lambda model, x: model.decode(model.encode(x))["decoded"],
    "call within": lambda model, x: model.again(x),
    "checkpoint": lambda model, x: checkpoint(model.encode, x, use_reentrant=False),
    "checkpoint twice": lambda model, x: checkpoint(
        lambda h: model.decode(h)["decoded"],
        checkpoint(model.encode, x.requires_grad_(), use_reentrant=True),
        use_reentrant=True,
    ),
}


def step(model: Encoder, use: Use, number: int) -> float:
    loss = use(model, own_input(number)).square().sum()
    loss.backward()
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        average_gradients(model.parameters())
    return loss.item()


@pytest.mark.parametrize(("num_ranks", "reshard_after_forward"), [(1, None), (2, True), (3, None)])
@pytest.mark.parametrize("use", USES)
@on_ranks("num_ranks")
def test_training_by_methods(use: str, reshard_after_forward: bool | None) -> None:
    reference, model = pair(reshard_after_forward=reshard_after_forward)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (reference, model)]
    for number in range(3):
        losses = []
        for one in (reference, model):
            losses.append(step(one, USES[use], number))
            if one is model:
                assert_parity(model, reference)
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_evaluation_by_methods() -> None:
    reference, model = pair(reshard_after_forward=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for use in (USES["encode"], USES["call within"]):
                assert torch.equal(use(model, own_input()), use(reference, own_input()))
        assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2)
def test_inputs_and_outputs_are_cast() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    reference, model = pair(mp_policy=policy)
    low = copy.deepcopy(reference).bfloat16()
    with torch.no_grad():
        got = model.encode(own_input())
        inner = low.block(low.inp(own_input().bfloat16()).bfloat16()).double().bfloat16()
    assert torch.equal(got, inner.double() * 1.0)
    assert [
        str(got.dtype),
        str(model.decode(own_input()[:, :1].repeat(1, 6))["decoded"].dtype),
    ] == ["torch.float64", "torch.float64"]


@on_ranks(2)
def test_events_are_those_of_a_forward() -> None:
    _, model = pair(reshard_after_forward=True)
    step(model, USES["encode"], 0)
    with record_events(model) as forward:
        loss = model.encode(own_input(1)).sum()
    with record_events(model) as backward:
        loss.backward()
    assert forward == [
        *(("pre_forward", ""), ("all_gather", ""), ("all_gather", "block")),
        *(("wait_for_all_gather", ""), ("pre_forward", "block"), ("wait_for_all_gather", "block")),
        *(("post_forward", "block"), ("reshard", "block"), ("post_forward", ""), ("reshard", "")),
    ]
    assert [event for event in backward if event[0] in ("all_gather", "reduce_scatter")] == [
        *(("all_gather", ""), ("all_gather", "block")),
        *(("reduce_scatter", "block"), ("reduce_scatter", "")),
    ]


@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt()])
@pytest.mark.parametrize("grad", [True, False])
@on_ranks(2)
def test_after_an_exception_the_next_iteration_is_right(error: BaseException, grad: bool) -> None:
    reference, model = pair()
    for use in (USES["encode"], USES["encode and decode"]):
        model.fail = error
        with pytest.raises(type(error)), torch.set_grad_enabled(grad):
            use(model, own_input(0))
        if isinstance(error, Exception):
            assert all(isinstance(param, DTensor) for param in model.parameters())
        model.fail = None
        with record_events(model, "all_gather") as gathered:
            for one in (reference, model):
                step(one, use, 1)
        assert ("all_gather", "") in gathered
        assert_parity(model, reference)
        for one in (reference, model):
            one.zero_grad()


NO_METHOD = "Expected FSDPEncoder to have a method '{}', got none"


def test_a_registered_method_looks_like_itself() -> None:
    plain = Encoder()
    before = dict(plain.__dict__)
    for name in ("encode", "there is none"):  # a module that is not sharded stays
        register_fsdp_forward_method(plain, name)
    assert plain.__dict__ == before
    with fake_ranks(2):
        model = shard_encoder(Encoder())
        registered = model.encode
        assert model.encode.__name__ == "encode"
        assert model.encode.__doc__ == Encoder.encode.__doc__
        assert model.encode.__self__ is model
        register_fsdp_forward_method(model, "encode")
        assert model.encode == registered  # not once more around itself
        model.number = 3  # type: ignore[assignment]
        for name in ("generate", "number"):
            with pytest.raises(ValueError) as caught:
                register_fsdp_forward_method(model, name)
            assert str(caught.value) == NO_METHOD.format(name)


@pytest.mark.parametrize("name", ["stream", "wait"])
def test_a_method_that_computes_later_is_refused_when_registered(name: str) -> None:
    with fake_ranks(2):
        model = fully_shard(Encoder())
        with pytest.raises(ValueError) as caught:
            register_fsdp_forward_method(model, name)
    assert str(caught.value) == (
        f"Expected method '{name}' of FSDPEncoder to return its result, got a generator or "
        "coroutine, which computes only after the parameters have been freed; register the method "
        "that it calls for each item"
    )


def test_a_method_that_is_not_registered_says_so() -> None:
    """It keeps its signature; an error of a method that has the parameters stays as it is."""
    with fake_ranks(2):
        model = fully_shard(Encoder())
        with pytest.raises(ShardError) as caught:
            model.encode(torch.ones(2, 4))
        assert str(caught.value) == (
            "Expected 'encode' of the root group to be called while the parameters are gathered, "
            "got a call outside of forward; call the module, or call "
            "register_fsdp_forward_method(module, 'encode') once"
        )
        assert "mixed torch.Tensor and DTensor" in str(caught.value.__cause__)
        assert inspect.signature(model.encode) == inspect.signature(Encoder().encode)
        other = fully_shard(nn.Linear(4, 6))
        model.inp.forward = lambda x: nn.functional.linear(x, other.weight)  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as raised:
            model(torch.ones(2, 4))
        assert not isinstance(raised.value, ShardError)
