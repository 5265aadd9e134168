"""What a failed or dropped forward leaves behind: no graph, no memory, no open pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Net, own_input, shard_net, train_step, two_nets
from on_ranks import on_ranks
from torch.distributed.tensor import DTensor

from faults.raising import Break, Interrupt, failing_step


class Mark:
    """Lives as long as the autograd node that it hangs on."""


def marking(alive: list[weakref.ref[Mark]]) -> Callable[..., None]:
    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        mark = output.grad_fn.metadata["mark"] = Mark()
        alive.append(weakref.ref(mark))

    return note


def marks_of(model: Net, fails: bool, num_forwards: int) -> list[weakref.ref[Mark]]:
    alive: list[weakref.ref[Mark]] = []
    note = marking(alive)

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError

    handles = [block.down.register_forward_hook(note) for block in model.blocks]
    if fails:
        handles.append(model.out.register_forward_pre_hook(fail))
    for step in range(num_forwards):
        if fails:
            with pytest.raises(RuntimeError):
                model(own_input(step))
        else:
            model(own_input(step))
    for handle in handles:
        handle.remove()
    return alive


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_forwards_without_backward_keep_no_graph(fails: bool) -> None:
    model = shard_net(Net(2))
    counts = []
    for _ in range(2):
        alive = marks_of(model, fails, 3)
        gc.collect()
        assert len(alive) == 6
        counts.append(sum(ref() is not None for ref in alive))
        train_step(model, 0, None)
    assert counts == [0, 0]


def unsharded_nbytes(model: Net) -> int:
    plain = [param for param in model.parameters() if not isinstance(param, DTensor)]
    return sum(param.untyped_storage().nbytes() for param in plain)


def interrupted() -> tuple[Net, Net]:
    """Raise a ``BaseException``, for which torch calls no hooks of the modules that it passes."""
    reference, model = two_nets(2)
    failing_step(model, 0, Break("blocks.1.up", "before"), Interrupt)
    return reference, model


@on_ranks(2)
def test_reset_frees_what_an_interrupted_forward_left_unsharded() -> None:
    _, model = interrupted()
    nbytes = [unsharded_nbytes(model)]
    model.reset_iter_state()
    nbytes.append(unsharded_nbytes(model))
    assert [count > 0 for count in nbytes] == [True, False]


@on_ranks(2)
def test_a_state_dict_taken_after_an_interrupt() -> None:
    reference, model = interrupted()
    state = model.state_dict()
    for name, expected in reference.state_dict().items():
        assert isinstance(state[name], DTensor), name
        assert torch.equal(state[name].full_tensor(), expected), name
