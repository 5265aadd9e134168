"""What a failed or dropped forward leaves behind: no graph, no memory, no open pass."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nets import Net, own_input, shard_net, train_step, two_nets
from on_ranks import on_ranks
from torch.distributed.tensor import DTensor

from composable_shard.core.transport.exchange import Exchange
from composable_shard.core.transport.failures import watched
from composable_shard.core.transport.mailbox import mailbox_of

LONG_WAIT = 2.0  # seconds: others are asked after one
ENOUGH = 20.0


class Mark:
    """Lives as long as the autograd node that it hangs on."""


def marking(alive: list[weakref.ref[Mark]]) -> Callable[..., None]:
    """Return a hook that hangs a mark on what a module returns."""

    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        mark = output.grad_fn.metadata["mark"] = Mark()
        alive.append(weakref.ref(mark))

    return note


def marks_of(model: Net, fails: bool, num_forwards: int) -> list[weakref.ref[Mark]]:
    """Run forwards whose results are dropped; return marks on their graphs."""
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


@on_ranks(2)
def test_interrupted_forwards_keep_no_graph_beyond_the_next_iteration() -> None:
    """Count the graphs of interrupted forwards after an iteration that went well."""
    model, alive = shard_net(Net(2)), list[weakref.ref[Mark]]()
    note = marking(alive)
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
    assert (sum(ref() is not None for ref in alive)) == 0


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


def fail_in_backward(model: Net, index: int) -> None:
    """Fail on the way back through a block, after a backward that went well."""

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    def watch(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    train_step(model, 0, None)
    model.blocks[index].up.register_forward_hook(watch)
    loss = model(own_input()).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()


@pytest.mark.usefixtures("sharing")
@on_ranks(2)
def test_a_model_that_is_dropped_while_it_gathers_is_freed_on_all_ranks() -> None:
    assert dist.group.WORLD is not None
    mailbox = mailbox_of(dist.group.WORLD)
    assert mailbox is not None
    before, gathered, shards = mailbox.num_unread, [], []
    not_at_once = mock.patch.object(Exchange, "is_there", lambda _: False)
    for index in (1, 2):
        model = shard_net(Net(3))
        shards += [weakref.ref(param) for param in model.parameters()]
        with not_at_once:
            fail_in_backward(model, index)
        gathered.append(mailbox.num_unread > before)
        del model
        gc.collect()
    model = shard_net(Net(3))
    for step in range(2):
        train_step(model, step, None)
    gc.collect()
    dist.barrier()
    left = mailbox.num_unread - before
    arrived = [len(peer.arrived) + len(peer.unwanted) for peer in mailbox.peers.values()]
    alive = sum(shard() is not None for shard in shards)
    assert (gathered, alive, left, arrived) == ([True, True], 0, 0, [0])


@on_ranks(2)
def test_a_process_group_in_which_a_rank_has_waited_is_freed_when_destroyed() -> None:
    """Wait in a process group for a rank that is late; tell whether it lives when destroyed."""
    group = dist.new_group()
    with watched(group, "waiting"):
        if dist.get_rank() == 0:
            time.sleep(LONG_WAIT)
        dist.barrier(group)
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    end = time.monotonic() + ENOUGH
    while alive() is not None and time.monotonic() < end:  # the watcher may be looking yet
        time.sleep(0.01)
        gc.collect()
    assert (alive() is not None) is False
