"""Models, references and devices that the tests of the documents share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import nets
import pytest
import torch
import torch.distributed as torch_dist
from nets import full
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    NestedWrappedModule,
    TransformerWithSharedParams,
)

from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP

CPU = torch.device("cpu")
NUM_GPUS = torch.cuda.device_count()


def gpu(num_devices: int = 1) -> Any:
    """Mark a test of what only CUDA has: several devices, their indices, pinned memory."""

    def mark(test: Any) -> Any:
        reason = f"needs {num_devices} CUDA device(s): {test.__doc__ or 'device placement'}"
        return pytest.mark.gpu(pytest.mark.skipif(num_devices > NUM_GPUS, reason=reason)(test))

    return mark


def nested(device: torch.device = CPU) -> Any:
    """Return a plain nested model, the same on all ranks."""
    group = torch_dist.group.WORLD
    model = NestedWrappedModule.init(
        group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_NEVER, deterministic=True
    )
    return model.to(device)


def wrap_parts(model: Any, **kwargs: Any) -> Any:
    """Wrap the parts of a nested model, not the model itself."""
    layers = model.module
    layers[1][0] = FSDP(layers[1][0], **kwargs)
    layers[1] = FSDP(layers[1], **kwargs)
    layers[2] = FSDP(layers[2], **kwargs)
    return model


def wrap_nested(model: Any, **kwargs: Any) -> Any:
    """Wrap the parts of a nested model, then the model."""
    return FSDP(wrap_parts(model, **kwargs), **kwargs)


def transformer(device: torch.device = CPU, *, add_bn: bool = False) -> Any:
    """Return a plain transformer with tied embeddings, the same on all ranks."""
    model = TransformerWithSharedParams.init(
        torch_dist.group.WORLD,
        FSDPInitMode.NO_FSDP,
        DEVICEInitMode.DEVICE_NEVER,
        deterministic=True,
        add_bn=add_bn,
    )
    return model.to(device)


def two_of(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a model to wrap and a copy to compare with."""
    return model, copy.deepcopy(model)


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients of a plain model by their mean over the ranks."""
    nets.average_gradients(model.parameters())


def named(name: str) -> Callable[[str], str]:
    """Return what puts a name before a message."""
    return lambda text: f"{name}: {text}"


def assert_same_parameters(wrapped: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    """Compare all parameters under their names, while they are full."""
    with FSDP.summon_full_params(wrapped):
        ours, theirs = dict(wrapped.named_parameters()), dict(reference.named_parameters())
        assert list(ours) == list(theirs)
        for name, param in ours.items():
            assert not isinstance(param, DTensor), name
            torch.testing.assert_close(param, theirs[name], msg=named(name), **tolerance)


def assert_same_gradients(wrapped: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    """Compare all gradients under the names of their parameters."""
    ours, theirs = dict(wrapped.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name, param in ours.items():
        expected = theirs[name].grad
        assert (param.grad is None) == (expected is None), name
        if param.grad is not None and expected is not None:
            torch.testing.assert_close(full(param.grad), expected, msg=named(name), **tolerance)


def save_and_load(model: nn.Module) -> set[torch.dtype]:
    """Put the parameters through a state dict, whose dtypes are returned."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with FSDP.summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not any(full(param).any() for param in model.parameters())
    model.load_state_dict(saved)
    return {value.dtype for value in saved.values()}


# Devices that are not there ---------------------------------------------------------------------


@contextmanager
def pretend_cuda(index: int = 0) -> Iterator[None]:
    """Make torch say that ``cuda:index`` is the current device."""
    with (
        mock.patch.object(
            torch.accelerator, "current_accelerator", lambda check_available=False: CUDA
        ),
        mock.patch.object(torch.accelerator, "current_device_index", lambda: index),
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
    ):
        yield


CUDA = torch.device("cuda")


def pretend_on(device: str, module: nn.Module) -> nn.Module:
    """Replace the parameters of a module by ones that say they are on a device."""
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if param is not None:
                inner._parameters[name] = pretend_param(device, param)
    return module


def pretend_param(device: str, like: torch.Tensor) -> nn.Parameter:
    shape = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return nn.Parameter(FakeTensor(FakeTensorMode(), shape, torch.device(device)))
