"""The sharded side of a case: what each rank does, and what it has after each step."""

from __future__ import annotations

import copy
import types
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from composable_shard import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
)
from composable_shard._torch import shards_dim

from .model import Block, Leaf, Model, Nest, build
from .oracle import Follower, alone_loss, batch, failing, owner
from .program import Case, Op

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "": None}


class Held(NamedTuple):
    """What a rank holds of a tensor: for each mesh axis "S0", "R" or "P", and its local part.

    "T0" shards dim 0 within the parts of later axes.
    """

    places: tuple[str, ...]
    local: torch.Tensor


class Seen(NamedTuple):
    """What a rank has after a step: by name."""

    heard: Any
    params: dict[str, Held]
    grads: dict[str, Held | None]
    registered: dict[str, bool]


@lru_cache(maxsize=8)
def mesh_of(extents: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(extents) :]
    return init_device_mesh("cpu", extents, mesh_dim_names=names)


def run_case(case: Case) -> list[Seen]:
    """Run on each rank."""
    torch.manual_seed(case.seed)
    sharded = Sharded(case)
    seen = [sharded.seen()]
    for num_op, op in enumerate(case.ops):
        try:
            sharded.do(num_op, op)
        except Exception as error:
            error.add_note(f"in step {num_op}: {op.name}")
            raise
        seen.append(sharded.seen())
    return seen


