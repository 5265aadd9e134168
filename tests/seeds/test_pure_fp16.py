"""Parameters and gradients in half precision from end to end, and which dtype wins.

Each test is named after that of the document. Half precision computes on the CPU as on CUDA, so all
of it runs here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from composable_shard import FSDPModule
from composable_shard.compat.fsdp1 import CPUOffload, MixedPrecision
from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from composable_shard.testing import fake_ranks
from seeds.models import (
    CPU,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    full,
    gpu,
    nested,
    save_and_load,
    two_of,
    wrap_nested,
)

HALF = torch.float16


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("cast_before", [False, True])
@pytest.mark.parametrize("offload_params", [True, False])
@on_ranks(2)
def test_pure_fp16_training(offload_params: bool, cast_before: bool) -> None:
    plain, reference = two_of(nested())
    distributed = DDP(reference.half())
    plain = plain.half() if cast_before else plain
    model = wrap_nested(plain, cpu_offload=CPUOffload(offload_params), device_id=CPU).half()
    batch = tuple(t.half() for t in model.module.get_input(CPU))
    losses = []
    for trained in (distributed, model):
        optimizer = sgd(trained)
        out = trained(*batch)
        loss = out.sum()
        assert out.dtype == HALF
        losses.append(loss.detach())
        loss.backward()
        if trained is model:
            assert_same_gradients(model, reference, rtol=2e-3, atol=1e-3)
            assert {(p.grad.dtype, p.grad.device) for p in model.parameters()} == {(HALF, CPU)}
        optimizer.step()
    assert torch.equal(losses[0], losses[1])
    assert save_and_load(model) == {HALF}
    assert {param.dtype for param in model.parameters()} == {HALF}
    assert_same_parameters(model, reference, rtol=2e-3, atol=1e-4)


PRECISIONS = [
    MixedPrecision(),
    MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
    MixedPrecision(param_dtype=torch.float32),
]


def watch_dtypes(model: FSDP) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Return sets of the dtypes in which layers compute and in which gradients are reduced."""
    computed: set[torch.dtype] = set()
    reduced: set[torch.dtype] = set()

    def before(layer: Any, inputs: tuple[torch.Tensor]) -> None:
        computed.update((layer.weight.dtype, inputs[0].dtype))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(lambda *args: computed.add(args[-1].dtype))
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda grads: reduced.add(grads.dtype))
    return computed, reduced


def check_dtypes(
    model: Any, reference: nn.Module, precision: MixedPrecision, home: torch.device
) -> None:
    """Run a backward; compare dtypes, and gradients with those of ``reference``."""
    assert {param.dtype for param in model.parameters()} == {HALF}
    computed, reduced = watch_dtypes(model)
    device = model.compute_device
    batch = tuple(t.half() for t in model.module.get_input(device))
    model(*batch).sum().backward()
    expected = precision.param_dtype or HALF
    assert computed == {expected}
    assert reduced == {precision.reduce_dtype or expected}
    reference.half().to(expected)
    reference(*(t.to(expected) for t in batch)).sum().backward()
    average_gradients(reference)
    for param, own in zip(model.parameters(), reference.parameters(), strict=True):
        assert param.device == param.grad.device == home
        assert param.dtype == param.grad.dtype == HALF
        grad = full(param.grad).to(device)
        torch.testing.assert_close(grad, own.grad.half(), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("wraps_parts", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS, ids=["as_it_is", "half", "single"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("to_half_before_fsdp_init", [False, True])
@on_ranks(2)
def test_fp16_dtypes(
    to_half_before_fsdp_init: bool,
    use_orig_params: bool,
    precision: MixedPrecision,
    wraps_parts: bool,
) -> None:
    plain, reference = two_of(nested())
    plain = plain.half() if to_half_before_fsdp_init else plain
    wrap = wrap_nested if wraps_parts else FSDP
    kwargs = {"use_orig_params": use_orig_params, "mixed_precision": precision}
    check_dtypes(wrap(plain, device_id=CPU, **kwargs).half(), reference, precision, CPU)


@gpu()
@pytest.mark.parametrize("precision", PRECISIONS, ids=["as_it_is", "half", "single"])
@pytest.mark.parametrize("offload_params", [True, False])
def test_fp16_dtypes_on_gpu(offload_params: bool, precision: MixedPrecision) -> None:
    """compute on a device, shards there or in pinned memory"""
    device = torch.device("cuda", torch.cuda.current_device())
    with fake_ranks(1):
        plain, reference = two_of(nested(device).half())
        model = wrap_nested(
            plain,
            mixed_precision=precision,
            cpu_offload=CPUOffload(offload_params),
            device_id=device,
        )
        check_dtypes(model, reference, precision, CPU if offload_params else device)
