"""What estimate tells is what explain tells of a model on that many ranks, and can be added up."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import said_of_calls
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from two_tensors import two_tensor_mlp

from composable_shard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardError,
    ShardPlacementResult,
    _torch,
    apply_fully_shard,
    estimate,
    explain,
    fully_shard,
)
from composable_shard.insight.estimate import Estimate, default_loss
from composable_shard.insight.explain import is_repeated_block
from composable_shard.insight.group_steps import total
from composable_shard.testing import fake_ranks
from tests.insight.models import BF16, Stack

BATCH = torch.empty(2, 256, device="meta")


@cache
def told(mesh_shape: int | tuple[int, int], **kwargs: Any) -> Estimate:
    return estimate(Stack, mesh_shape, batch=BATCH, **kwargs)


def explained(mesh_shape: int | tuple[int, int], **kwargs: Any) -> dict[str, Any]:
    """Return what explain adds up to on as many fake ranks."""
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    num_ranks = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    with fake_ranks(num_ranks):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        with torch.device("meta"):
            model = Stack()
        apply_fully_shard(model, is_repeated_block(model), mesh=mesh, **kwargs)
        explanation = explain(model)
    parts = ("forward_gathers", "backward_gathers", "reductions", "all_reduces")
    sums = {part: total(getattr(g.traffic, part) for g in explanation.groups) for part in parts}
    return {"shards": sum(group.sharded_nbytes for group in explanation.groups), **sums}


CASES: dict[str, tuple[int | tuple[int, int], dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {}),
    "seven": (7, {}),
    "many": (1000, {}),
    "bf16": (16, {"mp_policy": BF16}),
    "kept": (16, {"reshard_after_forward": False}),
    "zero1": (16, {"sharding": "zero1"}),
    "zero2": (16, {"sharding": "zero2"}),
    "regathered": (16, {"reshard_after_forward": 8}),
    "regathered from all": (16, {"reshard_after_forward": 16}),
    "replicas": ((3, 4), {}),
    "only replicas": ((4, 1), {}),
}


@pytest.mark.brief(5)
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_that_explain_tells_on_as_many_ranks(case: str) -> None:
    shape, kwargs = CASES[case]
    result = told(shape, device="cpu", flops=1e12, bandwidth=1e6, latency=0.5, **kwargs)
    expected = explained(shape, **kwargs)
    assert result.peak.shards == result.between_steps.shards == expected.pop("shards")
    assert {part: getattr(result.traffic, part) for part in expected} == expected
    sent = result.traffic.total  # all that is sent takes its time
    assert result.time is not None and sent.nbytes is not None
    assert result.time.communication == pytest.approx(sent.nbytes / 1e6 + 0.5 * sent.launches)


@pytest.mark.parametrize("case", CASES)
def test_bytes_on_devices_are_those_that_explain_tells_where_they_are(case: str) -> None:
    shape, kwargs = CASES[case]
    result = told(shape, device="cuda", **kwargs)
    with _torch.pretended_backend("nccl"):
        expected = explained(shape, **kwargs)
    assert result.between_steps.shards == expected.pop("shards")
    assert {part: getattr(result.traffic, part) for part in expected} == expected


WIDTH, ROWS = 1024, 16


def one_layer() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def test_one_layer_by_hand() -> None:
    x = torch.empty(ROWS, WIDTH, device="meta")
    result = estimate(one_layer, 4, batch=x, device="cpu", flops=1e9, bandwidth=1e9, latency=1e-3)
    whole = WIDTH * WIDTH * 4
    flag = 4  # bytes
    assert result.num_parameters == WIDTH * WIDTH
    assert result.between_steps.shards == whole // 4
    assert result.between_steps.optimizer == 2 * whole // 4 + 4
    assert result.between_steps.unsharded == ROWS * WIDTH * 4
    assert result.flops == 2 * 2 * ROWS * WIDTH * WIDTH  # the input needs no gradient
    gathered = 3 * whole // 4
    reduced = 3 * (whole // 4 + flag)
    assert result.traffic.forward_gathers.nbytes == gathered
    assert result.traffic.backward_gathers.nbytes == 0
    assert result.traffic.reductions.nbytes == reduced
    compute = result.flops / 1e9
    communication = (gathered + reduced) / 1e9 + 2e-3
    assert result.time is not None
    assert result.time.compute == pytest.approx(compute)
    assert result.time.communication == pytest.approx(communication)
    assert result.time.exposed == pytest.approx(communication)  # there is nothing beside it
    assert result.time.step == pytest.approx(compute + communication)
    assert result.peak.gathered == whole
    assert result.peak.gradients in (whole, whole + 2 * 4 * flag)


def test_optimizers() -> None:
    adamw = told(2, device="cpu").between_steps
    momentum = told(2, device="cpu", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    plain = told(2, device="cpu", optimizer=partial(torch.optim.SGD, lr=0.1))
    assert plain.between_steps.optimizer == 0 == told(2, optimizer=None).between_steps.optimizer
    assert momentum.between_steps.optimizer * 2 == adamw.optimizer - 4 * 11
    many = partial(Stack, layers=12)
    at_once = estimate(many, 2, batch=BATCH)
    assert at_once.peak_at == "optimizer step"
    one_by_one = estimate(many, 2, batch=BATCH, device="cpu")
    assert at_once.peak.optimizer > 1.4 * one_by_one.between_steps.optimizer


def test_offloaded_shards_are_on_the_cpu() -> None:
    away = told(2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    here = told(2)
    assert here.on_cpu == 0
    assert away.between_steps.shards == away.between_steps.optimizer == 0
    least = here.between_steps.shards + here.between_steps.optimizer
    assert away.on_cpu >= least + here.between_steps.shards
    assert told(2, offload_policy=CPUOffloadPolicy(pin_memory=False), device="cpu").on_cpu == 0
    [alone, whole] = told(1, offload_policy=CPUOffloadPolicy(pin_memory=False)), told(1)
    assert alone.peak.gathered == whole.between_steps.shards  # which is copied to the device


def test_activation_checkpoints_need_less_memory_and_more_compute() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.after(x)

    batch = torch.empty(4096, 256, device="meta")
    plain = estimate(partial(Stack, layers=8), 2, batch=batch)
    again = estimate(partial(Checkpointed, layers=8), 2, batch=batch)
    assert again.peak.activations < 0.6 * plain.peak.activations
    # Recomputation ends where the last product would begin.
    assert again.flops == plain.flops + 8 * 2 * 4096 * 256 * 384


def test_forms_of_a_batch() -> None:
    by_tensor = told(2)
    for batch in ((BATCH,), {"x": BATCH}, lambda: torch.zeros(2, 256), torch.ones(2, 256)):
        assert estimate(Stack, 2, batch=batch) == by_tensor


def test_shard_by_oneself() -> None:
    def shard(model: Stack, mesh: Any) -> None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    assert estimate(Stack, 8, batch=BATCH, shard=shard) == told(8)


def over_own_mesh(model: nn.Module, mesh: Any) -> None:
    with unset_fake_temporarily():
        own = init_device_mesh("cpu", (2,), mesh_dim_names=("own",))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: ShardPlacementResult(mesh=own))


def test_meshes_of_single_parameters() -> None:
    with fake_ranks(2):
        model = Stack()
        over_own_mesh(model, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
        [group] = explain(model).groups
    result = told(2, shard=over_own_mesh, device="cpu")
    assert result.traffic == group.traffic
    assert result.between_steps.shards == group.sharded_nbytes


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].down.weight = self.layers[0].down.weight
        self.register_buffer("ones", torch.ones(8))


def tied_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def test_a_model_on_the_meta_device_is_estimated_as_any_other() -> None:
    for policy in (None, CPUOffloadPolicy(pin_memory=False)):
        kwargs: dict[str, Any] = {"batch": BATCH, "offload_policy": policy}
        assert estimate(tied_on_meta, 4, **kwargs) == estimate(Tied, 4, **kwargs)


def test_losses() -> None:
    class Output:
        loss = torch.ones(())

    assert default_loss(Output(), None) is Output.loss
    assert default_loss({"loss": Output.loss}, None) is Output.loss
    assert default_loss(torch.ones(3), None) == 3


def test_its_forms() -> None:
    result = told(8, flops=1e12, bandwidth=1e9)
    text = str(result)
    assert text.splitlines()[0] == "462 k parameters in 3 groups over 8 shards"
    assert f"at the peak ({result.peak_at})" in text
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["peak"]["shards"] == result.peak.shards
    assert plain["mesh_shape"] == [1, 8]


def test_a_process_group_of_the_caller_is_left_alone() -> None:
    with fake_ranks(3):
        with pytest.raises(ShardError) as caught:
            told.__wrapped__(2)
        assert dist.get_world_size() == 3
    assert str(caught.value) == ("Expected estimate before init_process_group, got backend 'fake'")
    told.__wrapped__(2)
    assert not dist.is_initialized()


class Listing(Stack):
    def forward(self, x: Tensor) -> Any:
        return [super().forward(x)]


class Asking(Stack):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * y.sum().item()


REFUSED = """\
told((2, 2, 2))
    ValueError: Expected mesh_shape to be a number of ranks or (replicas, shards), got (2, 2, 2)
