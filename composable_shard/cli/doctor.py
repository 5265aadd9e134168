"""``composable-shard doctor``: the facts about this machine, its speed, and its problems."""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composable_shard.cli import installed_version, positive
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.gloo.mailbox import why_apart
from composable_shard.core.transport.gloo.shared_memory import SWITCH
from composable_shard.core.transport.pending import Waitable
from composable_shard.insight.report import counted
from composable_shard.mesh import resolve_mesh

# Facts about this machine and this torch that affect sharded training -----------------------------

OLDEST_TORCH = (2, 11)
BACKENDS = ("gloo", "nccl", "xccl", "ucc", "mpi")
VARIABLES: dict[str, dict[str, str]] = {
    "COMPOSABLE_SHARD_CHECK": {
        "1": "compares ranks before every collective, which costs time: unset it once training is "
        "debugged"
    },
    "COMPOSABLE_SHARD_POISON_MEMORY": {},
    SWITCH: {},
    "COMPOSABLE_SHARD_UNSAFE_SETATTR": {},
    "OMP_NUM_THREADS": {},
    "GLOO_SOCKET_IFNAME": {},
    "NCCL_SOCKET_IFNAME": {},
    "NCCL_P2P_DISABLE": {"1": "keeps GPUs from copying to each other: unset it"},
    "CUDA_VISIBLE_DEVICES": {},
    "CUDA_DEVICE_MAX_CONNECTIONS": {},
    "PYTORCH_ALLOC_CONF": {},
    "PYTORCH_CUDA_ALLOC_CONF": {},
    "TORCH_DISTRIBUTED_DEBUG": {"DETAIL": "makes every collective slower: unset it"},
}
"""Relevant environment variables, with values that make training slower and the reason."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the caching allocator, by their newer and their older name."""


@dataclass(frozen=True)
class Machine:
    """Facts about this machine, found without starting ranks.

    Attributes:
        versions: Versions of torch, Python, this package and einops; ``None`` if not installed.
        build: The accelerator that torch is built for: ``"cpu"``, ``"cuda 13.0"``, ``"hip 7"``.
        system: The operating system.
        backends: Whether torch has each backend of ``torch.distributed``.
        devices: The names of the accelerators.
        device_type: The device type on which ``fully_shard`` shards if no mesh is given.
        num_cores: Cores that this process may use.
        load: Programs that used or waited for a core, averaged over the last minute.
        num_threads: Threads that an operator may use.
        variables: Relevant environment variables; ``None`` if unset.
    """

    versions: dict[str, str | None]
    build: str
    system: str
    backends: dict[str, bool]
    devices: list[str]
    device_type: str
    num_cores: int
    load: float
    num_threads: int
    variables: dict[str, str | None]


@dataclass
class Findings:
    """Problems, and warnings about lost time or memory, each with its remedy."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def look() -> Machine:
    """Return the facts about this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    num_devices = 0 if accelerator is None else torch.accelerator.device_count()
    device_name = getattr(
        torch.get_device_module(device_type), "get_device_name", lambda _: device_type
    )
    numbers = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    builds = (f"{name} {number}" for name, number in numbers.items() if number)
    has_affinity, has_load = hasattr(os, "sched_getaffinity"), hasattr(os, "getloadavg")
    return Machine(
        versions={
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{name: installed_version(name) for name in ("composable_shard", "einops")},
        },
        build=next(builds, "cpu"),
        system=f"{platform.system()} {platform.release()}",
        backends={name: dist.is_backend_available(name) for name in BACKENDS},
        devices=[str(device_name(index)) for index in range(num_devices)],
        device_type=device_type,
        num_cores=len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        load=round(os.getloadavg()[0], 1) if has_load else 0.0,
        num_threads=torch.get_num_threads(),
        variables={name: os.environ.get(name) for name in VARIABLES},
    )


