"""Scaled training against the unsharded model under torch's own scaler, on any mix of meshes."""

from __future__ import annotations

import copy
import math
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Net, assert_parity, average_gradients, full, own_input, train_step, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import ShardedGradScaler, clip_grad_norm_, fully_shard
from composable_shard.testing import fake_ranks

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def torch_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **kwargs)


def our_scaler(**kwargs: Any) -> ShardedGradScaler:
    return ShardedGradScaler("cpu", **kwargs)


def scaled_backward(scaler: torch.amp.GradScaler, model: nn.Module, step: int) -> None:
    scaler.scale(model(own_input(step)).float().square().sum()).backward()
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        average_gradients(model.parameters())


def set_first(param: torch.Tensor, value: float) -> None:
    """Write ``value`` into the part of a gradient that this rank holds, if it holds any."""
    grad = param.grad
    assert grad is not None
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    if local.numel():
        local.view(-1)[0] = value


# Whole trainings ------------------------------------------------------------------------------


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)]


def adam_fused(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One that divides by the scale, and skips, in its own kernel."""
    return [torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)]


def groups_of_two(model: nn.Module) -> list[torch.optim.Optimizer]:
    inp, out = list(model.inp.parameters()), list(model.out.parameters())
    first = torch.optim.SGD([{"params": inp, "lr": 0.05}, {"params": out}], lr=0.02)
    return [first, torch.optim.Adam(model.blocks.parameters(), lr=1e-2)]


FAULTS = {2: math.inf, 3: math.nan, 7: -math.inf}
"""At which steps a gradient of one rank is not finite, and what it is."""


def assert_close_parity(model: nn.Module, reference: nn.Module) -> None:
    """Compare but for the last bit: the fused kernel rounds the end of a tensor in another way."""
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param.detach()), other.detach(), rtol=1e-5, atol=1e-6)


def hybrid_nets() -> tuple[Net, Net]:
    return two_nets(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


# 2 good steps grow it, a bad one halves it: steps 0-1, 4-5 and 8-9 are pairs, 6 stays alone.
SCALES = [8.0, 32.0, 16.0, 8.0, 8.0, 32.0, 32.0, 16.0, 16.0, 64.0]


@pytest.mark.brief(6)
@pytest.mark.parametrize(("make", "num_ranks"), [(two_nets, 1), (two_nets, 3), (hybrid_nets, 4)])
@pytest.mark.parametrize("optimizers_of", [sgd, adam, adam_fused, groups_of_two])
@on_ranks("num_ranks")
def test_training_equals_the_unsharded_one(
    optimizers_of: Optimizers, make: Callable[[], tuple[Net, Net]]
) -> None:
    """Train ten steps; at some of them one rank alone has a gradient that is not finite."""
    reference, model = make()
    settings = {"init_scale": 8.0, "growth_interval": 2, "growth_factor": 4.0}
    scalers = (torch_scaler(**settings), our_scaler(**settings))
    every = (optimizers_of(reference), optimizers_of(model))
    scales = []
    for step in range(10):
        for one, scaler, optimizers in zip((reference, model), scalers, every, strict=True):
            scaled_backward(scaler, one, step)
            if step in FAULTS and (one is reference or dist.get_rank() == 0):
                set_first(one.blocks[1].up.weight, FAULTS[step])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        if optimizers_of is adam_fused:
            assert_close_parity(model, reference)
        else:
            assert_parity(model, reference)
        assert scalers[1].state_dict() == scalers[0].state_dict()
        scales.append(scalers[1].get_scale())
    assert scales == SCALES


# Unscaling ------------------------------------------------------------------------------------


@on_ranks(2)
def test_unscaled_gradients_can_be_clipped() -> None:
    reference, model = two_nets()
    scaler, (optimizer,), (other,) = our_scaler(init_scale=1024.0), sgd(model), sgd(reference)
    scaled_backward(scaler, model, 0)
    train_step(reference, 0, None)
    before = [
        (p.grad, p.grad._local_tensor, p.grad._local_tensor.data_ptr()) for p in params(model)
    ]
    scaler.unscale_(optimizer)
    for param, (grad, local, pointer) in zip(params(model), before, strict=True):
        assert param.grad is grad and grad._local_tensor is local and local.data_ptr() == pointer
    assert_parity(model, reference)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), expected)
    assert expected > 0.5
    scaler.step(optimizer)
    other.step()
    assert_close_parity(model, reference)
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        scaler.step(optimizer)


def params(model: nn.Module) -> list[Any]:
    return list(model.parameters())


@pytest.mark.parametrize("faulty", [0, 1])
@on_ranks(3)
def test_a_rank_without_gradients_skips_too(faulty: int) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, 2, bias=False))  # rank 2 of 3 has no row
    unused = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), unused], lr=1.0)
    before = full(model.weight.detach())
    scaler = our_scaler(init_scale=4.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    if dist.get_rank() == faulty:
        set_first(model.weight, math.inf)
    if dist.get_rank() == 2:
        model.weight.grad = None
    scaler.step(optimizer)
    scaler.update()
    assert [torch.equal(full(model.weight.detach()), before), scaler.get_scale()] == [True, 2.0]


# Meshes ---------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def grid(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def tensor_parallel() -> nn.Module:
    """Shard over one axis what is tensor-parallel over the other."""
    mesh, model = grid("shard", "tp"), layers()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["shard"])


def own_meshes() -> nn.Module:
    model = layers()
    fully_shard(model[0], mesh=grid("replicate", "shard"))
    return fully_shard(model)


MESHES: dict[str, Callable[[], nn.Module]] = {
    "tensor parallel": tensor_parallel,
    "own meshes": own_meshes,
    "halves": lambda: fully_shard(layers(), mesh=grid("stage", "shard")["shard"]),
}
GROUPS: dict[str, Callable[[], dist.ProcessGroup | None]] = {
    "default": lambda: None,
    "pairs": lambda: dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0],
}


@pytest.mark.parametrize(
    ("kind", "ranks", "faulty"),
    [("own meshes", "default", 3), ("tensor parallel", "default", 2), ("halves", "pairs", 0)],
)
@on_ranks(4)
def test_ranks_skip_together(kind: str, ranks: str, faulty: int) -> None:
    model = MESHES[kind]()
    scaler, (optimizer,) = our_scaler(init_scale=4.0, process_group=GROUPS[ranks]()), sgd(model)
    scaler.scale(model(own_input()).square().sum()).backward()
    if dist.get_rank() == faulty:
        set_first(model[0].weight, math.inf)
    before = [param.detach().to_local().clone() for param in model.parameters()]
    with CommDebugMode() as counted:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    after = [param.detach().to_local() for param in model.parameters()]
    skips = (kind, ranks) != ("halves", "pairs") or dist.get_rank() < 2
    assert all(map(torch.equal, before, after)) == skips
    assert scaler.get_scale() == (2.0 if skips else 4.0)
    assert counted.get_total_counts() == 1


def with_grad(value: torch.Tensor, mesh: DeviceMesh, placement: Any = None) -> nn.Parameter:
    param = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None))
    local = param.to_local() if placement is None else value
    placements = [placement or Shard(0)]
    param.grad = DTensor.from_local(local.detach().clone(), mesh, placements, run_check=False)
    return param


@on_ranks(2)
def test_a_group_that_lacks_ranks_of_a_mesh() -> None:
    scaler = our_scaler(
        process_group=[dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    )
    scaler.scale(torch.ones(()))
    param = with_grad(torch.ones(2), DeviceMesh("cpu", [0, 1]))
    with pytest.raises(ValueError) as caught:
        scaler.unscale_(torch.optim.SGD([param]))
    assert str(caught.value) == (
        f"Expected process_group to have all ranks of {param.device_mesh}, or to be left out, got "
        f"[{dist.get_rank()}]"
    )


# Gradients that are not reduced yet -------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_accumulated_gradients_count_as_what_they_stand_for() -> None:
    """A step on gradients that are accumulated without sync is that on their mean."""
    reference, model = two_nets()
    scalers, optimizers = (torch_scaler(), our_scaler()), [*adam(reference), *adam(model)]
    with model.no_sync():
        scaled_backward(scalers[1], model, 0)
    scaled_backward(scalers[0], reference, 0)
    kinds = {param.grad.placements for param in model.parameters()}
    assert dist.get_world_size() == 1 or kinds == {(Partial("avg"),)}
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.step(optimizer)
    assert {param.grad.placements for param in model.parameters()} == kinds
    for param, other in zip(params(model), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), other.grad)
    assert_close_parity(model, reference)


@on_ranks(2)
def test_a_pending_sum_that_might_overflow_is_skipped_and_a_product_refused() -> None:
    """Each rank's part is finite; two of them may not be."""

    def scale_after(value: float, kind: str) -> float:
        param = with_grad(torch.full((2,), value), init_device_mesh("cpu", (2,)), Partial(kind))
        scaler = our_scaler(init_scale=1.0)
        scaler.scale(torch.ones(()))
        scaler.step(torch.optim.SGD([param], lr=1.0))
        scaler.update()
        return scaler.get_scale()

    for kind in ("sum", "avg"):
        assert [scale_after(value, kind) for value in (1e38, 3e38, math.inf)] == [1.0, 0.5, 0.5]
    with pytest.raises(ValueError) as caught:
        scale_after(1.0, "product")
    assert str(caught.value) == (
        "Expected pending gradients of ('sum', 'avg', 'max', 'min'), got P(product); redistribute "
        "them first"
    )


# Kinds of gradients ---------------------------------------------------------------------------


def unscale_alone(grads: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], float]:
    """Unscale gradients without any process group; return them and what ``update`` makes of it."""
    held = []
    for grad in grads:
        zeros = TwoTensor(grad.a * 0, grad.b * 0) if isinstance(grad, TwoTensor) else 0 * grad
        held.append(nn.Parameter(zeros.to_dense() if grad.is_sparse else zeros))
        held[-1].grad = grad
    scaler = our_scaler(init_scale=4.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(held, lr=1.0)
    scaler.unscale_(optimizer)
    scaler.update()
    return [param.grad for param in held], scaler.get_scale()


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.complex64, torch.complex128]


