"""Scaling losses, and unscaling gradients that are sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable_shard import _torch, arguments
from composable_shard.core.nested import map_tensors
from composable_shard.mesh import default_device_type
from composable_shard.train.clip import alike, check_scalable, pending


class ShardedGradScaler(_torch.GradScalerBase):
    """Scale losses against underflow in half precision, with sharded gradients.

    A ``torch.amp.GradScaler`` on which ranks agree: if a gradient of an optimizer is infinite or
    NaN on any rank, all ranks skip the step and lower the scale. Gradients may be DTensors on any
    mix of meshes, plain, sparse, tensor subclasses, in half precision, and on the CPU (offloaded).
    ``Partial`` gradients (accumulated without sync) are unscaled in place; the step is also skipped
    if their sum over the ranks might overflow. The interface is torch's: ``scale``, ``unscale_``,
    ``step``, ``update``, ``state_dict``, ``load_state_dict``.

    Args:
        device: The device type of the losses; by default the current accelerator, or the CPU.
        init_scale: The initial scale of losses.
        backoff_factor: The factor of the scale after a skipped step; below 1.
        growth_factor: The factor of the scale after ``growth_interval`` steps in a row; above 1.
        growth_interval: The number of steps without a skip before the scale grows.
        enabled: ``False`` makes ``scale`` return its argument, and ``step`` call the optimizer's
            step.
        process_group: The ranks that agree, all if absent; must include the parameters' meshes.

    Raises:
        TypeError: If ``device`` is no string, if a factor, the scale or the interval is no number,
            or if ``process_group`` is no process group, as on a rank that is not a member.
        ValueError: If one of these numbers is out of range, or ``enabled`` is no bool.

    Collective: one all-reduce of 4 bytes for each optimizer and step; all ranks must call it.
    Memory: two scalars.
    Source: ``torch.amp.GradScaler`` and ``torch.distributed.fsdp.sharded_grad_scaler``.

    Example:
        >>> from torch import nn
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def step(inputs):
        ...     layer = nn.Linear(2, 2, bias=False)
        ...     nn.init.ones_(layer.weight)
        ...     fully_shard(layer)
        ...     optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        ...     scaler = ShardedGradScaler(init_scale=1024.0)
        ...     scaler.scale(layer(inputs[dist.get_rank()]).sum()).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     return layer.weight.detach().to_local(), scaler.get_scale()
        >>> run_threads(step, 2, torch.ones(2, 1, 2))
        [(tensor([[0.5000, 0.5000]]), 1024.0), (tensor([[0.5000, 0.5000]]), 1024.0)]
        >>> run_threads(step, 2, torch.tensor([[[1.0, 1.0]], [[1.0, torch.inf]]]))
        [(tensor([[1., 1.]]), 512.0), (tensor([[1., 1.]]), 512.0)]
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        is_type = device is None or isinstance(device, str)
        arguments.check_type("device", device, is_type, "a device type such as 'cuda', or None")
        if arguments.checked_bool("enabled", enabled):
            scale = arguments.checked_number("init_scale", init_scale)
            arguments.check_value("init_scale", init_scale, scale > 0, "above 0")
            fits = 0 < arguments.checked_number("backoff_factor", backoff_factor) < 1
            arguments.check_value("backoff_factor", backoff_factor, fits, "between 0 and 1")
            growth = arguments.checked_number("growth_factor", growth_factor)
            arguments.check_value("growth_factor", growth_factor, growth > 1, "above 1")
            arguments.check_int("growth_interval", growth_interval, 1)
        arguments.check_process_group(process_group)
        place, factors = device or default_device_type(), (growth_factor, backoff_factor)
        super().__init__(place, init_scale, *factors, growth_interval, enabled)
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or several, by the scale.

        Args:
            outputs: A tensor, or nested lists, tuples, mappings and dataclass instances of tensors;
                other values stay. Iterators are scaled as they are read.

        Returns:
            The same structure with each tensor scaled in its own dtype; ``outputs`` itself if the
            scaler is disabled.

        Raises:
            TypeError: If ``outputs`` holds no tensor.
        """
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, Iterator):
            return map(self.scale, outputs)
        scaled = map_tensors(self._scaled, outputs)
        has_tensors = scaled is not outputs
        arguments.check_type("outputs", outputs, has_tensors, "tensors or containers of tensors")
        return scaled

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        scaled = output * self.scale_on(output.device)
        return scaled.to(output.dtype)  # a scalar of half precision would be promoted

    @torch.no_grad()
    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, found_inf: torch.Tensor
    ) -> None:
        """Multiply the gradients of an optimizer in place, and agree on ``found_inf`` on all ranks.

        Called by ``unscale_`` and ``step``.

        Args:
            optimizer: The optimizer; its uncoalesced sparse gradients in half precision are
                replaced by coalesced ones.
            inverse: The factor, a float32 scalar.
            found_inf: A float32 tensor of one element, set to 1 if a gradient is not finite on any
                rank.

        Raises:
            ValueError: If a gradient is ``Partial`` with a reduction that cannot be unscaled
                (product), or ``process_group`` lacks ranks of the meshes.

        Collective: see the class.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        group = self._ranks_to_agree(params)
        check_scalable(p.grad for p in params if p.grad is not None)
        _unscale_own(params, inverse, found_inf)
        if group is not None and group.size() > 1:
            message = found_inf.to(_torch.device_for(group, found_inf.device))
            dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
            found_inf.copy_(message)

    def _ranks_to_agree(self, params: Sequence[torch.Tensor]) -> dist.ProcessGroup | None:
        """Return the process group over which ranks agree; ``None`` for one rank alone."""
        if self.process_group is None:
            return dist.group.WORLD if dist.is_initialized() else None
        for mesh in {param.device_mesh for param in params if isinstance(param, DTensor)}:
            members = dist.get_process_group_ranks(self.process_group)
            fits = {*mesh.mesh.flatten().tolist()} <= {*members}
            what = f"to have all ranks of {mesh}, or to be left out"
            arguments.check_value("process_group", members, fits, what)
        return self.process_group


