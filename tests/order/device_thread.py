"""A program: training steps on a simulated accelerator, whose backward has a thread of its own.

Torch lets a device be written in Python, and autograd starts a worker thread for it as for a GPU.
Tensors on it are fake ones, which have shapes and devices and no values: whatever would wait for
the device to read a value raises an error. Prints for each case what was seen on the device, and
the events of the same steps on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from nets import Checkpointed, Net, Reentrant, shard_net
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy
from composable_shard.core.transport import process_groups
from composable_shard.core.transport.channel import Channel
from composable_shard.insight.events import record_events

NUM_RANKS, NUM_STEPS = 4, 3


class Accelerator(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, *_: Any) -> None:
        """There are no random numbers."""


class Transfers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, result)) if isinstance(one, torch.Tensor)]
        devices = list(dict.fromkeys(one.device.type for one in tensors if one.ndim))
        if len(devices) > 1:
            self.found.append(" to ".join(devices))
        return result


def run(device: str, case: Case) -> dict[str, Any]:
    """Train a model and return what the last step did, and where hooks ran."""
    names = ("replicate", "shard") if case.hybrid else ("shard",)
    extents = (2, NUM_RANKS // 2) if case.hybrid else (NUM_RANKS,)
    mesh = init_device_mesh(device, extents, mesh_dim_names=names)
    seen: set[bool] = set()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        model: Any = shard_net(case.make(), mesh=mesh, **case.kwargs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

        def listen() -> None:
            if torch._C._current_graph_task_id() != -1:
                seen.add(threading.current_thread() is threading.main_thread())

        for step in range(NUM_STEPS):
            x = torch.randn(3, 4, requires_grad=True)
            with (
                model.no_sync() if step == case.no_sync_in else contextlib.nullcontext(),
                Transfers() as transfers,
                record_events(model) as events,
                before_launches(listen),
            ):
                model(x).sum().backward()
                gradients = [param.grad for param in model.parameters()]
                if step != case.no_sync_in:
                    model.clip_grad_norm_(1.0)
                    optimizer.step()
                    model.zero_grad()
    return {
        "events": [list(event) for event in events],
        "in main thread": sorted(seen),
        "transfers": sorted(set(transfers.found)),
        "placements": sorted({str(grad.placements) for grad in gradients}),
        "gradients on": sorted({grad.device.type for grad in gradients}),
    }


@contextlib.contextmanager
def before_launches(act: Callable[[], object]) -> Iterator[None]:
    launch = Channel._launch

    def launch_after(self: Channel, *args: Any) -> Any:
        act()
        return launch(self, *args)

    with mock.patch.object(Channel, "_launch", launch_after):
        yield


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    make: type[Net] = Net
    hybrid: bool = False
    no_sync_in: int = -1
    kwargs: dict[str, Any] = field(default_factory=dict)


def columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


CASES = {
    "plain": Case(),
    "replicas": Case(hybrid=True, kwargs={"mp_policy": LOW}),
    "without sync": Case(no_sync_in=NUM_STEPS - 1),
    "offloaded": Case(kwargs={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "low precision": Case(kwargs={"mp_policy": LOW}),
    "checkpoints": Case(Checkpointed),
    "reentrant checkpoints": Case(Reentrant, kwargs={"mp_policy": LOW}),
    "after one without sync": Case(no_sync_in=NUM_STEPS - 2, kwargs={"mp_policy": LOW}),
    "kept after forward": Case(kwargs={"reshard_after_forward": False}),
    "kept by two ranks": Case(kwargs={"reshard_after_forward": 2}),
    "inner dim": Case(kwargs={"shard_placement_fn": columns, "mp_policy": LOW}),
}


def main() -> None:
    backend_registration._setup_privateuseone_for_python_backend(
        "simulated", backend_module=Accelerator()
    )
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from simulated import simulated_ranks

    compare: Any = process_groups.compare  # it reads numbers on the host, once
    compare.__code__ = (lambda text, ranks, device, *numbers: (True, list(numbers))).__code__
    found = {}
    with simulated_ranks(NUM_RANKS):
        for name in sys.argv[1:]:
            found[name] = {device: run(device, CASES[name]) for device in ("simulated", "cpu")}
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # autograd's thread of a device that is written in Python outlives Python


if __name__ == "__main__":
    main()