def test_gradients_of_any_dtype() -> None:
    grads = [torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES]
    grads += [torch.ones(4, 4)[:, ::2], torch.empty(0, 3), torch.tensor(2.0)]
    grads += [torch.tensor([4 + 8j]).conj()]
    assert grads[-1].is_conj()
    expected = [grad / 4 for grad in grads]
    unscaled, scale = unscale_alone(grads)
    assert scale == 4.0
    for dtype, value in product(DTYPES, (math.inf, math.nan)):
        bad = complex(1.0, value) if dtype.is_complex else value
        assert unscale_alone([torch.ones(3), torch.tensor([1.0, bad], dtype=dtype)])[1] == 2.0
    for grad, wanted, original in zip(unscaled, expected, grads, strict=True):
        assert grad is original and torch.equal(grad, wanted)


def test_tensor_subclasses() -> None:
    """Both inner tensors are unscaled, and looked into."""
    (unscaled,), scale = unscale_alone([TwoTensor(torch.ones(2), torch.full((2,), 2.0))])
    assert torch.equal(unscaled.a, torch.full((2,), 0.25)) and scale == 4.0
    assert torch.equal(unscaled.b, torch.full((2,), 0.5))
    assert unscale_alone([TwoTensor(torch.ones(2), torch.tensor([1.0, math.inf]))])[1] == 2.0


