"""Document 001, the tests of PyTorch's sharded grad scaler, with its models and our wrapper.

Each test has the name it has there. The reference of the wrapper is DDP under torch's own scaler;
for half precision, DDP of an fp16 copy whose gradients go to fp32 parameters, so that parameters
can be compared too. ``tests/train/test_grad_scaler.py`` goes further.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_fsdp import (
    DEVICEInitMode,
    DummyProcessGroup,
    FSDPInitMode,
    NestedWrappedModule,
    NonUniformReqGradNWM,
    TransformerWithSharedParams,
)

from composable_shard import MaterializationError, ShardedGradScaler
from composable_shard.compat.fsdp1 import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from composable_shard.testing import run_ranks
from seeds.models import save_and_load

NUM_RANKS = 2
FP16 = torch.float16


def on_ranks(device: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``fn(device, ...)``: on two CPU ranks, or on one GPU in this process."""
    if device == "cpu":
        return run_ranks(fn, NUM_RANKS, device, *args, timeout=120)
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        return [fn(device, *args)]
    finally:
        dist.destroy_process_group()


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@contextmanager
def models_of_torch(device: str) -> Iterator[None]:
    """Let the test models of torch wrap their layers by our class, and lie on ``device``."""
    with (
        mock.patch.object(common_fsdp, "FSDP", FullyShardedDataParallel),
        mock.patch.object(common_fsdp, "DEVICE_TYPE", device),
    ):
        yield


def test_grad_scaling() -> None:
    scaler = ShardedGradScaler(init_scale=2.0, process_group=DummyProcessGroup(0, 1), enabled=True)
    t0, t1 = torch.full((1,), 4.0), torch.full((1,), 8.0)
    outputs = [t1.clone(), (t0.clone(), t1.clone()), [t0.clone(), t1.clone()]]
    outputs = scaler.scale(outputs)
    assert outputs[0] == 16.0 and outputs[1][0] == 8.0 and outputs[1][1] == 16.0
    assert outputs[2][0] == 8.0 and outputs[2][1] == 16.0
    assert [type(output) for output in outputs] == [torch.Tensor, tuple, list]
    assert scaler._scale.device == t1.device


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True)