def judge(machine: Machine, num_ranks: int) -> Findings:
    """Return the findings for a training with ``num_ranks`` ranks on this machine."""
    torch_version, num_devices = str(machine.versions["torch"]), len(machine.devices)
    has_gpus, has_backend = machine.device_type == "cuda", any(machine.backends.values())
    oldest = ".".join(map(str, OLDEST_TORCH))
    settings = "".join(machine.variables[name] or "" for name in ALLOCATOR)
    problems = {
        f"torch {torch_version} is older than {oldest}: install a later one": (
            tuple(map(int, torch_version.split(".")[:2])) < OLDEST_TORCH
        ),
        "torch has no backend for collectives: install a build with gloo": not has_backend,
        "there are GPUs, but torch has no nccl: install a CUDA build": (
            has_gpus and has_backend and not machine.backends["nccl"]
        ),
        f"{num_ranks} ranks need as many devices, but there are {num_devices}: pass --ranks or "
        "--device cpu": 0 < num_devices < num_ranks,
    }
    warnings = {
        f"there is a GPU driver, but torch ({machine.build}) sees no GPU": (
            not machine.devices and Path("/dev/nvidiactl").exists()
        ),
        **{
            f"{name}={value} {how}": machine.variables[name] == value
            for name, slow in VARIABLES.items()
            for value, how in slow.items()
        },
        "the caching allocator of CUDA uses segments of fixed size, and unsharded parameters that "
        f"come and go fragment them: set {ALLOCATOR[0]}=expandable_segments:True": (
            has_gpus and machine.build.startswith("cuda") and "expandable_segments" not in settings
        ),  # ROCm is "hip"
    }
    found = [[text for text, is_so in texts.items() if is_so] for texts in (problems, warnings)]
    return Findings(*found)


SHARES, SENDS = "shared memory", "messages, because "
"""The transports between two ranks; a reason follows the second."""

SLOW = 20
"""A collective that is this many times slower than a copy of its bytes is a problem. Sockets on one
host, the slowest supported transport, are about 10 times slower."""

IDLE = 0.5  # the highest load of a machine on which nothing else runs


def other_programs(machine: Machine, num_ranks: int) -> str:
    """Return a warning about other programs that use the ranks' cores; empty if enough are free."""
    if machine.load <= max(0, machine.num_cores - num_ranks) + IDLE:
        return ""
    cores = counted(machine.num_cores, "core")
    return (
        f"other programs were running (load {machine.load:.1f} on {cores}): measure again when "
        "they have ended"
    )


