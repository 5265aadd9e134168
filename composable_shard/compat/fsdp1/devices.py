"""Where a wrapper computes, and getting its parameters and buffers ready for that."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import MaterializationError, sync_module_states
from composable_shard.compat.fsdp1.choices import Choices
from composable_shard.compat.fsdp1.scope import Scope

_CPU = torch.device("cpu")


def resolve_device(scope: Scope, choices: Choices) -> torch.device:
    """Find the device of compute.

    Raises:
        RuntimeError: If parameters lie on several devices.
        ValueError: If they, ``device_id`` and the current device do not go together.
    """
    asked = _asked_device(choices)
    found = {param.device for param in scope.params() if not param.is_meta}
    elsewhere = found - {_CPU}
    if len(elsewhere) > 1:
        raise RuntimeError(
            "Expected a module on a single device, got parameters on "
            f"{sorted(map(str, found))}; move it to one, or wrap its parts one by one"
        )
    if asked is None and elsewhere and _CPU in found:
        raise RuntimeError(
            f"Expected parameters on one device, got them on the CPU and {elsewhere.pop()}; please "
            "pass in device_id to compute on the latter"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    current = _CPU
    if accelerator is not None and (asked is None or asked.type != "cpu"):
        current = torch.device(accelerator.type, torch.accelerator.current_device_index())
    compute = elsewhere.pop() if elsewhere else current
    if asked is not None and asked != compute:
        raise ValueError(
            f"Expected device_id to be where {_rank()} computes, got {compute} vs {asked}; make it "
            "the current device and have the module there or on the CPU"
        )
    if compute != current:
        raise ValueError(
            f"Expected the module of {_rank()} on the CPU or on its current device {current}, got "
            f"it on {compute}; call torch.accelerator.set_device_index before"
        )
    return compute


def _asked_device(choices: Choices) -> torch.device | None:
    device_id, mesh = choices.device_id, choices.device_mesh
    if device_id is None:
        return _CPU if mesh is not None and mesh.device_type == "cpu" else None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device_id, int):
        if isinstance(device_id, bool) or accelerator is None:
            raise ValueError(
                f"Expected device_id to be a device of this machine, got {device_id!r}"
                + ("" if accelerator else " without an accelerator; pass torch.device('cpu')")
            )
        asked = torch.device(accelerator.type, device_id)
    else:
        asked = torch.device(device_id)
    if asked.type == "cpu":
        return _CPU
    if accelerator is None or accelerator.type != asked.type:
        raise ValueError(
            f"Expected device_id to be a device of this machine, got {asked}, which is not there"
        )
    if asked.index is None:
        current = torch.device(asked.type, torch.accelerator.current_device_index())
        warnings.warn(
            f"device_id {asked} of {_rank()} does not have an explicit index: the current device, "
            f"{current}, is used; pass it, or set another one before",
            stacklevel=4,
        )
        return current
    return asked


def _rank() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"


# Values -----------------------------------------------------------------------------------------


def materialize(
    scope: Scope, init_fn: Callable[[nn.Module], object] | None, device: torch.device
) -> None:
    """Make parameters and buffers real that are on the meta device; tied ones stay tied.

    Args:
        scope: What the wrapper takes charge of.
        init_fn: Called with each of its modules; else those that need it are initialized by their
            ``reset_parameters()``.
        device: Where.

    Raises:
        MaterializationError: If a module has none; nothing is initialized then.
    """
    ties: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module, name, param in scope.slots():
        ties.setdefault(param, []).append((module, name))
    on_meta = [
        module
        for module in scope.modules
        if any(p.is_meta for p in module._parameters.values() if p is not None)
        or any(buffer.is_meta for buffer in module.buffers(False))
    ]
    if not on_meta:
        return
    if init_fn is not None:
        for module in scope.modules:
            init_fn(module)
    else:
        _reset(on_meta, device)
    for places in ties.values():
        first, attribute = places[0]
        for module, name in places[1:]:
            module._parameters[name] = first._parameters[attribute]


def _reset(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in modules:
        if not callable(getattr(module, "reset_parameters", None)):
            raise MaterializationError(
                f"Expected {type(module).__name__} on the meta device to have reset_parameters(), "
                "got none; pass param_init_fn"
            )
    with torch.no_grad():
        for module in modules:
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()  # type: ignore[operator]


def stays_on_cpu(scope: Scope, choices: Choices, device: torch.device) -> bool:
    """Tell whether parameters stay on the CPU though nobody offloads them; warns then.

    Raises:
        ValueError: If they are to be synchronized all the same.
    """
    states = [*scope.params(), *scope.buffers()]
    if device == _CPU or choices.device_id is not None:
        return False
    if choices.sync_module_states and any(state.device == _CPU for state in states):
        raise ValueError(
            f"Expected parameters and buffers on {device} to synchronize them, got some on the "
            "CPU; pass device_id, or move the module before"
        )
    is_offloaded = choices.cpu_offload is not None and choices.cpu_offload.offload_params
    if is_offloaded or not any(param.device == _CPU for param in scope.params()):
        return False
    warnings.warn(
        f"The module is on CPU and stays there: move it to {device} before training, or pass "
        "device_id to have it moved now",
        stacklevel=4,
    )
    return True


def synchronize(scope: Scope, mesh: DeviceMesh) -> None:
    """Give all ranks the values of the first. Collective: broadcasts, see sync_module_states."""
    root, states = scope.modules[0], nn.Module()
    own = {id(state) for state in (*scope.params(), *scope.buffers())}
    states._parameters.update((n, p) for n, p in root.named_parameters() if id(p) in own)
    states._buffers.update((n, b) for n, b in root.named_buffers() if id(b) in own)
    for axis in reversed(range(mesh.ndim)):  # within the first row, then from it to the others
        group = mesh.get_group(axis)
        first = dist.get_process_group_ranks(group)[0]
        sync_module_states(states, src_rank=first, process_group=group)
