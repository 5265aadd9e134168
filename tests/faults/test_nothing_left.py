"""What a failed or dropped forward leaves behind: no graph, no memory, no open pass."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from dist.models import Net, own_input, shard_net, train_step, two_nets
from torch.distributed.tensor import DTensor

from composable_shard.testing import run_ranks


class Mark:
    """Lives as long as the autograd node that it hangs on."""


def marks_of(model: Net, fails: bool, num_forwards: int) -> list[weakref.ref[Mark]]:
    """Run forwards whose results are dropped; return marks on their graphs."""
    alive: list[weakref.ref[Mark]] = []

    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        mark = output.grad_fn.metadata["mark"] = Mark()
        alive.append(weakref.ref(mark))

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


def graphs_alive(fails: bool) -> list[int]:
    """Count the graphs that live on after forwards without backward, at first and later."""
    model = shard_net(Net(2))
    counts = []
    for _ in range(2):
        alive = marks_of(model, fails, 3)
        gc.collect()
        assert len(alive) == 6
        counts.append(sum(ref() is not None for ref in alive))
        train_step(model, 0, None)
    return counts


@pytest.mark.parametrize("fails", [False, True])
def test_forwards_without_backward_keep_no_graph(fails: bool) -> None:
    assert run_ranks(graphs_alive, 2, fails) == [[0, 0]] * 2


def graphs_alive_after_interrupts() -> int:
    """Count the graphs of interrupted forwards after an iteration that went well."""
    model, alive = shard_net(Net(2)), []

    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        mark = output.grad_fn.metadata["mark"] = Mark()
        alive.append(weakref.ref(mark))

    handles = [
        model.inp.register_forward_hook(note),
        model.blocks[0].register_forward_hook(note),
        model.blocks[1].up.register_forward_pre_hook(interrupt),
    ]
    for step in range(3):
        with pytest.raises(Interrupt):
            model(own_input(step))
    for handle in handles:
        handle.remove()
    train_step(model, 0, None)
    gc.collect()
    assert len(alive) == 6
    return sum(ref() is not None for ref in alive)


def test_interrupted_forwards_keep_no_graph_beyond_the_next_iteration() -> None:
    assert run_ranks(graphs_alive_after_interrupts, 2) == [0, 0]


def unsharded_nbytes(model: Net) -> int:
    """Count the bytes of plain (gathered) parameters on the module."""
    plain = [param for param in model.parameters() if not isinstance(param, DTensor)]
    return sum(param.untyped_storage().nbytes() for param in plain)


class Interrupt(BaseException):
    """No hook of a module is called when this passes through it."""


def interrupt(*_: object) -> None:
    raise Interrupt


def interrupted() -> tuple[Net, Net]:
    reference, model = two_nets(2)
    handle = model.blocks[1].up.register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupt):
        model(own_input())
    handle.remove()
    return reference, model


def freed_by_reset() -> list[bool]:
    _, model = interrupted()
    nbytes = [unsharded_nbytes(model)]
    model.reset_iter_state()
    nbytes.append(unsharded_nbytes(model))
    return [count > 0 for count in nbytes]


def test_reset_frees_what_an_interrupted_forward_left_unsharded() -> None:
    assert run_ranks(freed_by_reset, 2) == [[True, False]] * 2


def saved_after_interrupt() -> None:
    """A checkpoint written on an interrupt holds the sharded weights."""
    reference, model = interrupted()
    state = model.state_dict()
    for name, expected in reference.state_dict().items():
        assert isinstance(state[name], DTensor), name
        assert torch.equal(state[name].full_tensor(), expected), name


def test_a_state_dict_taken_after_an_interrupt() -> None:
    run_ranks(saved_after_interrupt, 2)