told(0)
    ValueError: Expected mesh_shape to be a number of ranks or (replicas, shards), got 0
told(8, reshard_after_forward=3)
    ValueError: Expected reshard_after_forward to divide the number of shards, got 3 for 8 shards
told(8, flops=1e12)
    ValueError: Expected flops and bandwidth to be given both or neither, got (1000000000000.0,
    None)
told(8, flops=1.0, bandwidth=0.0)
    ValueError: Expected speeds to be positive, and the latency at least 0, got {'flops': 1.0,
    'bandwidth': 0.0, 'latency': 0.0}
estimate(Stack, 2)
    TypeError: Expected batch to be the inputs of one rank's forward, got NoneType: None
told(2, shard=lambda model, mesh: None, mp_policy=MixedPrecisionPolicy())
    ValueError: Expected shard without policy and arguments of fully_shard, got ['mp_policy']
estimate(lambda: None, 2, batch=BATCH)
    TypeError: Expected the result of build_model to be an nn.Module, got NoneType: None
told(2, shard=lambda model, mesh: None)
    ValueError: Expected sharded modules in Stack, got none; apply fully_shard to it
estimate(Listing, 2, batch=BATCH)
    TypeError: Expected forward to return a tensor or a loss, got list; pass loss=
told(2, optimizer=torch.optim.Adafactor)
    ValueError: Expected an optimizer that reads no values, got Adafactor; pass another one with as
    much state, or optimizer=None
estimate(two_tensor_mlp, 2, batch=torch.empty(2, 8))
    ValueError: Expected parameters that are not converted to a subclass yet, got ['TwoTensor']
"""


@pytest.mark.parametrize("call", said_of_calls(REFUSED))
def test_message(call: str) -> None:
    names = {**globals(), "two_tensor_mlp": two_tensor_mlp, "policy": MixedPrecisionPolicy}
    with pytest.raises((TypeError, ValueError)) as caught:
        eval(call, names)
    said = f"{type(caught.value).__name__}: {caught.value}"
    assert said == said_of_calls(REFUSED)[call]
    assert not dist.is_initialized()


def test_code_that_asks_for_values_is_told_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        estimate(Asking, 2, batch=BATCH)
    assert caught.value.__notes__ == [
        "estimate runs on tensors without values; the model or the loss reads one"
    ]
