"""The oracle: whole models that train without sharding, and their comparison with a sharded one.

One whole model for each rank computes with that rank's batches; their gradients are averaged in
the order of ranks, and one optimizer steps for all. Nothing is communicated, so no collective of
the sharded model can be wrong in the same way.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.policy import MixedPrecisionPolicy

# The oracle: all ranks without sharding, in one process -------------------------------------------

Build = Callable[[], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Grads = dict[str, torch.Tensor]


class Unsharded:
    """Whole models that train together as the sharded one should.

    Args:
        build: Builds the model; called once for each rank and once for the master.
        policy: The policy of all groups.
        make_optimizer: Makes the optimizer from the master's parameters.
        tolerance: The allowed difference, relative to the largest element; if `None`, 0 (equal
            bits) if `is_exact`, else `RELATIVE`.

    Attributes:
        master: Has the parameters that the optimizer sees.
        models: For each rank, the model that computes, in the dtypes of the policy.
        waiting: For each rank, the accumulated, unreduced gradients by name.
        reduced: By name, the mean gradients.
        largest: By name, the largest element of anything that went into a gradient.
        has_mixed: Whether unreduced gradients came after reduced ones. The last bit of the sum then
            depends on the order of summation.
        is_exact: Whether the sums of the sharded model equal those of this oracle bit by bit.
    """

    def __init__(
        self,
        build: Build,
        policy: MixedPrecisionPolicy,
        make_optimizer: MakeOptimizer,
        tolerance: float | None,
    ) -> None:
        self.policy, self._tolerance, self._rank = policy, tolerance, dist.get_rank()
        num_ranks = dist.get_world_size()
        self.master, *self.models = [new_model(build) for _ in range(num_ranks + 1)]
        if self.master is self.models[0]:
            raise ValueError(
                "Expected build() to return a new model each time, got the same one twice"
            )
        self.optimizer = make_optimizer(self.master.parameters())
        self.clear()
        self.refresh()
        dtypes = {param.dtype for param in self.master.parameters()}
        # Sums in float16 are divided before and after the reduction, which rounds twice. How
        # torch's kernels round a low-precision step depends on where in a tensor an element is.
        self.is_exact = (
            num_ranks <= 2
            and torch.float16 not in map(policy.reduction_dtype, dtypes)
            and not dtypes & {torch.float16, torch.bfloat16}
            and type(self.optimizer) is torch.optim.SGD
        )

    def cast_at(self, groups: Iterable[str]) -> None:
        """Cast inputs and outputs of the modules of these names, as their groups do."""
        for name in groups:
            for model in self.models:
                module = model.get_submodule(name)
                module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
                module.register_forward_hook(self._cast_output)

    def refresh(self) -> None:
        """Give the models the parameters of the master."""
        wanted = dict(self.master.named_parameters())
        for model in self.models:
            for name, param in model.named_parameters():
                value = wanted[name].detach()
                param.data = value.to(self.policy.compute_dtype(value.dtype), copy=True)

    # Compute --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lend_buffers(self, model: nn.Module) -> Iterator[None]:
        """Substitute buffers in the dtype of the policy; copy their new values back."""
        dtype = self.policy.buffer_dtype
        lent: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (module._buffers, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if dtype is not None and buffer is not None and buffer.is_floating_point()
        ]
        for place, name, buffer in lent:
            place[name] = buffer.to(dtype)
        try:
            yield
        finally:
            for place, name, buffer in lent:
                buffer.copy_(place[name])
                place[name] = buffer

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        args = tuple(_cast(arg, dtype) for arg in args)
        return args, {key: _cast(arg, dtype) for key, arg in kwargs.items()}

    def _cast_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else _cast(output, dtype)

    # Gradients ------------------------------------------------------------------------------

    def take(self, reduces: bool) -> None:
        """Take the gradients of a backward of every model; reduce them, or let them wait."""
        params = dict(self.master.named_parameters())
        at_once = {*params} if reduces else set[str]()
        for waiting, model in zip(self.waiting, self.models, strict=True):
            for name, param in model.named_parameters():
                grad, param.grad = param.grad, None
                if grad is None:
                    continue
                self.has_mixed |= name in self.reduced and name not in at_once | waiting.keys()
                # One rank reduces nothing, hence rounds nothing to the dtype of reduction.
                is_kept = len(self.models) == 1 and name in at_once
                dtype = grad.dtype if is_kept else self.policy.reduction_dtype(params[name].dtype)
                before = waiting.get(name)
                new = grad.to(dtype if before is None else before.dtype, copy=True)
                waiting[name] = new if before is None else before + new
        self.reduce(at_once)

    @property
    def waits_somewhere(self) -> bool:
        """Whether any rank has gradients that are not reduced."""
        return any(self.waiting)

    def reduce(self, names: Collection[str] | None = None) -> None:
        """Average the waiting gradients in rank order; a rank without one counts as zeros.

        Args:
            names: The parameters to reduce; all if absent.
        """
        for name, param in self.master.named_parameters():
            is_due = names is None or name in names
            parts = [own.pop(name) for own in self.waiting if is_due and name in own]
            if not parts:
                continue
            mean = sum(parts[1:], parts[0]) / len(self.models)
            mean = mean.to(self.policy.grad_dtype or param.dtype)
            before = self.reduced.get(name)
            self.reduced[name] = mean if before is None else before + mean
            sizes = map(_largest, (*parts, self.reduced[name]))
            self.largest[name] = max(*sizes, self.largest.get(name, 0.0))

    def clear(self) -> None:
        """Drop all gradients, also those of a failed backward."""
        for model in self.models:
            model.zero_grad()
        self.waiting: list[Grads] = [{} for _ in self.models]
        self.reduced: Grads = {}
        self.largest: dict[str, float] = {}
        self.has_mixed = False

    def step(self) -> None:
        """Take an optimizer step with the mean gradients, which stay."""
        # Gradients summed in another order leave their last bits in the parameters.
        self.is_exact &= not self.has_mixed
        for name, param in self.master.named_parameters():
            if self.policy.grad_dtype is not None:
                param.grad_dtype = None
            param.grad = self.reduced.get(name)
        self.optimizer.step()
        for param in self.master.parameters():
            param.grad = None
        self.refresh()

    # The comparison -------------------------------------------------------------------------

    def differences(
        self, params: Mapping[str, nn.Parameter], buffers: Iterable[tuple[str, torch.Tensor]]
    ) -> list[str]:
        """Compare this rank's part of a sharded model.

        Args:
            params: Its parameters, with their gradients. Sums of reduced and waiting gradients are
                not compared.
            buffers: Its buffers by name.
        """
        expected = dict(self.master.named_parameters())
        if expected.keys() != params.keys():
            return [f"expected parameters {sorted(expected)}, got {sorted(params)}"]
        found = list[str]()
        for name, param in {} if self.waits_somewhere and self.has_mixed else params.items():
            # All ranks know a reduced gradient; only its own rank knows an unreduced one.
            wanted = self.waiting[self._rank].get(name)
            if wanted is None and name in self.reduced:
                wanted = _part_of(param, self.reduced[name])
            grad = None if param.grad is None else _torch.local_part(param.grad)
            found += self.differs(f"grad of {name}", grad, wanted, name)
        for name, param in params.items():
            wanted = _part_of(param, expected[name])
            found += self.differs(name, _torch.local_part(param), wanted, name)
        own_buffers = dict(self.models[self._rank].named_buffers())
        for name, buffer in buffers:
            found += self.differs(name, buffer, own_buffers[name])
        return found

    def differs(
        self, what: str, got: torch.Tensor | None, wanted: torch.Tensor | None, name: str = ""
    ) -> list[str]:
        """Compare two tensors.

        Args:
            what: Names them in the result.
            got: That of the sharded model.
            wanted: That of this rank's model.
            name: The parameter on which they depend; empty for all parameters.

        Returns:
            The difference, if there is one.
        """
        if _kind(got) != _kind(wanted):
            return [f"{what}: expected {_kind(wanted)}, got {_kind(got)}"]
        if got is None or wanted is None or _same(got, wanted).all():
            return []
        off, most = apart(got, wanted)
        most = max(self.largest.get(name, 0.0), most)
        is_rounded = wanted.is_floating_point() or wanted.is_complex()
        allowed = self._allowed(wanted.dtype, name) if is_rounded else 0.0
        if allowed and off <= allowed * most:
            return []
        limit = f"at most {allowed:.3g} of it" if allowed else "the same bits"
        return [f"{what}: off by {off:.3g} of {most:.3g}, expected {limit}"]

    def _allowed(self, dtype: torch.dtype, name: str) -> float:
        if self._tolerance is not None:
            return self._tolerance
        if self.is_exact and not self.has_mixed:
            return 0.0
        policy = self.policy
        params = dict(self.master.named_parameters())
        dtypes = {dtype, policy.output_dtype or dtype, policy.grad_dtype or dtype}
        for param in [params[name]] if name in params else params.values():
            dtypes |= {policy.compute_dtype(param.dtype), policy.reduction_dtype(param.dtype)}
        return 4 * max(RELATIVE.get(dtype, 0.0) for dtype in dtypes)


def new_model(build: Build, seed: int = 0) -> nn.Module:
    """Build a model from the same random state each time."""
    torch.manual_seed(seed)
    return build()


def written_and_read(states: Any) -> Any:
    """Save states to a file, and return the content of the file."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


RELATIVE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-9,
}
"""The allowed difference, relative to the largest element, where bits need not be equal."""


def apart(got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors, and the largest finite value of the second.

    Infinity differs infinitely from any number, and NaN from everything but NaN.
    """
    off = (_wide(got) - _wide(wanted)).masked_fill(_same(got, wanted), 0).abs()
    return float(off.max()) if off.numel() else 0.0, _largest(wanted)


def _same(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return got.isnan() & wanted.isnan() | (got == wanted)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value that is finite."""
    sizes = _wide(tensor).abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(sizes.max()) if sizes.numel() else 0.0


def _part_of(param: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of `whole` that this rank has with the placements of `param`."""
    if not isinstance(param, DTensor):
        return whole.detach()
    return _torch.cut(whole.detach(), param.device_mesh, param.placements)


def _kind(value: torch.Tensor | None) -> str:
    if value is None:
        return "none"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