# Scaling --------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor | None = None


def test_scaling_containers() -> None:
    four, eight = torch.full((1,), 4.0), torch.full((1,), 8.0)
    scaler = our_scaler(init_scale=2.0)
    outputs = scaler.scale([eight, (four, eight), [four, {"loss": eight}], Pair(four, [eight])])
    sixteen = torch.full((1,), 16.0)
    expected = [sixteen, (eight, sixteen), [eight, {"loss": sixteen}], Pair(eight, [sixteen])]
    assert str(outputs) == str(expected) and type(outputs[3]) is Pair
    assert torch.equal(four, torch.full((1,), 4.0))
    assert [value.item() for value in scaler.scale(iter([four, eight]))] == [8.0, 16.0]
    scaled = scaler.scale(Output(eight))
    assert type(scaled) is Output and scaled.loss.item() == 16.0 and scaled.logits is None
    ordered = scaler.scale(OrderedDict(loss=four, name="x"))
    assert type(ordered) is OrderedDict and ordered["loss"].item() == 8.0
    assert scaler.get_scale() == 2.0


def test_scaled_outputs_keep_their_dtype() -> None:
    """Also a scalar of half precision, which multiplied by the scale would be promoted."""
    for value in [torch.ones((), dtype=dtype, requires_grad=True) for dtype in DTYPES]:
        outputs, eight = our_scaler(init_scale=8.0).scale(value), torch.full_like(value, 8).detach()
        (grad,) = torch.autograd.grad(outputs.abs(), value)
        for one in (outputs, grad):
            assert one.dtype == value.dtype and torch.equal(one.detach(), eight)


