"""Compares a sharded model with its oracle; what differs is told in words."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_shard.testing.oracle import Unsharded

RELATIVE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-9,
}
"""How much two tensors may differ, relative to the largest element, where not bitwise equal."""


class Comparison:
    """Compares this rank's part of a sharded model with an oracle.

    Args:
        oracle: The oracle.
        rank: This rank.
        tolerance: How much may differ, relative to the largest element; `None` for nothing where
            the sums are those of the oracle bit by bit, and else `RELATIVE`.
        is_exact: Whether they are.
    """

    def __init__(
        self, oracle: Unsharded, rank: int, tolerance: float | None, is_exact: bool
    ) -> None:
        self.oracle = oracle
        self.rank = rank
        self.tolerance = tolerance
        self.is_exact = is_exact

    def loss(self, got: torch.Tensor, wanted: torch.Tensor) -> list[str]:
        """Compare the losses of a forward."""
        return self._differs("loss", got, wanted)

    def params(self, sharded: dict[str, nn.Parameter]) -> list[str]:
        """Compare this rank's shards of all parameters."""
        wanted = dict(self.oracle.master.named_parameters())
        if wanted.keys() != sharded.keys():
            return [f"expected parameters {sorted(wanted)}, got {sorted(sharded)}"]
        return [
            text
            for name, param in sharded.items()
            for text in self._differs(name, _local(param), _part_of(param, wanted[name]), name)
        ]

    def buffers(self, sharded: nn.Module) -> list[str]:
        """Compare all buffers with those of this rank's model."""
        wanted = dict(self.oracle.models[self.rank].named_buffers())
        return [
            text
            for name, buffer in sharded.named_buffers()
            for text in self._differs(name, buffer, wanted[name])
        ]

    def grads(self, sharded: dict[str, nn.Parameter]) -> list[str]:
        """Compare all gradients, but for sums whose reduced part this rank cannot tell apart."""
        if self.oracle.waits_somewhere and self.oracle.has_folded:
            return []
        found = []
        for name, param in sharded.items():
            what = f"grad of {name}"
            # A reduced gradient is known on all ranks; one that waits, on the ranks it waits on.
            wanted = self.oracle.waiting[self.rank].get(name)
            if wanted is None:
                wanted = self.oracle.reduced.get(name)
                wanted = None if wanted is None else _part_of(param, wanted)
            got = None if param.grad is None else _local(param.grad)
            if got is None or wanted is None:
                if got is not wanted:
                    found.append(f"{what}: expected {_kind(wanted)}, got {_kind(got)}")
                continue
            found += self._differs(what, got, wanted, name)
        return found

    def _differs(
        self, what: str, got: torch.Tensor, wanted: torch.Tensor, name: str = ""
    ) -> list[str]:
        got, wanted = got.detach(), wanted.detach()
        if got.dtype != wanted.dtype or got.shape != wanted.shape:
            return [f"{what}: expected {_kind(wanted)}, got {_kind(got)}"]
        if torch.equal(got, wanted) or (got.isnan() & wanted.isnan() | (got == wanted)).all():
            return []
        off = (got.double() - wanted.double()).abs().max().item()
        most = max(self.oracle.largest.get(name, 0.0), wanted.double().abs().max().item())
        allowed = self._allowed(wanted.dtype, name)
        if off <= allowed * most:
            return []
        limit = f"at most {allowed:.3g} of it" if allowed else "the same bits"
        return [f"{what}: off by {off:.3g} of {most:.3g}, expected {limit}"]

    def _allowed(self, dtype: torch.dtype, name: str) -> float:
        if self.tolerance is not None:
            return self.tolerance
        if self.is_exact and not self.oracle.has_folded:
            return 0.0
        policy = self.oracle.policy
        params = dict(self.oracle.master.named_parameters())
        dtypes = {dtype, policy.output_dtype or dtype, policy.grad_dtype or dtype}
        for param in [params[name]] if name in params else params.values():
            dtypes |= {policy.compute_dtype(param.dtype), policy.reduction_dtype(param.dtype)}
        return 4 * max(RELATIVE.get(dtype, 0.0) for dtype in dtypes)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part_of(param: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return what this rank should have of `whole`, where `param` lies. Collective: none."""
    if not isinstance(param, DTensor):
        return whole.detach()
    part = distribute_tensor(
        whole.detach(), param.device_mesh, param.placements, src_data_rank=None
    )
    return part.to_local()


def _kind(value: torch.Tensor | None) -> str:
    if value is None:
        return "none"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