def judge_threads(
    machine: Machine, num_ranks: int, measured: Measurement | None, found: Findings
) -> None:
    """Add slow collectives to the findings, with the cause: many threads, or other programs."""
    if machine.device_type != "cpu" or num_ranks == 1:
        return
    threads = machine.num_threads if measured is None else measured.num_threads
    fitting = max(1, machine.num_cores // num_ranks)
    cause = f"a container may allow fewer than {machine.num_cores} cores"
    remedy = "set OMP_NUM_THREADS=1" if threads > 1 else "start fewer ranks"
    if threads > fitting:
        cause = f"{num_ranks} ranks with {threads} threads each share {machine.num_cores} cores"
        remedy = f"set OMP_NUM_THREADS={fitting}"
    slow = "" if measured is None else measured.slow_collectives
    others = other_programs(machine, num_ranks)
    if slow and not others:
        found.problems.append(f"{slow} than a copy of memory; {cause}: {remedy}")
        return
    if slow:
        found.warnings.append(f"{slow} than a copy of memory; {others}")
    if threads > fitting:
        found.warnings.append(f"{cause}: {remedy}")


# The collectives that ``fully_shard`` uses, measured on ranks of this machine ---------------------

WARM_UPS, REPEATS = 2, 7
ATTEMPTS = 3  # at most, while a collective is slow
TIMEOUT = 120.0  # seconds that ranks may take
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@dataclass
class Collective:
    """The measurement of one collective.

    Attributes:
        how: The class that runs the collective.
        seconds: Median over repeats, of the slowest rank.
        nbytes_received: Bytes that one rank receives from the others.
        is_right: Whether the result was right on all ranks.
        bytes_per_second: Bytes that one rank receives in a second.
    """

    how: str
    seconds: float
    nbytes_received: int
    is_right: bool
    bytes_per_second: float = field(init=False)

    def __post_init__(self) -> None:
        self.bytes_per_second = self.nbytes_received / self.seconds


@dataclass(frozen=True)
class Measurement:
    """The measurements of the ranks.

    Attributes:
        backend: The backend of the device in the process group.
        num_threads: Compute threads of a rank.
        transports: The transport of each pair of ranks, such as "0-1", and the reason if it is not
            shared memory; empty if the backend chooses it.
        copied_per_second: Bytes that one thread of a rank copies from memory to memory in a second
            while the others do the same; ``None`` if the collectives do not use that memory.
        collectives: Each collective by name.
    """

    backend: str
    num_threads: int
    transports: dict[str, str]
    copied_per_second: float | None
    collectives: dict[str, Collective]

    def pairs_by_way(self) -> dict[str, str]:
        """Return the pairs of ranks by transport."""
        ways: dict[str, list[str]] = {}
        for pair, way in self.transports.items():
            ways.setdefault(way, []).append(pair)
        return {way: ", ".join(pairs) for way, pairs in ways.items()}

    def slowness(self) -> dict[str, float]:
        """Return how many times slower each collective is than a copy of its bytes."""
        copied = self.copied_per_second or 0.0
        return {name: copied / one.bytes_per_second for name, one in self.collectives.items()}

    @property
    def slow_collectives(self) -> str:
        """The collectives that are far slower than a copy of their bytes, and how much slower."""
        return ", ".join(
            f"{name.replace('_', '-')} is {times:.0f} times slower"
            for name, times in self.slowness().items()
            if times > SLOW
        )


def measure(num_ranks: int, device_type: str, nbytes: int) -> Measurement:
    """Start ranks, measure on each, and return the figures of the slowest.

    Args:
        num_ranks: Processes to start.
        device_type: The device type of compute: ``"cpu"``, ``"cuda"``, ...
        nbytes: Size of the full buffer that is gathered and reduced.

    Raises:
        TimeoutError: If the ranks do not end in time.
        Exception: The error of a rank.
    """
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, spawning.Pool(num_ranks) as pool:
        be_rank = partial(_be_rank, num_ranks, device_type, nbytes, folder)
        found = pool.imap_unordered(be_rank, range(num_ranks))
        try:
            return _slowest([found.next(TIMEOUT) for _ in range(num_ranks)])
        except multiprocessing.TimeoutError as error:
            raise TimeoutError(
                f"Expected {num_ranks} ranks to measure within {TIMEOUT:g} s, got a timeout"
            ) from error


def _slowest(found: Sequence[Measurement]) -> Measurement:
    collectives = {}
    for name in found[0].collectives:
        measured = [rank.collectives[name] for rank in found]
        is_right = all(collective.is_right for collective in measured)
        collectives[name] = replace(max(measured, key=attrgetter("seconds")), is_right=is_right)
    copied = [rank.copied_per_second for rank in found if rank.copied_per_second is not None]
    return replace(
        found[0],
        copied_per_second=min(copied, default=None),
        transports=dict(sorted(pair for rank in found for pair in rank.transports.items())),
        collectives=collectives,
    )


def _be_rank(num_ranks: int, device_type: str, nbytes: int, folder: str, rank: int) -> Measurement:
    for variable in LAUNCHER_VARIABLES:  # set by a launcher around the doctor
        os.environ.pop(variable, None)
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device(device_type, rank)
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    try:
        found = _measure_rank(device, nbytes)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


Launch = Callable[[], list[Waitable]]


def _measure_rank(device: torch.device, nbytes: int) -> Measurement:
    mesh = resolve_mesh(init_device_mesh(device.type, (dist.get_world_size(),)))
    channel, group = Channel(mesh), mesh.shard_group
    assert group is not None
    rank, num_ranks, backend = group.rank(), group.size(), str(dist.get_backend(group))
    numel = max(1, nbytes // (4 * num_ranks))
    received = 4 * numel * (num_ranks - 1)
    numbers = torch.arange(1.0, num_ranks + 1, device=device)
    shard = torch.full((numel,), float(rank + 1), device=device)
    gathered = torch.empty(num_ranks, numel, device=device)
    full = torch.full((num_ranks * numel,), float(rank + 1), device=device)

    def measured(how: object, launch: Launch, result: torch.Tensor, right: Any) -> Collective:
        def finish() -> None:
            for work in launch():
                work.wait()
            if device.type != "cpu":
                torch.accelerator.synchronize()

        seconds = _median(finish)
        return Collective(type(how).__name__, seconds, received, bool((result == right).all()))

    gather = partial(channel.gather, [gathered.view(-1)], [shard])
    reduce = partial(channel.reduce, [shard], [full], None)
    collectives = {
        "all_gather": measured(channel.all_gather, gather, gathered, numbers[:, None]),
        "reduce_scatter": measured(channel.reduce_scatter, reduce, shard, numbers.sum()),
    }
    transports = {}
    if device.type == "cpu" and backend == "gloo":
        reasons = why_apart(group)
        transports = {
            f"{rank}-{peer}": SENDS + reasons[peer] if peer in reasons else SHARES
            for peer in range(rank + 1, num_ranks)
        }
    return Measurement(
        backend=backend,
        num_threads=torch.get_num_threads(),
        transports=transports,
        copied_per_second=_copied_per_second(received) if device.type == "cpu" else None,
        collectives=collectives,
    )


def _median(do: Callable[[], None]) -> float:
    """Return the median time of a function that all ranks call at once."""
    seconds = []
    for _ in range(WARM_UPS + REPEATS):
        dist.barrier()
        start = time.perf_counter()
        do()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UPS:])


