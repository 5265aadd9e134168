"""What this machine and this torch have, as far as sharded training cares."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from composable_shard.core.comms.near_memory import is_offered

OLDEST_TORCH = (2, 11)
BACKENDS = ("gloo", "nccl", "xccl", "ucc", "mpi")
VARIABLES = (
    "COMPOSABLE_SHARD_CHECK",
    "COMPOSABLE_SHARD_POISON_MEMORY",
    "COMPOSABLE_SHARD_READ_NEAR_MEMORY",
    "COMPOSABLE_SHARD_UNSAFE_SETATTR",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_P2P_DISABLE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG",
)
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class Machine:
    """Facts, found without starting anything.

    Attributes:
        versions: Of torch, Python, this package and einops; ``None`` if not installed.
        build: The accelerator that torch is built for: ``"cpu"``, ``"cuda 13.0"``, ``"hip 7"``.
        system: The operating system.
        backends: Which backends of ``torch.distributed`` there are.
        devices: The accelerators, by name.
        device_type: Where ``fully_shard`` shards if no mesh is given.
        num_cores: Cores that this process may use.
        num_threads: Threads that an operator may use.
        has_memory_calls: Whether the system has calls for reading other processes' memory, and the
            environment does not forbid their use.
        variables: Environment variables that matter here; ``None`` if unset.
    """

    versions: dict[str, str | None]
    build: str
    system: str
    backends: dict[str, bool]
    devices: list[str]
    device_type: str
    num_cores: int
    num_threads: int
    has_memory_calls: bool
    variables: dict[str, str | None]


@dataclass
class Findings:
    """What is wrong, and what could be better; each with what to do about it."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def look() -> Machine:
    """Return the facts about this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    num_devices = 0 if accelerator is None else torch.accelerator.device_count()
    available = dist.is_available()
    return Machine(
        versions={
            "torch": torch.__version__,
            "python": platform.python_version(),
            "composable_shard": _version("composable_shard"),
            "einops": _version("einops"),
        },
        build=_build(),
        system=f"{platform.system()} {platform.release()}",
        backends={name: available and dist.is_backend_available(name) for name in BACKENDS},
        devices=[_device_name(device_type, index) for index in range(num_devices)],
        device_type=device_type,
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        num_threads=torch.get_num_threads(),
        has_memory_calls=is_offered(),
        variables={name: os.environ.get(name) for name in VARIABLES},
    )


def judge(machine: Machine, num_ranks: int) -> Findings:
    """Return what the facts say about training with ``num_ranks`` ranks on this machine."""
    found = Findings()
    torch_version = tuple(int(part) for part in str(machine.versions["torch"]).split(".")[:2])
    if torch_version < OLDEST_TORCH:
        found.problems.append(
            f"torch {machine.versions['torch']} is older than {'.'.join(map(str, OLDEST_TORCH))}: "
            "install a later one"
        )
    if not any(machine.backends.values()):
        found.problems.append("torch has no backend for collectives: install a build with gloo")
    elif machine.device_type == "cuda" and not machine.backends["nccl"]:
        found.problems.append("there are GPUs, but torch has no nccl: install a CUDA build")
    if 0 < len(machine.devices) < num_ranks:
        found.problems.append(
            f"{num_ranks} ranks need as many devices, there are {len(machine.devices)}: "
            "pass --ranks or --device cpu"
        )
    if not machine.devices and Path("/dev/nvidiactl").exists():
        found.warnings.append(f"there is a GPU driver, but torch ({machine.build}) sees no GPU")
    found.warnings += _warnings_of_variables(machine, num_ranks)
    return found


def advice_on_near_memory(machine: Machine) -> str:
    """Say why ranks on this machine cannot read each other's memory, and what to do."""
    start = "ranks send through sockets what they could read from each other's memory: "
    switch = "COMPOSABLE_SHARD_READ_NEAR_MEMORY"
    if machine.variables[switch] == "0":
        return f"{start}{switch}=0 forbids it; unset it"
    if not machine.has_memory_calls:
        return f"{start}{machine.system} has no process_vm_readv"
    if _PTRACE_SCOPE.exists() and _PTRACE_SCOPE.read_text().strip() != "0":
        return (
            f"{start}Yama forbids it ({_PTRACE_SCOPE} is {_PTRACE_SCOPE.read_text().strip()}); "
            "0 there, or CAP_SYS_PTRACE, allows it"
        )
    return (
        f"{start}the system forbids it; in a container allow process_vm_readv "
        "(CAP_SYS_PTRACE) and let all ranks run in one process namespace"
    )


def _warnings_of_variables(machine: Machine, num_ranks: int) -> list[str]:
    found, set_to = [], machine.variables
    if set_to["COMPOSABLE_SHARD_CHECK"] == "1":
        found.append(
            "COMPOSABLE_SHARD_CHECK=1 compares ranks before every collective, which costs time: "
            "unset it once training is debugged"
        )
    if set_to["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL":
        found.append("TORCH_DISTRIBUTED_DEBUG=DETAIL makes every collective slower: unset it")
    if set_to["NCCL_P2P_DISABLE"] == "1":
        found.append("NCCL_P2P_DISABLE=1 keeps GPUs from copying to each other: unset it")
    total = num_ranks * machine.num_threads
    if machine.device_type == "cpu" and num_ranks > 1 and total > machine.num_cores:
        fitting = max(1, machine.num_cores // num_ranks)
        found.append(
            f"{num_ranks} ranks with {machine.num_threads} threads each share {machine.num_cores} "
            f"cores: set OMP_NUM_THREADS={fitting}, or start fewer ranks"
        )
    return found


def _build() -> str:
    for name in ("cuda", "hip", "xpu"):
        number = getattr(torch.version, name, None)
        if number:
            return f"{name} {number}"
    return "cpu"


def _device_name(device_type: str, index: int) -> str:
    module = torch.get_device_module(device_type)
    name = getattr(module, "get_device_name", lambda _: device_type)
    return str(name(index))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cores() -> int:
    return os.cpu_count() or 1
