"""Memory that runs out in a gather or a reduction: training goes on as if it had not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from on_ranks import on_ranks
from torch import nn

from composable_shard import _torch, fully_shard
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
    allocate, is_full, storages = _torch.allocate, [False], storages_of(model[0])

    def fail(tensor: torch.Tensor) -> None:
        if is_full[0] and tensor.dtype == torch.float64:
            raise torch.OutOfMemoryError("no memory is left")
        allocate(tensor)

    patch = mock.patch.multiple
    with patch(_torch, allocate=fail), patch(_torch.memory, allocate=fail):
        is_full[0] = not in_backward
        with pytest.raises(torch.OutOfMemoryError):
            loss = model(x).sum()
            is_full[0] = True
            loss.backward()
        left = {storage.nbytes() for storage in storages}
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
