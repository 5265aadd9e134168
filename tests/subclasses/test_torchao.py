"""The tensor subclasses of torchao train sharded as they train unsharded, and as with FSDP2.

The cases are all that a class allows of shapes, ranks, dtypes, reshardings, accumulation and
optimizers: in `make test` so many that each two such choices occur together, in `make test-long`
all.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import RankError, run_ranks

pytest.importorskip("torchao", reason="torchao is not installed; it comes with the extra 'test'")

from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

from subclasses.torchao_layers import agree_on_scales, averages_by_sum, model_of

STEPS = 5
BATCH = 32  # MXFP8 rounds gradients in blocks of so many rows
OPTIMIZERS = {"sgd": (torch.optim.SGD, 0.1), "adamw": (torch.optim.AdamW, 1e-3)}

EVEN = 64, 128
SHAPES = {
    "bitnet": [EVEN],  # its hook takes a mean of the means of shards
    "bitnet ahead": [EVEN, (65, 132)],  # four columns to a byte
    "moe mxfp8": [EVEN],  # blocks of 32, both ways; over three ranks uneven all the same
    "nf4": [EVEN],  # whole blocks
}
UNEVEN = 65, 130

# How far losses may be from those of an unsharded run, relative to them, in fp32 and in bf16.
#
# fp32: sums over ranks are taken in another order, so gradients differ by roundings, 1e-7 of them.
# Where weights are kept or used in few bits such a difference now and then moves one of them, or an
# activation or a gradient, to the next of its values: by a part of 127 for int8, of 16 for float8,
# the whole weight for BitNet. With two ranks the sums are the same.
# bf16: the unsharded model is a copy in bf16, of which each product is rounded; so are its
# quantizations, which sharded are those of fp32 weights (float8, BitNet).
TOLERANCES = {
    "int8": (1e-4, 1e-2),
    "int8 mixed": (1e-4, 1e-2),
    "bitnet": (1e-3, 2e-2),
    "bitnet ahead": (1e-3, 2e-2),
    "float8": (5e-3, 2e-2),
    "float8 ahead": (5e-3, 2e-2),
    "moe float8": (1e-2, 1e-2),
    "moe mxfp8": (1e-2, 1e-2),
    "nf4": (1e-5, 1e-2),
}


class Case(NamedTuple):
    """One training."""

    kind: str
    shape: tuple[int, int]
    mesh: tuple[int, ...]
    low: bool
    reshards: bool | int
    microbatches: int
    optimizer: str

    @property
    def num_ranks(self) -> int:
        return torch.Size(self.mesh).numel()

    @property
    def is_possible(self) -> bool:
        if type(self.reshards) is int and self.mesh != (4,):
            return False  # a number that is 1 or all of the ranks means False or True
        return not (self.kind in ("nf4", "bitnet") and self.shape[0] % self.mesh[-1])

    @property
    def suits_fsdp2(self) -> bool:
        """Whether torch can do it, which takes no number and no padding of these classes."""
        drops_tensors = self.mesh[-1] == 1 and self.kind in ("int8", "nf4")  # all but the first
        is_even = self.shape[0] % self.mesh[-1] == 0
        return type(self.reshards) is bool and is_even and not drops_tensors

    def __str__(self) -> str:
        parts = self.kind, self.shape, self.mesh, "bf16" if self.low else "fp32"
        rest = f"reshard={self.reshards}", f"x{self.microbatches}", self.optimizer
        return " ".join(map(str, (*parts, *rest))).replace(", ", ",")


def all_cases() -> Iterator[Case]:
    for kind in TOLERANCES:
        shapes = SHAPES.get(kind, [EVEN, UNEVEN])
        meshes = [(1,), (2,), (3,), (4,), (2, 2)]
        rest = [False, True], [True, False, 2], [1, 2], ["sgd", "adamw"]
        for choices in product(shapes, meshes, *rest):
            case = Case(kind, *choices)
            if case.is_possible:
                yield case


Choices = set[tuple[Any, ...]]


def covering(cases: Iterable[Case], choices_of: Callable[[Case], Choices]) -> list[Case]:
    """Choose cases so that all choices that occur among them still do."""
    left = sorted(cases, key=lambda case: zlib.crc32(repr(case).encode()))
    uncovered = {choice for case in left for choice in choices_of(case)}
    chosen = []
    while uncovered:
        best = max(left, key=lambda case: len(uncovered & choices_of(case)))
        chosen.append(best)
        uncovered -= choices_of(best)
    return chosen


def pairs_of(case: Case) -> Choices:
    return set(combinations(enumerate(map(repr, case)), 2))  # True and 1 are equal


def of_its_kind(case: Case) -> Choices:
    """Each kind in both precisions and of each shape; the other choices once for any kind."""
    of_kind = {(case.kind, case.low), (case.kind, case.shape)}
    return of_kind | set(enumerate(map(repr, case)))


ALL_CASES = list(all_cases())
PAIRS = ALL_CASES if os.environ.get("TORCHAO_CASES") == "all" else covering(ALL_CASES, pairs_of)
BRIEF = covering(PAIRS, of_its_kind)
CASES = [
    pytest.param(case, marks=[] if case in BRIEF else pytest.mark.matrix, id=str(case))
    for case in sorted(PAIRS, key=lambda case: case.kind)
]


def batch_of(rank: int, step: int, micro: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(BATCH, columns, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - 1).square().mean()


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    kind, lr = OPTIMIZERS[case.optimizer]
    trained = [param for param in model.parameters() if param.requires_grad]
    # A decay would multiply weights in place, which int8 weights do not know.
    return kind(trained, lr=lr, weight_decay=0 if case.kind == "int8" else 1e-2)


def losses_unsharded(case: Case) -> list[list[float]]:
    """Train on the batches of all ranks, one after the other; return the losses of each step.

    What quantizes activations or gradients does it by the batch, so that of each rank is one here.
    """
    model = model_of(case.kind, *case.shape)
    optimizer = optimizer_of(case, model)
    found = []
    for step in range(STEPS):
        losses = []
        for rank, micro in product(range(case.num_ranks), range(case.microbatches)):
            computing = low_copy(case, model) if case.low else model
            x = batch_of(rank, step, micro, case.shape[1])
            loss = loss_of(computing, x.bfloat16() if case.low else x)
            (loss / case.num_ranks).backward()
            losses.append(loss.item())
            if case.low:
                take_gradients(model, computing)
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses)
    return found


def low_copy(case: Case, model: nn.Module) -> nn.Module:
    # To copy NF4 is to quantize it again, to cast it ends it; it is gathered in its own dtype.
    low = copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})
    if case.kind != "nf4":
        low.to(torch.bfloat16)
    else:
        for param in low.parameters():
            if param.requires_grad:
                param.data = param.data.bfloat16()
    low.zero_grad()  # copies of subclasses have gradients
    return low


def take_gradients(model: nn.Module, computing: nn.Module) -> None:
    for param, low in zip(model.parameters(), computing.parameters(), strict=True):
        if low.grad is not None:
            grad = low.grad.float()
            param.grad = grad if param.grad is None else param.grad + grad


def losses_sharded(case: Case, shard: Any, policy_of: Any) -> list[list[float]]:
    model = model_of(case.kind, *case.shape)
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy = policy_of(**low) if case.low else policy_of()
    for module in (*model[:-1], model):
        mesh = mesh_of(case)
        shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshards)
    optimizer = optimizer_of(case, model)
    found = []
    for step in range(STEPS):
        if case.kind == "bitnet ahead":
            agree_on_scales(model)
        elif case.kind == "float8 ahead":
            precompute_float8_dynamic_scale_for_fsdp(model)
        own = []
        for micro in range(case.microbatches):
            model.set_requires_gradient_sync(micro == case.microbatches - 1)
            loss = loss_of(model, batch_of(dist.get_rank(), step, micro, case.shape[1]))
            loss.backward()
            own.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses: list[Any] = [None] * case.num_ranks
        dist.all_gather_object(losses, own)
        found.append([loss for theirs in losses for loss in theirs])
    return found


def mesh_of(case: Case) -> DeviceMesh:
    names = ("replicate", "shard")[-len(case.mesh) :]
    return init_device_mesh("cpu", case.mesh, mesh_dim_names=names)


def compare_losses(case: Case) -> tuple[float, float]:
    with averages_by_sum() if case.kind == "bitnet" else nullcontext():
        found = torch.tensor(losses_sharded(case, fully_shard, MixedPrecisionPolicy))
        expected = torch.tensor(losses_unsharded(case))
        fsdp2 = found
        if case.suits_fsdp2:
            policy = fsdp.MixedPrecisionPolicy
            fsdp2 = torch.tensor(losses_sharded(case, fsdp.fully_shard, policy))
    moved = (expected[-1] - expected[0]).abs() / expected[0]
    assert moved.max() > 0.2, f"{case} does not train"
    worst = [((found - one) / one).abs().max().item() for one in (expected, fsdp2)]
    return worst[0], worst[1]


@pytest.mark.brief(2)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_an_unsharded_run_and_of_fsdp2(case: Case) -> None:
    for off_unsharded, off_fsdp2 in run_ranks(compare_losses, case.num_ranks, case):
        assert off_unsharded <= TOLERANCES[case.kind][case.low]
        # Both quantize alike; more than two ranks are summed in another order.
        assert off_fsdp2 <= (0 if case.mesh[-1] <= 2 else TOLERANCES[case.kind][0])


def cut_nf4() -> None:
    model = model_of("nf4", *EVEN)
    before = [model[0].quantized.weight, type(model[0])]
    try:
        fully_shard(model[0])
    finally:
        assert [model[0].quantized.weight, type(model[0])] == before


def test_nf4_over_three_ranks_is_refused_on_all() -> None:
    """It is cut into as many equal parts as its rows hold of the asked, with no regard to them."""
    with pytest.raises(RankError) as caught:
        run_ranks(cut_nf4, 3, timeout=20)
    failure = caught.value.agreed()
    assert (failure.type_name, failure.message) == (
        "ExtensionError",
        "Expected parameter 'quantized.weight', a NF4Tensor of shape [64, 128], to be cut into 3 "
        "shards along dim 0, got: Expected split of NF4Tensor to return shapes [[22, 128], "
        "[22, 128], [20, 128]], got [[32, 128], [32, 128]]; shard it over another number of "
        "ranks, or pass it in ignored_params",
    )
