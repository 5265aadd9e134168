"""Shards on the CPU: which are, and whether their memory is pinned."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache

import torch

from composable_shard.policy import CPUOffloadPolicy, OffloadPolicy

Offload = OffloadPolicy | Mapping[str, OffloadPolicy] | None


def offload_of(name: str, policy: Offload) -> CPUOffloadPolicy | None:
    """Return how the parameter ``name`` is kept on the CPU, ``None`` if it is not."""
    if isinstance(policy, Mapping):
        policy = policy.get(name)
    return policy if isinstance(policy, CPUOffloadPolicy) else None


def check_offload(policy: object) -> None:
    """Raise ``TypeError`` unless ``policy`` is one, or maps names of parameters to some."""
    members = policy.items() if isinstance(policy, Mapping) else [("", policy)]
    for name, member in members:
        if member is None or isinstance(member, OffloadPolicy):
            continue
        place = f" for '{name}'" if name else ""
        raise TypeError(
            f"Expected offload_policy to be a composable_shard.OffloadPolicy{place}, got "
            f"{type(member).__module__}.{type(member).__name__}"
        )


def check_names(policy: Offload, names: set[str]) -> None:
    """Raise ``ValueError`` if a mapping of policies names a parameter that is not there."""
    unknown = sorted(set(policy) - names) if isinstance(policy, Mapping) else []
    if unknown:
        raise ValueError(
            f"Expected offload_policy to name parameters of the module, got {unknown}; "
            f"there are {sorted(names)}"
        )


def pins(policy: CPUOffloadPolicy) -> bool:
    """Tell whether memory is pinned for ``policy``; warns once where it cannot be."""
    if not policy.pin_memory:
        return False
    if torch.accelerator.is_available():
        return True
    _warn_not_pinned()
    return False


def copies_beside_compute(policy: CPUOffloadPolicy | None, device: torch.device) -> bool:
    """Tell whether what ``policy`` keeps on the CPU is copied beside what ``device`` computes.

    That takes memory that is pinned; other copies are waited for.
    """
    return device.type != "cpu" and policy is not None and pins(policy)


@cache
def _warn_not_pinned() -> None:
    warnings.warn(
        "CPUOffloadPolicy(pin_memory=True) pins no memory: there is no accelerator to copy to; "
        "pass pin_memory=False to say so",
        stacklevel=2,
    )
