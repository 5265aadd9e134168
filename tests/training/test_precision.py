"""Under a mixed precision policy, training is what the same casts by hand would make of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import MixedPrecisionPolicy, ShardError, fully_shard
from composable_shard.testing import fake_ranks, run_ranks
from training.trees import WIDTH, inputs_for

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Dtypes -------------------------------------------------------------------------------------


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH))
        self.register_buffer("offset", torch.full((4,), 1 / 3))
        self.register_buffer("partly", torch.full((2,), 1 / 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.offset, torch.Tensor)
        self.seen = [x.dtype, ids.dtype, self.weight.dtype, self.offset.dtype]
        self.offset += 1
        self.partly[0] = 2.0
        self.count += 1
        return (x.unsqueeze(1) * self.weight).sum(2) + self.offset, ids


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (
            MixedPrecisionPolicy(),
            {
                "forward": [FP32, torch.int64, FP32, FP32],
                "output": [FP32, torch.int64],
                "partial": [FP32],
                "after": [FP32, FP32, torch.int64, FP32],
            },
        ),
        (
            MixedPrecisionPolicy(BF16, FP32, FP16, buffer_dtype=BF16),
            {
                "forward": [BF16, torch.int64, BF16, BF16],
                "output": [FP16, torch.int64],
                "partial": [FP32],
                "after": [FP32, FP32, torch.int64, FP32],
            },
        ),
        (
            MixedPrecisionPolicy(BF16, cast_forward_inputs=False, grad_dtype=BF16),
            {
                "forward": [FP32, torch.int64, BF16, FP32],
                "output": [FP32, torch.int64],
                "partial": [BF16],
                "after": [FP32, FP32, torch.int64, BF16],
            },
        ),
    ],
    ids=["none", "all", "inputs as they are"],
)
@on_ranks(2)
def test_every_tensor_has_the_dtype_of_the_policy(
    policy: MixedPrecisionPolicy, wanted: dict[str, list[torch.dtype]]
) -> None:
    model = fully_shard(Noting(), mp_policy=policy)
    model.set_requires_gradient_sync(False)
    output, ids = model(inputs_for(0, 0), torch.arange(3))
    output.sum().backward()
    partial = model.weight.grad.dtype
    model.set_requires_gradient_sync(True)
    model(inputs_for(0, 0), torch.arange(3))[0].sum().backward()
    # What forward does not write is not rounded.
    assert torch.equal(model.partly, torch.tensor([2.0, 1 / 3]))
    after = [model.weight.dtype, model.offset.dtype, model.count.dtype, model.weight.grad.dtype]
    assert {
        "forward": model.seen,
        "output": [output.dtype, ids.dtype],
        "partial": [partial],
        "after": after,
    } == wanted


# Sums that must not be rounded once more ----------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(reduce_dtype=BF16),
        MixedPrecisionPolicy(BF16, BF16),
        MixedPrecisionPolicy(BF16, FP32),
        MixedPrecisionPolicy(BF16, grad_dtype=FP64),
    ],
    ids=["reduced in bf16", "bf16", "bf16, reduced in fp32", "bf16, fp64 gradients"],
)
@on_ranks("ranks")
def test_a_reduced_gradient_is_not_rounded_by_the_next_reduction(
    policy: MixedPrecisionPolicy,
) -> None:
    """Whether a reduced gradient is the same after a zero was accumulated and reduced with it."""
    model = nn.Linear(WIDTH, 5)
    fully_shard(model, mp_policy=policy)
    for step in range(2):
        model(inputs_for(step, dist.get_rank())).float().square().sum().backward()
    grads = [param.grad for param in model.parameters()]
    assert all(isinstance(grad, DTensor) for grad in grads)
    before = [grad.to_local().clone() for grad in grads]
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        (model(inputs_for(2, 0)) * 0).sum().backward()
    after = [param.grad.to_local() for param in model.parameters()]
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True, True]


# Several uses of a parameter ----------------------------------------------------------------------


class Gated(nn.Module):
    """For autograd the gradient of the gate is narrower under autocast, that of the norm wider."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.tensor(1.25))
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.layer(self.norm(x)) * self.gate
        return x


@pytest.mark.parametrize("autocasts", [True, False], ids=["autocast", "pure bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_gradients_of_several_uses_add_up_as_unsharded(autocasts: bool) -> None:
    reference = Gated() if autocasts else Gated().to(BF16)
    sharded = fully_shard(copy.deepcopy(reference))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(16, 8, generator=generator)  # the same on all ranks, so the mean is exact
    for model in (reference, sharded):
        with torch.autocast("cpu", BF16, enabled=autocasts):
            output = model(x if autocasts else x.to(BF16))
        output.float().square().sum().backward()
    for name, param in sharded.named_parameters():
        grad, expected = param.grad, reference.get_parameter(name).grad
        assert isinstance(grad, DTensor)
        assert grad.dtype == expected.dtype
        assert torch.equal(grad.full_tensor(), expected), name


# Sparse gradients ---------------------------------------------------------------------------------


TOKENS = torch.arange(8)
TEXT = (
    "Expected a dense gradient of '{}', got a sparse one; set sparse=False, or pass it as "
    "ignored_params and reduce its gradient yourself"
)


def made(is_apart: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    if is_apart:
        fully_shard(model[0], **options)
    return fully_shard(model, **options)


def raised(is_apart: bool, syncs: bool, is_replicated: bool) -> tuple[str, bool]:
    """Return what a backward raises, and whether the next one, with dense gradients, works."""
    mesh = None
    if is_replicated:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = made(is_apart, mesh=mesh)
    model.set_requires_gradient_sync(syncs)
    with pytest.raises(ShardError) as caught:
        model(TOKENS).sum().backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model[0].sparse = False
    model(TOKENS).sum().backward()
    grad = model[0].weight.grad.full_tensor()
    return str(caught.value), grad.shape == (8, 4) and bool(grad.any())


@pytest.mark.parametrize(("is_apart", "name"), [(True, "weight"), (False, "0.weight")])
@pytest.mark.parametrize(("syncs", "is_replicated"), [(True, False), (False, False), (True, True)])
def test_a_sparse_gradient_is_refused_by_name_on_all_ranks(
    is_apart: bool, name: str, syncs: bool, is_replicated: bool
) -> None:
    run = run_ranks(raised, 2, is_apart, syncs, is_replicated)
    assert run == [(TEXT.format(name), True)] * 2


@pytest.mark.parametrize("is_apart", [True, False])
def test_on_one_rank_it_stays_sparse(is_apart: bool) -> None:
    with fake_ranks(1):
        model = made(is_apart)
        model(TOKENS).sum().backward()
        assert model[0].weight.grad._local_tensor.is_sparse
