"""Compares a sharded model with its oracle; what differs is told in words, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from training.oracle import Unsharded, means_over_ranks

RELATIVE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-9,
}
"""How much two tensors may differ, relative to the largest element, where not bitwise equal."""


def difference(
    got: torch.Tensor, wanted: torch.Tensor, tolerance: float | None = None, scale: float = 0.0
) -> str | None:
    """Tell how ``got`` differs from ``wanted``; ``None`` if it does not.

    Args:
        got: What the sharded model has.
        wanted: What the oracle has.
        tolerance: How much may differ, relative to the largest element; ``None`` for nothing.
        scale: Largest element of what ``wanted`` is a sum of, if larger than its own.
    """
    got, wanted = got.detach(), wanted.detach()
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return f"expected {wanted.dtype} {list(wanted.shape)}, got {got.dtype} {list(got.shape)}"
    if torch.equal(got, wanted):
        return None
    off = (got.double() - wanted.double()).abs().max().item()
    most = max(scale, wanted.double().abs().max().item())
    if tolerance is not None and off <= tolerance * most:
        return None
    return f"off by {off:.3g} of {most:.3g}, expected at most {tolerance or 0:.3g} of it"


def placement(grad: torch.Tensor | None) -> str | None:
    """Tell how far a gradient has come: ``None``, ``"partial"`` or ``"shard"``."""
    if grad is None:
        return None
    assert isinstance(grad, DTensor)
    (own,) = grad.placements
    if own.is_partial():
        return "partial"
    assert isinstance(own, Shard)
    return "shard"


def my_rows(param: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``full`` that this rank should have of a sharded parameter."""
    assert isinstance(param, DTensor)
    (own,) = param.placements
    assert isinstance(own, Shard)
    chunks = full.chunk(dist.get_world_size(), own.dim)
    rank = dist.get_rank()
    return chunks[rank] if rank < len(chunks) else full.narrow(own.dim, 0, 0)


def step_both(optimizers: Sequence[torch.optim.Optimizer], oracle: Unsharded) -> None:
    """Step the sharded model and its oracle, in this order, and clear the gradients of both."""
    optimizers[0].step()
    optimizers[0].zero_grad()
    oracle.step(optimizers[1])
    oracle.clear()


class Comparison:
    """Collects what differs between a sharded model and its oracle.

    Args:
        sharded: The sharded model, not unsharded at the time.
        oracle: The unsharded one.
        exact: Whether the same bits are expected.
    """

    def __init__(self, sharded: nn.Module, oracle: Unsharded, exact: bool) -> None:
        self.oracle = oracle
        self.exact = exact
        # Held, as the module has its unsharded parameters while they are not resharded.
        self.sharded_params = dict(sharded.named_parameters())
        self.differences: list[str] = []
        self._largest = {name: 0.0 for name in self.sharded_params}
        self._note_sizes()

    def tensor(self, what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compare two tensors."""
        self._note(what, difference(got, wanted, self._tolerance(wanted.dtype)))

    def params(self, when: str) -> None:
        """Compare this rank's shards of all parameters."""
        wanted = dict(self.oracle.model.named_parameters())
        for name, param in self.sharded_params.items():
            assert isinstance(param, DTensor)
            rows = my_rows(param, wanted[name])
            tolerance = self._tolerance(param.dtype)
            differs = difference(param.to_local(), rows, tolerance, self._largest[name])
            self._note(f"{when}: {name}", differs)
        self._note_sizes()

    def grads(self, when: str, placements: bool = True) -> None:
        """Compare all gradients, however far each rank has come with them.

        The gradient is the mean over ranks of what is partial, plus this rank's shard.

        Args:
            when: What happened before; for the message.
            placements: Whether to compare how far they have come, too.
        """
        means = self._partial_means() if self.oracle.waits_somewhere else {}
        totals = self.oracle.totals()
        for name, param in self.sharded_params.items():
            what = f"{when}: grad of {name}"
            state, expected = placement(param.grad), self.oracle.placement(name)
            if placements and state != expected:
                self._note(what, f"expected {expected}, got {state}")
            wanted = totals.get(name)
            got = my_rows(param, means[name]) if name in means else None
            if got is not None and wanted is not None:
                got = got.to(wanted.dtype)
            if state == "shard":
                assert isinstance(param.grad, DTensor)
                local = param.grad.to_local()
                got = local if got is None else got + local
            if got is None or wanted is None:
                self._note(what, None if got is wanted else f"expected {wanted}, got {got}")
            else:
                tolerance = self._tolerance(param.dtype, self.oracle.has_folded)
                scale = self.oracle.largest.get(name, 0.0)
                self._note(what, difference(got, my_rows(param, wanted), tolerance, scale))

    def _partial_means(self) -> dict[str, torch.Tensor]:
        partial = {
            name: param.grad.to_local()
            for name, param in self.sharded_params.items()
            if isinstance(param.grad, DTensor) and placement(param.grad) == "partial"
        }
        return means_over_ranks(partial)[0]

    def _note_sizes(self) -> None:
        """Rounding leaves its mark by the largest value that a parameter has had."""
        for name, param in self.oracle.model.named_parameters():
            if param.numel():
                largest = param.detach().double().abs().max().item()
                self._largest[name] = max(largest, self._largest[name])

    def _tolerance(self, dtype: torch.dtype, folded: bool = False) -> float | None:
        """Gradients folded into others are sums of larger numbers, in another order."""
        if self.exact and not folded:
            return None
        policy = self.oracle.policy
        dtypes = {
            policy.compute_dtype(dtype),
            policy.reduction_dtype(dtype),
            policy.output_dtype or dtype,
            policy.grad_dtype or dtype,
        }
        return max(RELATIVE.get(dtype, 0.0) for dtype in dtypes) * (4 if folded else 1)

    def _note(self, what: str, differs: str | None) -> None:
        if differs is not None:
            self.differences.append(f"{what}: {differs}")
