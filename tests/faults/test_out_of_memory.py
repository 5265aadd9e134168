"""Memory that runs out in a gather, a reduction or a hook: training goes on as if it had not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from nets import Net, assert_parity, own_input, train_step, two_nets
from on_ranks import on_ranks
from torch import nn

from composable_shard import _torch, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks


class TwoKinds(nn.Module):
    """Weights of two dtypes, so two buffers to allocate for one gather."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Linear(4, 4)
        self.fine = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fine(self.coarse(x).double())


def storages_of(block: Any) -> list[torch.UntypedStorage]:
    """Return the memory of the unsharded parameters, which comes and goes with each gather."""
    block.unshard()
    storages = [param.untyped_storage() for param in block.parameters()]
    block.reshard()
    return storages


def run_out(in_backward: bool, num_ranks_kept: int | bool) -> list[object]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(TwoKinds(), nn.Linear(4, 1, dtype=torch.float64))
    for layer in model:
        fully_shard(layer, reshard_after_forward=num_ranks_kept)
    fully_shard(model)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    expected = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    allocate, is_full, memory = _torch.allocate, [False], storages_of(model[0])

    def fail_for_the_second(tensor: torch.Tensor) -> None:
        if is_full[0] and tensor.dtype == torch.float64:
            raise torch.OutOfMemoryError("no memory is left")
        allocate(tensor)

    with mock.patch.object(_torch, "allocate", fail_for_the_second):
        is_full[0] = not in_backward
        with pytest.raises(torch.OutOfMemoryError):
            loss = model(x).sum()
            is_full[0] = True
            loss.backward()
        left = {storage.nbytes() for storage in memory}
    model(x).sum().backward()
    gradients = [param.grad.to_local() for param in model.parameters()]
    return [left, all(map(torch.equal, gradients, expected))]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("ranks", "kept"), [(2, True), (4, 2)])
def test_a_gather_gets_all_its_memory_or_none(
    ranks: int, kept: int | bool, in_backward: bool
) -> None:
    assert run_ranks(run_out, ranks, in_backward, kept) == [[{0}, True]] * ranks


@on_ranks(2, timeout=30)
def test_no_reduction_of_a_group_is_launched_if_another_has_no_memory() -> None:
    """One that was would be waited for by nobody, and met by the next iteration."""
    model = fully_shard(TwoKinds())
    reference = TwoKinds()
    reference.load_state_dict({n: t.full_tensor() for n, t in model.state_dict().items()})
    x, empty = torch.ones(2, 4), _torch.empty

    def fail_for_the_second(*shape: int, dtype: torch.dtype, **kwargs: Any) -> torch.Tensor:
        if dtype == torch.float64:
            raise torch.OutOfMemoryError("no memory is left")
        return empty(*shape, dtype=dtype, **kwargs)

    loss = (3 * model(x)).sum()
    with (
        mock.patch.object(_torch, "empty", fail_for_the_second),
        pytest.raises(torch.OutOfMemoryError),
    ):
        loss.backward()
    for each in (model, reference):
        each(x).sum().backward()
    assert all(
        torch.equal(param.grad.full_tensor(), other.grad)  # type: ignore[union-attr, arg-type]
        for param, other in zip(model.parameters(), reference.parameters(), strict=True)
    )


OOM = torch.OutOfMemoryError


def fail(*_: object) -> None:
    raise OOM("in a hook")


def on_output(model: Net) -> Any:
    """A hook on a tensor, hung up while the block runs."""

    def hang(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    return model.blocks[1].register_forward_hook(hang)


def on_module_before(model: Net) -> Any:
    return model.blocks[0].register_full_backward_pre_hook(fail)


def on_module_after(model: Net) -> Any:
    return model.blocks[1].register_full_backward_hook(fail)


def within(model: Net) -> Any:
    return model.blocks[1].up.register_full_backward_hook(fail)


def on_last_node(model: Net) -> Any:
    """A hook on the last node of all, when most groups are reduced."""

    def hang(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    return model.inp.register_forward_hook(hang)


def train_with_failing_hook(hang: Callable[[Net], Any], retries: bool) -> None:
    reference, model = two_nets(2)
    for step in range(4):
        model.zero_grad()
        reference.zero_grad()
        if step in (0, 2):
            handle = hang(model)
            loss = model(own_input(step)).square().sum()
            for _ in range(2 if retries else 1):
                with pytest.raises(OOM, match="in a hook"):
                    loss.backward(retain_graph=True)
            handle.remove()
            model.zero_grad()
            del loss
            continue
        with record_events(model, "reduce_scatter") as recorded:
            train_step(model, step, None)
        train_step(reference, step, None)
        assert_parity(model, reference)
        assert recorded == [("reduce_scatter", name) for name in ("blocks.1", "blocks.0", "")]


@pytest.mark.parametrize("retries", [False, True])
@pytest.mark.parametrize(
    "hang", [on_output, on_module_before, on_module_after, within, on_last_node]
)
def test_out_of_memory_in_a_backward_hook(hang: Callable[[Net], Any], retries: bool) -> None:
    run_ranks(partial(train_with_failing_hook, hang, retries), 2)


@on_ranks(2)
def test_out_of_memory_when_gathering() -> None:
    """The allocation of the gathered parameters itself fails, in forward and in backward."""
    reference, model = two_nets(2)
    allocate, left = _torch.allocate, [0]

    def failing(tensor: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OOM("when gathering")
        allocate(tensor)

    for step in range(5):
        model.zero_grad()
        reference.zero_grad()
        if step in (1, 3):
            with (
                mock.patch.object(_torch, "allocate", failing),
                pytest.raises(OOM, match="when gathering"),
            ):
                left[0] = 2 if step == 1 else 0
                loss = model(own_input(step)).square().sum()
                left[0] = 2
                loss.backward()
            continue
        train_step(model, step, None)
        train_step(reference, step, None)
        assert_parity(model, reference)