# The parts on this rank -----------------------------------------------------------------------


def _unscale_own(
    params: Sequence[torch.Tensor], factor: torch.Tensor, found_inf: torch.Tensor
) -> None:
    """Multiply this rank's parts of the gradients; set ``found_inf`` if one is not finite."""
    present = [param for param in params if param.grad is not None]
    locals_ = [_local(param) for param in present]
    subclasses = [local for local in locals_ if _torch.is_wrapper_subclass(local)]
    plain = [local for local in locals_ if not _torch.is_wrapper_subclass(local)]
    _unscale_plain(plain, factor, found_inf)
    for local in subclasses:
        local.mul_(factor.to(local.device))
    parts = [(local, _num_parts(param)) for param, local in zip(present, locals_, strict=True)]
    sums = [local * num_parts for local, num_parts in parts if num_parts > 1]  # at most
    leaves = [leaf for local in (*subclasses, *sums) for leaf in _torch.leaves(local)]
    numbers = [leaf for leaf in leaves if leaf.is_floating_point()]
    _unscale_plain(numbers, torch.ones_like(factor), found_inf)


def _unscale_plain(
    tensors: Sequence[torch.Tensor], factor: torch.Tensor, found_inf: torch.Tensor
) -> None:
    """Multiply plain tensors in place, those of one device and dtype in one kernel."""
    for (device, *_), ones in alike(tensor for tensor in tensors if tensor.numel()).items():
        found = found_inf if device == found_inf.device else torch.zeros((), device=device)
        _torch.unscale_all_(ones, found, factor.to(device))
        if found is not found_inf:
            found_inf.add_(_torch.carried(found, found_inf.device)).clamp_(max=1)


def _local(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient as a plain tensor of real numbers."""
    grad = _torch.local_part(cast(torch.Tensor, param.grad))
    if grad.is_sparse:
        if grad.dtype is torch.float16 and not grad.is_coalesced():
            # A sum of duplicates that overflows here would overflow in the optimizer, unnoticed.
            param.grad = grad = grad.float().coalesce().half()
        grad = _torch.sparse_values(grad)
    if grad.is_complex():
        return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
    return grad


def _num_parts(param: torch.Tensor) -> int:
    """Return the number of ranks over which the gradient of a parameter is not yet reduced."""
    grad = param.grad
    return math.prod(cast(DTensor, grad).device_mesh.size(axis) for axis, _ in pending(grad))