# The scaler itself ----------------------------------------------------------------------------


def test_its_state_is_that_of_torch() -> None:
    ours, theirs = our_scaler(init_scale=4.0), torch_scaler(init_scale=8.0, growth_interval=7)
    theirs.scale(torch.ones(()))
    theirs._growth_tracker.fill_(3)
    state = theirs.state_dict()
    for scaler in (ours, our_scaler()):
        scaler.load_state_dict(state)
        assert scaler.state_dict() == state
        assert scaler.scale(torch.ones(())).item() == 8.0
        assert scaler.state_dict() == state
    theirs.load_state_dict(ours.state_dict())
    loaded = pickle.loads(pickle.dumps(ours))
    assert type(loaded) is ShardedGradScaler and loaded.state_dict() == state
    assert copy.deepcopy(ours).state_dict() == state
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        ours.load_state_dict({})


def test_one_that_is_not_enabled_does_nothing() -> None:
    scaler = our_scaler(enabled=False, growth_factor=0.0)
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([1.0, math.inf])
    optimizer = torch.optim.SGD([param], lr=1.0)
    assert scaler.scale("loss") == "loss" and not scaler.is_enabled()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.detach(), torch.tensor([0.0, -math.inf]))
    assert scaler.state_dict() == {} and scaler.get_scale() == 1.0


def test_names_order_and_defaults_of_arguments_are_those_of_torch() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Torchs

    ours, theirs = signature(ShardedGradScaler).parameters, signature(Torchs).parameters
    assert list(ours) == list(theirs)
    differing = {name for name in ours if ours[name].default != theirs[name].default}
    assert differing == {"device"}  # the CPU where there is no accelerator
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    scaler = ShardedGradScaler()
    assert scaler._device == ("cpu" if accelerator is None else accelerator.type)
    assert scaler.is_enabled()


NOT_SCALED = "TypeError: Expected outputs to be tensors or containers of tensors, got {}: {}"
REFUSED: dict[str, Callable[[], object]] = {
    "TypeError: Expected process_group to be a ProcessGroup that this rank is in, got int: "
    f"{dist.GroupMember.NON_GROUP_MEMBER}": lambda: our_scaler(process_group=dist.new_group([0])),
    NOT_SCALED.format("float", 1.0): lambda: our_scaler().scale(1.0),
    NOT_SCALED.format("str", "'loss'"): lambda: our_scaler().scale("loss"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text: str) -> None:
    with fake_ranks(2, rank=1), pytest.raises((TypeError, ValueError)) as caught:
        REFUSED[text]()
    assert f"{type(caught.value).__name__}: {caught.value}" == text
