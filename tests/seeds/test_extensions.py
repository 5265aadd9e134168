"""Document 002, the extension tests of PyTorch: tensor subclasses that gather themselves.

Each test has the name it has there. Each runs between processes and between threads, on the CPU;
between threads on one CUDA device too. ``tests/subclasses`` goes further.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import average_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_fsdp import MLP, check_sharded_parity
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import (
    inner_models,
    low_precision_step,
    shard_layers,
    two_tensor_hooks,
    two_tensor_mlp,
)

from composable_shard import MixedPrecisionPolicy
from composable_shard.testing import run_ranks, run_threads

NUM_RANKS = 2
FORMS = [
    pytest.param(run_ranks, "cpu", id="processes"),
    pytest.param(run_threads, "cpu", id="threads"),
    pytest.param(
        run_threads,
        "cuda",
        id="threads on a GPU",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)


def mesh_on(device: str) -> DeviceMesh:
    return init_device_mesh(device, (NUM_RANKS,))


def run_hooked(run: Callable[..., list[Any]], fn: Callable[..., None], *args: Any) -> list[Any]:
    """Run with the hooks of pairs; return which branches ran, of each process."""
    if run is run_ranks:
        return run(hooked, NUM_RANKS, fn, *args)
    with two_tensor_hooks() as calls:  # set on the class, which the threads share
        run(fn, NUM_RANKS, *args)
        assert calls[0] == "create"
        return [["create"] * 6 + [call for call in calls if call != "create"]]


def hooked(fn: Callable[..., None], *args: Any) -> list[str]:
    with two_tensor_hooks() as calls:
        fn(*args)
        return list(calls)


def sharded_from_meta(make: Callable[[], nn.Sequential], device: str, **kwargs: Any) -> Any:
    """Shard on the meta device, then give each rank memory and values."""
    with torch.device("meta"):
        model = make()
    shard_layers(model, mesh=mesh_on(device), **kwargs).to_empty(device=device)
    for param in model.parameters():
        assert param.device.type == device
        nn.init.trunc_normal_(param)
    return model


def own_input(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(42 + dist.get_rank() + 1)
    return torch.randn(2, 8, generator=generator).to(device)


def whole(param: torch.Tensor, inner: str | None) -> torch.Tensor:
    """Gather what all ranks hold of a parameter, or of one of its inner tensors."""
    assert isinstance(param, DTensor)
    local = param.detach().to_local()
    own = local if inner is None else getattr(local, inner)
    parts = [torch.empty_like(own) for _ in range(NUM_RANKS)]  # rows divide evenly
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)


def plain_models(model: nn.Module) -> list[nn.Sequential]:
    """Return a plain model for the first and for the second inner tensors of the weights."""
    plain = []
    for inner in ("a", "b"):
        one = plain_mlp()
        for name, param in model.named_parameters():
            values = whole(param, inner)
            one.to(values.device).get_parameter(name).data.copy_(values)
        plain.append(one)
    return plain


def assert_trains_as(
    model: nn.Module,
    plain: Sequence[nn.Sequential],
    step: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    device: str,
) -> None:
    """Train ``model`` three steps beside plain models, whose forward and backward is ``step``."""
    optimizers = [adam(one) for one in (model, *plain)]
    inp = own_input(device)
    for _ in range(3):
        loss = model(inp).sum()
        loss.backward()
        for one, inner in zip(plain, ("a", "b"), strict=True):
            expected = step(one, inp).detach()
            torch.testing.assert_close(getattr(loss, inner).detach(), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, inner in zip(plain, ("a", "b"), strict=True):
            for name, param in model.named_parameters():
                expected = one.get_parameter(name).detach()
                torch.testing.assert_close(whole(param, inner), expected)


def train_parity(model: nn.Sequential, reshard_after_forward: bool, device: str) -> None:
    case = TestCase()
    model = copy.deepcopy(model).to(device)
    reference = copy.deepcopy(model)
    plain = inner_models(model)
    shard_layers(model, mesh=mesh_on(device), reshard_after_forward=reshard_after_forward)
    optimizers = [adam(one) for one in (reference, model)]
    check_sharded_parity(case, reference, model)
    inp = own_input(device)
    for iteration in range(10):
        losses = []
        for one in (reference, model):
            losses.append(one(inp).sum())
            losses[-1].backward()
        average_gradients(reference.parameters())
        case.assertEqual(losses[0], losses[1])
        check_sharded_parity(case, reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=iteration % 2 == 0)
        check_sharded_parity(case, reference, model)
    assert not any(
        torch.equal(param.a, plain[0].get_parameter(name).to(device))
        for name, param in reference.named_parameters()
    )


@pytest.mark.brief(1)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize(("run", "device"), FORMS)
def test_all_gather_extensions_train_parity(
    run: Callable[..., list[Any]], device: str, reshard_after_forward: bool
) -> None:
    torch.manual_seed(42)
    model = two_tensor_mlp()
    for calls in run_hooked(run, train_parity, model, reshard_after_forward, device):
        assert calls[:6] == ["create"] * 6
        assert set(calls[6:]) == {"alias"}  # ``out`` and the gathered tensors share memory


def end_to_end(reshard_after_forward: bool, device: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    kwargs = {"reshard_after_forward": reshard_after_forward, "mp_policy": policy}
    model = sharded_from_meta(two_tensor_mlp, device, **kwargs)
    assert {type(param.to_local()) for param in model.parameters()} == {TwoTensor}
    assert_trains_as(model, plain_models(model), low_precision_step, device)


@pytest.mark.brief(1)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize(("run", "device"), FORMS)
def test_all_gather_extensions_end_to_end(
    run: Callable[..., list[Any]], device: str, reshard_after_forward: bool
) -> None:
    for calls in run_hooked(run, end_to_end, reshard_after_forward, device):
        assert calls[:6] == ["create"] * 6
        assert set(calls[6:]) == {"cast"}


def monkey_patch(device: str) -> list[str]:
    """Let weights travel in bf16 by hooks that are set on the local tensors alone."""
    branches: list[str] = []

    def fsdp_pre_all_gather(self: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self: torch.Tensor,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        (tensor,) = all_gather_outputs
        assert metadata is None, metadata
        assert tensor.dtype == torch.bfloat16, tensor.dtype
        branches.append("create" if out is None else "copy")
        if out is not None:
            out.copy_(tensor)
            return None
        return tensor.to(param_dtype), (tensor,)

    model = sharded_from_meta(two_tensor_mlp, device)
    weights = [param for name, param in model.named_parameters() if "weight" in name]
    assert len(weights) == 6
    for weight in weights:
        # The document asks ``to_local``, which now gives a view: what is set on it goes with it.
        local = weight._local_tensor
        local.fsdp_pre_all_gather = fsdp_pre_all_gather
        local.fsdp_post_all_gather = fsdp_post_all_gather
    assert_trains_as(model, plain_models(model), rounded_step, device)
    return branches


def rounded_step(model: nn.Module, inp: torch.Tensor) -> torch.Tensor:
    """Forward and backward with weights rounded to bf16; the mean gradients go to ``model``."""
    rounded = copy.deepcopy(model)
    for param in rounded.parameters():
        param.data = param.data.bfloat16().float()
    loss = rounded(inp).sum()
    loss.backward()
    average_gradients(rounded.parameters())
    for param, low in zip(model.parameters(), rounded.parameters(), strict=True):
        param.grad = low.grad
    return loss


@pytest.mark.brief(1)
@pytest.mark.parametrize(("run", "device"), FORMS)
def test_all_gather_extensions_monkey_patch(run: Callable[..., list[Any]], device: str) -> None:
    for branches in run(monkey_patch, NUM_RANKS, device):
        assert branches[:6] == ["create"] * 6
        assert set(branches[6:]) == {"copy"}


def plain_mlp() -> nn.Sequential:
    return nn.Sequential(*[MLP(8, bias=False) for _ in range(3)])


def patched_views(device: str) -> None:
    """The literal loop of the document, whose hooks are those of views that go at once."""
    model, plain = sharded_from_meta(plain_mlp, device), plain_mlp().to(device)
    for name, param in model.named_parameters():
        plain.get_parameter(name).data.copy_(whole(param, None))
        local = param.to_local()
        assert local is not param._local_tensor
        local.fsdp_pre_all_gather = local.fsdp_post_all_gather = None
    inp = own_input(device)
    for _ in range(3):
        for one in (model, plain):
            one(inp).sum().backward()
        average_gradients(plain.parameters())
        for name, param in model.named_parameters():
            torch.testing.assert_close(whole(param.grad, None), plain.get_parameter(name).grad)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize(("run", "device"), FORMS)
def test_hooks_on_a_view_of_the_local_tensor_have_no_effect(
    run: Callable[..., list[Any]], device: str
) -> None:
    run(patched_views, NUM_RANKS, device)