def test_scaling_unscaling_sparse() -> None:
    scaler = ShardedGradScaler(init_scale=2.0, process_group=DummyProcessGroup(0, 1), enabled=True)
    inverse, found = torch.full((1,), 0.5), torch.zeros(1)

    def unscale(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        param = torch.zeros(2, 3, dtype=grad.dtype).to_sparse()
        param.grad = grad
        optimizer = torch.optim.SGD([param], lr=1.0)
        found.zero_()
        return scaler._unscale_grads_(optimizer, inverse, found)[param.device], param.grad

    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
    values = torch.tensor([16.0, 32.0, 64.0])
    sparse = sparse_tensor(indices, values)
    for grad in (sparse.clone(), sparse.coalesce()):
        heard, unscaled = unscale(grad)
        assert heard == 0.0
        assert torch.equal(unscaled.to_dense(), (sparse / 2).to_dense())
    values = torch.tensor([16.0, 32.0, float("inf")])
    assert unscale(sparse_tensor(indices, values))[0] == 1.0
    # Finite as it is, and not where its duplicates are added.
    indices = torch.tensor([[1, 1, 1], [0, 0, 2]])
    values = torch.tensor([2**15, 2**15, 1.0], dtype=FP16)
    assert unscale(sparse_tensor(indices, values))[0] == 1.0


def test_inf_gradients_skip_optim_step() -> None:
    scaler = ShardedGradScaler(init_scale=2.0, process_group=DummyProcessGroup(0, 1), enabled=True)
    loss = torch.full((1,), 4.0)
    t0 = torch.tensor([1.0])
    t0.grad = torch.tensor([float("inf")])
    optimizer = torch.optim.SGD([t0], lr=1.0)
    scaler.scale(loss)
    assert scaler.step(optimizer, lambda: 1.0) is None  # the closure was not called
    assert t0 == 1.0
    scaler.update()
    t0.grad = torch.tensor([1.0])
    assert scaler.step(optimizer, lambda: 1.0) == 1.0
    assert t0 == 0.0


FULL = MixedPrecision()
HALF = MixedPrecision(param_dtype=FP16, reduce_dtype=FP16, buffer_dtype=FP16)
SCALES = {NestedWrappedModule: 2.0**16, NonUniformReqGradNWM: 2.0**11}
NUM_STEPS = 4 if os.environ.get("BRIEF_EXAMPLES") else 10


class Reference:
    """DDP under torch's scaler; in half precision with fp32 parameters beside."""

    def __init__(self, model: nn.Module, half: bool, scaler: torch.amp.GradScaler) -> None:
        self.half = half
        self.compute = DDP(copy.deepcopy(model).half() if half else model)
        self.params = list(model.parameters())
        self._scaler = scaler
        self._optimizer = torch.optim.SGD(self.params, lr=1e-2, momentum=0.9)

    def step(self, device: str) -> torch.Tensor:
        self._optimizer.zero_grad()
        self.compute.zero_grad()
        for param, low in zip(self.params, self.compute.parameters(), strict=True):
            if self.half:
                low.data.copy_(param.data)
        module = self.compute.module
        inputs = module.get_input(torch.device(device))
        if self.half:
            inputs = tuple(x.half() for x in inputs)
        loss = module.get_loss(inputs, self.compute(*inputs))
        module.run_backward(self._scaler.scale(loss))
        for param, low in zip(self.params, self.compute.parameters(), strict=True):
            if self.half and low.grad is not None:
                param.grad = low.grad.float()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()


def train_beside_ddp(
    device: str,
    kind: type[nn.Module],
    mode: DEVICEInitMode,
    precision: MixedPrecision,
    kwargs: dict[str, Any],
) -> list[float]:
    """Train both, comparing losses and parameters after each step; return the scales."""
    with models_of_torch(device):
        plain = kind.init(
            dist.group.WORLD, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
        )
        kwargs = {**kwargs, "mixed_precision": precision}
        if mode is DEVICEInitMode.DEVICE_NEVER:
            kwargs["device_id"] = device
        model = kind.init(
            dist.group.WORLD, FSDPInitMode.RECURSIVE, mode, kwargs, deterministic=True
        )
    model = FullyShardedDataParallel(model, dist.group.WORLD, **kwargs)
    if mode is DEVICEInitMode.DEVICE_AFTER:
        model = model.to(device)
    offloads = kwargs["cpu_offload"].offload_params
    half = precision.param_dtype is FP16
    scale = SCALES[kind]
    reference = Reference(plain, half, torch.amp.GradScaler(device, init_scale=scale))
    scaler = ShardedGradScaler(device, init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    keeps = model.sharding_strategy is not ShardingStrategy.FULL_SHARD  # one rank shards nothing
    scales = []
    for _ in range(NUM_STEPS):
        expected = reference.step(device)
        optimizer.zero_grad()
        inputs = model.module.get_input(torch.device(device))
        output = model(*inputs)
        if offloads and not keeps:
            assert_on_cpu(model)
        loss = model.module.get_loss(inputs, output)
        scaled = scaler.scale(loss)
        assert scaled.dtype == loss.dtype == (FP16 if half else torch.float32)
        model.module.run_backward(scaled)
        if offloads:
            assert_on_cpu(model)
        scaler.step(optimizer)
        scaler.update()
        save_and_load(model)
        torch.testing.assert_close(loss.detach(), expected)
        assert_same_params(model, reference.params)
        scales.append(scaler.get_scale())
        assert scales[-1] == reference._scaler.get_scale()
    return scales


def assert_on_cpu(model: nn.Module) -> None:
    assert {param.device.type for param in model.parameters()} == {"cpu"}


def assert_same_params(
    model: FullyShardedDataParallel, expected: list[nn.Parameter], tolerance: float = 1.3e-6
) -> None:
    with FullyShardedDataParallel.summon_full_params(model):
        for param, other in zip(model.parameters(), expected, strict=True):
            assert param.dtype == other.dtype == torch.float32
            here, there = param.detach().to(other.device), other.detach()
            torch.testing.assert_close(here, there, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("offload", [True, False], ids=["offload", "no offload"])
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.SHARD_GRAD_OP, None, ShardingStrategy.NO_SHARD],
    ids=["SHARD_GRAD_OP", "default", "NO_SHARD"],
)
@pytest.mark.parametrize("precision", [HALF, FULL], ids=["fp16", "fp32"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_fsdp_ddp_parity_with_grad_scaler(
    device: str,
    use_orig_params: bool,
    precision: MixedPrecision,
    strategy: ShardingStrategy | None,
    offload: bool,
) -> None:
    kind = NonUniformReqGradNWM if use_orig_params else NestedWrappedModule
    kwargs = {
        "cpu_offload": CPUOffload(offload_params=offload),
        "sharding_strategy": strategy,
        "use_orig_params": use_orig_params,
    }
    modes = [DEVICEInitMode.DEVICE_BEFORE, DEVICEInitMode.DEVICE_AFTER]
    if offload:
        modes[1 + (device == "cpu") :] = [DEVICEInitMode.DEVICE_NEVER]
    for mode in modes:
        for scales in on_ranks(device, train_beside_ddp, kind, mode, precision, kwargs):
            first = SCALES[kind]
            if precision.param_dtype is None or use_orig_params:
                assert scales == [first] * NUM_STEPS
            else:  # it starts where half precision overflows
                assert scales[0] == first / 2 and scales[-1] == scales[-2]


def move_what_is_offloaded(device: str, elsewhere: str, text: str) -> None:
    with models_of_torch(device):
        kwargs = {"cpu_offload": CPUOffload(offload_params=True)}
        model = NestedWrappedModule.init(
            dist.group.WORLD, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_NEVER, kwargs
        )
    model = FullyShardedDataParallel(model, dist.group.WORLD, **kwargs).to(elsewhere)
    with pytest.raises(MaterializationError) as caught:
        model(*model.module.get_input(torch.device(device)))
    assert isinstance(caught.value, RuntimeError)
    assert text in str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_parameters_that_are_moved_are_refused(device: str) -> None:
    """On the device in the document; on a machine without, the meta device is another."""
    cases = {
        "cuda": ("cuda", "on cuda:0; leave the module on cpu, because its policy offloads it"),
        "cpu": ("meta", "on meta; call init_sharded(model, seed=...)"),
    }
    on_ranks(device, move_what_is_offloaded, *cases[device])


def own_values(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of what this rank holds of the parameters."""
    values = (param.detach() for param in model.parameters())
    return [(v.to_local() if isinstance(v, DTensor) else v).clone() for v in values]


def find_inf(device: str, use_orig_params: bool, offload: CPUOffload) -> None:
    """Train a wrapped transformer and the same under DDP, both with Adam and a scaler."""
    with models_of_torch(device):
        plain = TransformerWithSharedParams.init(
            dist.group.WORLD, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
        )
    reference = DDP(copy.deepcopy(plain))
    model = FullyShardedDataParallel(
        plain,
        use_orig_params=use_orig_params,
        cpu_offload=offload,
        auto_wrap_policy=ModuleWrapPolicy({TransformerEncoderLayer, TransformerDecoderLayer}),
        device_id=device,
    )
    scalers = (torch.amp.GradScaler(device, init_scale=2.0), ShardedGradScaler(device, 2.0))
    sides: list[tuple[Any, torch.optim.Optimizer, torch.amp.GradScaler]] = [
        # A large eps: the gradient of the bias of attention keys is only rounding errors.
        (one, torch.optim.Adam(one.parameters(), lr=1e-2, eps=1e-2), scaler)
        for one, scaler in zip((reference, model), scalers, strict=True)
    ]
    torch.manual_seed(42 + dist.get_rank() + 1)
    for iteration in range(NUM_STEPS):
        bad = iteration % 2 == 0
        losses = []
        for one, optimizer, scaler in sides:
            inputs = one.module.get_input(torch.device(device))
            optimizer.zero_grad()
            loss = one.module.get_loss(inputs, one(*inputs))
            losses.append(scaler.scale(loss))
            losses[-1].backward()
            before = own_values(one)
            # Of ours one rank alone finds it; the others hear of it.
            if bad and (one is reference or dist.get_rank() == 0):
                next(p for p in one.parameters() if p.grad is not None).grad.fill_(float("inf"))
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            factor = scaler.get_backoff_factor() if bad else 1.0
            assert scaler.get_scale() == scale * factor
            for value, other in zip(own_values(one), before, strict=True):
                assert torch.equal(value, other) == (bad or not value.numel())
        torch.testing.assert_close(losses[1], losses[0])
        assert_same_params(model, list(reference.parameters()), 1e-4)


@pytest.mark.parametrize("offload", [True, False], ids=["offload", "no offload"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_sharded_grad_scaler_found_inf(device: str, use_orig_params: bool, offload: bool) -> None:
    on_ranks(device, find_inf, use_orig_params, CPUOffload(offload_params=offload))