class Sharded(Follower):
    """Follows a program with the sharded model, on one rank."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mesh = mesh_of(case.mesh)
        self.rank = torch.distributed.get_rank()
        self.model: Any = build(case.blocks, case.own, case.seed)
        if case.start == "double":
            self.model.float()
        full = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        if case.start == "empty":
            with torch.device("meta"):
                self.model = build(case.blocks, case.own, case.seed)
        shard(self.model, case, self.mesh)
        if case.start == "double":
            self.model.double()
        elif case.start == "assign":
            state = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.model.load_state_dict(state, assign=True)
        elif case.start == "empty":
            self.model.to_empty(device="cpu")
            self.model.load_state_dict(full, strict=False)
        travel_as_two(self.model)
        self.held = dict(self.model.named_parameters())
        self.teacher: Any = None
        self.saved: dict[str, torch.Tensor] = {}
        self.is_synced = True
        self.heard: Any = None

    def params(self) -> dict[str, Any]:
        return dict(self.model.named_parameters()) if self.case.live else self.held

    def seen(self) -> Seen:
        registered = dict(self.model.named_parameters())
        return Seen(
            self.heard,
            {name: _held(p) for name, p in self.held.items()},
            {name: None if p.grad is None else _held(p.grad) for name, p in self.held.items()},
            {name: registered.get(name) is p for name, p in self.held.items()},
        )

    def groups(self, names: tuple[str, ...] = ()) -> list[Any]:
        found = [
            m
            for n, m in self.model.named_modules()
            if isinstance(m, FSDPModule) and (not names or (n.split(".")[-1] or "root") in names)
        ]
        return found

    # Forward and backward -------------------------------------------------------------------

    def train(self, op: Op) -> None:
        is_hybrid, changes = self.case.sharding == "hybrid", not op.flag
        if self.case.is_deferred:
            changes = "unsynced" in op.how
        if changes and "replicas" in op.how:
            self.model.set_requires_all_reduce(False)
        elif changes:
            self.model.set_requires_gradient_sync(False)
        elif is_hybrid:
            self.model.set_requires_all_reduce("all" in op.how)
        losses = [
            self.model(batch(self.case, self.num_op, n, self.rank), call.for_rank(self.rank))
            for n, call in enumerate(op.calls)
        ]
        if "drop" in op.how:
            losses = losses[-1:]
        totals = losses if "each" in op.how else [torch.stack(losses).sum()]
        self.heard = [loss.item() for loss in losses]
        del losses
        for total in reversed(totals) if "reversed" in op.how else totals:
            if "retain" in op.how:
                total.backward(retain_graph=True)
            total.backward()
        self.is_synced = op.flag
        if changes:
            self.model.set_requires_gradient_sync(True)
        self.model.set_requires_all_reduce(not is_hybrid)

    def alone(self, op: Op) -> None:
        loss = alone_loss(self.model, op, batch(self.case, self.num_op, 0, self.rank))
        loss.backward()
        self.heard = [loss.item()]
        if self.case.is_deferred:
            self.sync(op)
        self.is_synced = True

    def sync(self, op: Op) -> None:
        self.model.synchronize_gradients()
        self.is_synced = True

    def evaluate(self, op: Op) -> None:
        self.heard = self._evaluated(self.model, op)

    def _evaluated(self, model: Any, op: Op) -> list[float]:
        with torch.inference_mode() if op.how == "inference" else torch.no_grad():
            return [
                model(batch(self.case, self.num_op, n, self.rank), call.for_rank(self.rank)).item()
                for n, call in enumerate(op.calls)
            ]

    def fail(self, op: Op) -> None:
        with failing(self.model, op):
            data = batch(self.case, self.num_op, 0, self.rank)
            self.model(data, op.calls[0].for_rank(self.rank)).backward()
        self.model.zero_grad()
        self.is_synced = True

    # Gradients and parameters ---------------------------------------------------------------

    def zero(self, op: Op) -> None:
        if op.how == "optimizer" and self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=op.flag)
        elif op.how == "hand" and op.flag:
            for param in self.params().values():
                param.grad = None
        elif op.flag or self.is_synced:
            self.model.zero_grad(set_to_none=op.flag)
        else:
            # The module drops what was not reduced; an optimizer fills it.
            torch.optim.SGD(self.params().values(), lr=0.1).zero_grad(set_to_none=False)
        self.is_synced |= op.flag

    def grad_none(self, op: Op) -> None:
        for name, param in self.params().items():
            if owner(name) in op.names:
                param.grad = None

    def step(self, op: Op) -> None:
        if self.optimizer is None:
            return
        if not self.is_synced and not self.case.is_deferred:  # else the optimizer does it
            self.sync(op)
        self.optimizer.step()
        self.is_synced = True

    def clip(self, op: Op) -> None:
        if not self.is_synced and not self.case.is_deferred:
            self.sync(op)
        self.is_synced = True
        params = list(self.params().values())
        norm = clip_grad_norm_(params, 0.1) if op.how else self.model.clip_grad_norm_(0.1)
        self.heard = [norm.item()]

    @torch.no_grad()
    def save(self, op: Op) -> None:
        if op.how == "full":
            state = self.model.state_dict()
            self.saved = {name: value.full_tensor().clone() for name, value in state.items()}
        else:
            self.saved = {n: value.clone() for n, value in self.model.state_dict().items()}

    def restore(self, op: Op) -> None:
        if self.saved:
            self.model.load_state_dict(self.saved)

    @torch.no_grad()
    def teach(self, op: Op) -> None:
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.model)
            self.taught = dict(self.teacher.named_parameters())
        else:
            mine = self.teacher.parameters() if self.case.live else self.taught.values()
            torch._foreach_lerp_(list(mine), list(self.params().values()), 0.5)

    def ask_teacher(self, op: Op) -> None:
        if self.teacher is not None:
            self.heard = self._evaluated(self.teacher, op)

    # What is about shards alone -------------------------------------------------------------

    def unshard(self, op: Op) -> None:
        for module in self.groups(op.names):
            handle = module.unshard(async_op=op.flag)
            if op.how == "wait" and handle is not None:
                handle.wait()

    def reshard(self, op: Op) -> None:
        for module in self.groups(op.names):
            module.reshard()

    def set_reshard(self, op: Op) -> None:
        for module in self.groups(op.names):
            module.set_reshard_after_forward(op.flag, recurse=bool(op.how))

    def set_keep(self, op: Op) -> None:
        for module in self.groups(op.names):
            module.set_reshard_after_backward(op.flag, recurse=bool(op.how))

    def prefetch(self, op: Op) -> None:
        targets = [m for name in op.names[1:] for m in self.groups((name,))]
        for module in self.groups(op.names[:1]):
            if op.how == "forward":
                module.set_modules_to_forward_prefetch(targets)
            else:
                module.set_modules_to_backward_prefetch(targets)


def _held(tensor: Any) -> Held:
    if not isinstance(tensor, DTensor):
        return Held((), tensor.detach().clone())
    places = []
    for placement in tensor.placements:
        if isinstance(placement, Shard):
            places.append(f"S{placement.dim}")
        elif shards_dim(placement, dim := getattr(placement, "dim", -1)):
            places.append(f"T{dim}")
        elif isinstance(placement, Replicate):
            places.append("R")
        else:
            assert isinstance(placement, Partial)
            places.append("P" if placement.reduce_op == "avg" else "P" + placement.reduce_op)
    return Held(tuple(places), tensor.to_local().detach().clone())


def shard(model: Model, case: Case, mesh: DeviceMesh) -> None:
    """Make groups from the bottom up."""
    dims: dict[int, int] = {}
    for block_dim, param in _dims(model):
        dims.setdefault(id(param), block_dim)

    def placement(param: Any) -> Shard | None:
        dim = dims.get(id(param), 0)
        return Shard(dim) if dim < param.ndim and dim else None

    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": case.reshard,
        "sharding": case.sharding or None,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[case.precision],
            reduce_dtype=torch.float32 if case.precision else None,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if case.offload else OffloadPolicy(),
        "shard_placement_fn": placement,
    }

    def visit(nest: Nest) -> None:
        together: dict[str, list[Any]] = {}
        for part in nest.parts.values():
            spec: Block = part.spec
            if isinstance(part, Nest):
                visit(part)
            if spec.group == "own":
                fully_shard(part, **options)
            elif spec.group != "parent":
                together.setdefault(spec.group, []).append(part)
        for parts in together.values():
            fully_shard(parts if len(parts) > 1 else parts[0], **options)

    visit(model)
    if case.reshard_root != "same":
        options["reshard_after_forward"] = case.reshard_root
    fully_shard(model, **options)
    if case.keep:
        model.set_reshard_after_backward(False)


def _dims(model: Model) -> list[tuple[int, Any]]:
    return [
        (module.spec.dim, param)
        for module in model.modules()
        if isinstance(module, Nest) or hasattr(module, "spec")
        for param in module._parameters.values()
        if param is not None
    ]


def travel_as_two(model: Model) -> None:
    """Let float64 parameters travel as two float32 tensors, whose sum they are."""
    for module in model.modules():
        if isinstance(module, Leaf) and module.spec.wire:
            for param in module._parameters.values():
                if isinstance(param, DTensor) and param.ndim and param.dtype == torch.float64:
                    local: Any = param._local_tensor
                    local.fsdp_pre_all_gather = types.MethodType(_pre_all_gather, local)
                    local.fsdp_post_all_gather = types.MethodType(_post_all_gather, local)


def _pre_all_gather(self: torch.Tensor, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    high = self.float()
    return (high, (self - high).float()), None


def _post_all_gather(
    self: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> Any:
    high, low = outputs
    tensor = (high.double() + low).to(param_dtype)
    if out is not None:
        out.copy_(tensor)
        return None
    return tensor, (tensor,)
