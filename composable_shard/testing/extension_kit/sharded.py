"""The tensor in a model that ``fully_shard`` shards: trained, saved, copied, offloaded."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy
from composable_shard._torch import leaves, waited
from composable_shard.testing.extension_kit.report import Broken
from composable_shard.testing.extension_kit.subject import (
    Shape,
    Subject,
    mine,
    plain,
    shard_of,
)

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
TOLERANCE_OF_LOW = 0.05
STEPS = 3


def training(subject: Subject, shape: Shape) -> None:
    """Training sharded gives what training unsharded on the same batches gives."""
    for reshards in (True, False):
        _train(subject, shape, subject.sharded(shape, reshard_after_forward=reshards))


def fewer_ranks(subject: Subject, shape: Shape) -> None:
    """Gathering again from fewer ranks (an int for reshard_after_forward) trains alike."""
    if dist.get_world_size() % 2 == 0:
        fewer = dist.get_world_size() // 2
        if fewer > 1:
            _train(subject, shape, subject.sharded(shape, reshard_after_forward=fewer))


def offload(subject: Subject, shape: Shape) -> None:
    """Training with parameters offloaded to the CPU gives the same."""
    policy = CPUOffloadPolicy(pin_memory=False)
    _train(subject, shape, subject.sharded(shape, offload_policy=policy))


def _train(subject: Subject, shape: Shape, model: nn.Sequential) -> None:
    """Compare outputs with those of an unsharded model, which sees the batches of all ranks."""
    reference = subject.model(shape)
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) if subject.trains else None
        for one in (model, reference)
    ]
    for step in range(STEPS):
        batch = subject.batch(shape, reference.get_parameter("0.weight").dtype, step)
        (own,) = mine(batch)
        outputs = [model(own), reference(batch)]
        what = f"outputs as of the unsharded model in step {step}"
        subject.expect_alike(plain(outputs[0]), mine(outputs[1]), what)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            if optimizer is not None:
                output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def mixed_precision(subject: Subject, shape: Shape) -> None:
    """A policy with param_dtype bfloat16 computes in it."""
    model = subject.sharded(shape, mp_policy=LOW)
    batch = subject.batch(shape, torch.float32)
    with torch.no_grad():
        for _ in range(2):
            found, expected = model(*mine(batch)), subject.model(shape)(batch.to(_dtype(subject)))
    if found.dtype != torch.bfloat16:
        raise Broken(f"Expected outputs of torch.bfloat16, got {found.dtype}")
    loose = Subject(
        subject.make, subject.compute, subject.trains, max(subject.tolerance, TOLERANCE_OF_LOW)
    )
    loose.expect_alike(plain(found), mine(expected), "outputs as in full precision")


def _dtype(subject: Subject) -> torch.dtype:
    dtype = subject.tensor((4, 4)).dtype
    return dtype if dtype.is_floating_point else torch.float32


def meta_device(subject: Subject, shape: Shape) -> None:
    """It can be made on the meta device, sharded, allocated and then filled."""
    tensor = subject.tensor(shape, device="meta")
    if not tensor.is_meta:
        raise Broken(
            f"Expected a tensor on the meta device from make_tensor, got one on {tensor.device}"
        )
    model = subject.sharded(shape, device="meta")
    model.to_empty(device="cpu")
    with torch.no_grad():
        shard_of(model).copy_(shard_of(subject.sharded(shape)))
    _expect_forward(subject, shape, model, "after initialisation from the meta device")


def sharded_state_dict(subject: Subject, shape: Shape) -> None:
    """A sharded state dict survives saving and loading, into a model of other values."""
    file = io.BytesIO()
    torch.save(subject.sharded(shape).state_dict(), file)
    file.seek(0)
    model = subject.sharded(shape, seed=1)
    _forward(subject, shape, model)
    model.load_state_dict(torch.load(file, weights_only=False))
    _expect_forward(subject, shape, model, "after loading a sharded state dict")


def full_state_dict(subject: Subject, shape: Shape) -> None:
    """A full state dict can be taken, saved, and loaded into a sharded model of other values."""
    options = StateDictOptions(full_state_dict=True)
    full: dict[str, Any] = get_model_state_dict(subject.sharded(shape), options=options)
    for leaf in leaves(full["0.weight"]):
        waited(leaf)
    file = io.BytesIO()
    torch.save(full, file)
    file.seek(0)
    model = subject.sharded(shape, seed=1)
    _forward(subject, shape, model)
    model.load_state_dict(torch.load(file, weights_only=False))
    _expect_forward(subject, shape, model, "after loading a full state dict")


def deepcopy(subject: Subject, shape: Shape) -> None:
    """A deep copy of a sharded model is a model of its own."""
    model = subject.sharded(shape)
    _forward(subject, shape, model)
    copied = copy.deepcopy(model)
    model.load_state_dict(subject.sharded(shape, seed=1).state_dict())
    _expect_forward(subject, shape, copied, "from a deep copy")


def _forward(subject: Subject, shape: Shape, model: nn.Sequential) -> list[torch.Tensor]:
    with torch.no_grad():
        return plain(model(*mine(subject.batch(shape, _dtype(subject)))))


def _expect_forward(subject: Subject, shape: Shape, model: nn.Sequential, when: str) -> None:
    with torch.no_grad():
        expected = mine(subject.model(shape)(subject.batch(shape, _dtype(subject))))
    for _ in range(2):
        found = _forward(subject, shape, model)
        subject.expect_alike(found, expected, f"the same outputs {when}")


MODEL_CHECKS = (
    training,
    fewer_ranks,
    offload,
    mixed_precision,
    meta_device,
    sharded_state_dict,
    full_state_dict,
    deepcopy,
)