def _copied_per_second(nbytes: int) -> float:
    """Measure without the operators of torch, which too many threads make slow."""
    source, target = bytearray(nbytes), memoryview(bytearray(nbytes))

    def copy() -> None:
        target[:] = source

    return nbytes / _median(copy)


# The command --------------------------------------------------------------------------------------

_EXAMPLES = """examples:
  composable-shard doctor                      with a rank for each GPU, or two ranks on the CPU
  composable-shard doctor --ranks 4 --mib 256  four ranks that gather 256 MiB
  composable-shard doctor --device cpu         two ranks on the CPU, even if there are GPUs
  composable-shard doctor --no-measure         start no ranks
  composable-shard doctor --json               for programs

exit codes: 0 no problem (there may be warnings), 1 a problem, 2 wrong arguments
"""
_MIB = 1 << 20
_COALESCED = "one coalesced launch of {backend} for a group"
_HOW = {
    "DirectAllGather": "{way}",
    "DirectReduceScatter": "{way}, summed in rank order",
    "CoalescedAllGather": _COALESCED,
    "CoalescedReduceScatter": _COALESCED,
}


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Show which torch, devices and collectives training uses on this machine, measure the "
        "bandwidth of the collectives on ranks started here, and give advice."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument("--ranks", type=positive, help="number of ranks to measure with")
    parser.add_argument("--mib", type=positive, default=64, help="MiB to gather (default: 64)")
    parser.add_argument("--device", choices=["cpu"], help="measure on the CPU despite GPUs")
    parser.add_argument("--no-measure", action="store_true", help="start no ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look, measure and print; return 1 if there is a problem."""
    machine = look()
    if arguments.device == "cpu":
        machine = replace(machine, device_type="cpu", devices=[])
    num_ranks = arguments.ranks or len(machine.devices) or 2
    found = judge(machine, num_ranks)
    measured = None
    if num_ranks > 1 and not arguments.no_measure and not found.problems:
        measured = _measure(num_ranks, machine, arguments.mib * _MIB, found)
    judge_threads(machine, num_ranks, measured, found)
    if arguments.json:
        print(json.dumps(_as_dict(machine, num_ranks, measured, found), indent=2))
    else:
        lines = _lines(machine, num_ranks, measured, found)
        width = max(len(topic) for topic, _ in lines) + 2
        print("\n".join(f"{topic:{width}}{text}" for topic, text in lines))
    return 1 if found.problems else 0


def _measure(num_ranks: int, machine: Machine, nbytes: int, found: Findings) -> Measurement | None:
    """Measure, and again while a collective looks slow; return the fastest attempt."""
    attempts: list[Measurement] = []
    others, start = other_programs(machine, num_ranks), time.monotonic()
    try:
        while not attempts or (
            attempts[-1].slow_collectives
            and len(attempts) < ATTEMPTS
            and time.monotonic() < start + TIMEOUT / 4
        ):
            attempts.append(measure(num_ranks, machine.device_type, nbytes))
    except Exception as error:  # noqa: BLE001 (any failure of a rank is a finding)
        if others and isinstance(error, TimeoutError):
            found.warnings.append(f"{error}; {others}")
            return None
        *_, reason = str(error).strip().splitlines() or [""]
        found.problems.append(
            f"{num_ranks} ranks could not measure: {type(error).__name__}: {reason}; if they do "
            "not reach each other, set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to a network "
            "interface, lo for one machine"
        )
        return None
    measured = min(attempts, key=lambda attempt: max(attempt.slowness().values()))
    for name in measured.collectives:
        if not all(attempt.collectives[name].is_right for attempt in attempts):
            found.problems.append(f"{name} gave wrong values: the backend or the machine is broken")
    found.warnings += [
        f"ranks {pairs} communicate through sockets instead of shared memory: "
        f"{way.removeprefix(SENDS)}"
        for way, pairs in measured.pairs_by_way().items()
        if way != SHARES
    ]
    return measured


def _as_dict(
    machine: Machine, num_ranks: int, measured: Measurement | None, found: Findings
) -> dict[str, Any]:
    numbers = None if measured is None else asdict(measured)
    if numbers is not None:
        numbers |= numbers.pop("collectives")
    return {
        "is_well": not found.problems,
        "machine": asdict(machine),
        "num_ranks": num_ranks,
        "measured": numbers,
        **asdict(found),
    }


def _lines(
    machine: Machine, num_ranks: int, measured: Measurement | None, found: Findings
) -> list[tuple[str, str]]:
    versions = machine.versions
    backends = [name for name, there in machine.backends.items() if there]
    variables = [f"{name}={value}" for name, value in machine.variables.items() if value]
    devices = ", ".join(machine.devices) or "the CPU alone"
    cores, threads = counted(machine.num_cores, "core"), counted(machine.num_threads, "thread")
    lines = [
        ("torch", f"{versions['torch']}, built for {machine.build}"),
        ("python", f"{versions['python']} on {machine.system}"),
        ("devices", f"{devices}; {cores}, {threads}, load {machine.load:.1f}"),
        ("backends", ", ".join(backends) or "none"),
        ("variables", ", ".join(variables) or "no relevant variable is set"),
    ]
    if measured is not None:
        lines += _lines_of_ranks(f"{num_ranks} on {machine.device_type}", measured)
    elif num_ranks == 1:
        lines.append(("ranks", f"1 on {machine.device_type}, which has no collectives"))
    lines += [("warning", text) for text in found.warnings]
    lines += [("problem", text) for text in found.problems]
    if not found.problems:
        verdict = "training works; see the warnings above" if found.warnings else "nothing is wrong"
        lines.append(("verdict", verdict))
    return lines


def _lines_of_ranks(ranks: str, measured: Measurement) -> list[tuple[str, str]]:
    threads, ways = counted(measured.num_threads, "thread"), measured.pairs_by_way()
    way = "in shared memory" if list(ways) == [SHARES] else "sent from rank to rank over gloo"
    lines = [("ranks", f"{ranks} over {measured.backend}, {threads} each")]
    lines += [("transport", f"{how}: ranks {pairs}") for how, pairs in ways.items()]
    for name, result in measured.collectives.items():
        how = _HOW[result.how].format(backend=measured.backend, way=way)
        speed = f"{result.bytes_per_second / 1e9:.2f} GB/s to each rank"
        took = f"({result.nbytes_received / _MIB:.0f} MiB in {result.seconds * 1e3:.1f} ms)"
        lines.append((name.replace("_", "-"), f"{speed} {took}, {how}"))
    return lines
