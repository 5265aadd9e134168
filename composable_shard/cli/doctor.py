"""Show what training uses on this machine, measure its collectives, and give advice.

Examples:
  composable-shard doctor                      with a rank for each GPU, or two ranks on the CPU
  composable-shard doctor --ranks 4 --mib 256  four ranks that gather 256 MiB
  composable-shard doctor --no-measure         start no ranks

Exit codes: 0 no problem (there may be warnings), 1 a problem, 2 wrong arguments
"""

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composable_shard.cli import installed_version, positive
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.gloo.mailbox import why_not_shared
from composable_shard.core.transport.gloo.shared_memory import SWITCH
from composable_shard.core.transport.pending import Waitable
from composable_shard.core.transport.process_groups import gather_objects
from composable_shard.insight.report import counted
from composable_shard.mesh import resolve_mesh

Facts = dict[str, Any]
"""Facts as ``--json`` prints them."""

# Facts about this machine and this torch that affect sharded training -----------------------------

OLDEST_TORCH = (2, 11)
BACKENDS = ("gloo", "nccl", "xccl", "ucc", "mpi")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the caching allocator, by their newer and their older name."""
VARIABLES = (
    *("COMPOSABLE_SHARD_CHECK", "COMPOSABLE_SHARD_POISON_MEMORY", SWITCH),
    *("FSDP_USE_UNSAFE_SETATTR", "OMP_NUM_THREADS"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", *ALLOCATOR, "TORCH_DISTRIBUTED_DEBUG"),
)
"""Relevant environment variables."""
COSTS = {
    ("COMPOSABLE_SHARD_CHECK", "1"): "slows every collective: unset it once training is debugged",
    ("NCCL_P2P_DISABLE", "1"): "keeps GPUs from copying to each other: unset it",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "makes every collective slower: unset it",
}
"""Variables with values that make training slower, and the reason."""


def look() -> Facts:
    """Return the facts about this machine, found without starting ranks.

    - ``versions``: of torch, Python, this package and einops; ``None`` if not installed.
    - ``build``: the accelerator that torch is built for: ``"cpu"``, ``"cuda 13.0"``, ``"hip 7"``.
    - ``system``: the operating system.
    - ``backends``: whether torch has each backend of ``torch.distributed``.
    - ``devices``: the names of the accelerators.
    - ``device_type``: the device type on which ``fully_shard`` shards if no mesh is given.
    - ``num_cores``: cores that this process may use.
    - ``load``: programs that used or waited for a core, averaged over the last minute.
    - ``num_threads``: threads that an operator may use.
    - ``variables``: relevant environment variables; ``None`` if unset.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    module, has_affinity = torch.get_device_module(device_type), hasattr(os, "sched_getaffinity")
    device_name = getattr(module, "get_device_name", lambda _: device_type)
    builds = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    packages = {name: installed_version(name) for name in ("composable_shard", "einops")}
    return {
        "versions": {"torch": torch.__version__, "python": platform.python_version(), **packages},
        "build": next((f"{name} {number}" for name, number in builds.items() if number), "cpu"),
        "system": f"{platform.system()} {platform.release()}",
        "backends": {name: dist.is_backend_available(name) for name in BACKENDS},
        "devices": [str(device_name(index)) for index in range(torch.accelerator.device_count())],
        "device_type": device_type,
        "num_cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        "load": round(os.getloadavg()[0], 1),
        "num_threads": torch.get_num_threads(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def problems_of(machine: Facts, num_ranks: int) -> Iterator[str]:
    """Yield the reasons why ``num_ranks`` ranks cannot train on this machine."""
    version, num_devices = machine["versions"]["torch"], len(machine["devices"])
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield f"torch {version} is older than {oldest}: install a later one"
    if not any(machine["backends"].values()):
        yield "torch has no backend for collectives: install a build with gloo"
    elif machine["device_type"] == "cuda" and not machine["backends"]["nccl"]:
        yield "there are GPUs, but torch has no nccl: install a CUDA build"
    if 0 < num_devices < num_ranks:
        yield f"{num_ranks} ranks, but {num_devices} devices: pass --ranks or --device cpu"


def warnings_of(machine: Facts) -> Iterator[str]:
    """Yield the settings of this machine that cost time or memory."""
    variables, build = machine["variables"], machine["build"]
    if not machine["devices"] and Path("/dev/nvidiactl").exists():
        yield f"there is a GPU driver, but torch ({build}) sees no GPU"
    for (name, value), reason in COSTS.items():
        if variables[name] == value:
            yield f"{name}={value} {reason}"
    allocator = "".join(variables[name] or "" for name in ALLOCATOR)
    is_cuda = machine["device_type"] == "cuda" and build.startswith("cuda")  # ROCm is "hip"
    if is_cuda and "expandable_segments" not in allocator:
        remedy = f"set {ALLOCATOR[0]}=expandable_segments:True"
        yield f"gathered parameters fragment the memory of the CUDA allocator: {remedy}"


# The collectives that ``fully_shard`` uses, measured on ranks of this machine ---------------------

WARM_UPS, REPEATS = 2, 7
TIMEOUT = 120.0  # seconds that ranks may take
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
COLLECTIVES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
SHARES, SENDS = "shared memory", "messages, because "
"""The transports between two ranks; a reason follows the second."""


def measure(num_ranks: int, device_type: str, nbytes: int) -> Facts:
    """Start ranks, measure on each, and return the figures of the slowest.

    Args:
        num_ranks: Processes to start.
        device_type: The device type of compute: ``"cpu"``, ``"cuda"``, ...
        nbytes: Size of the full buffer that is gathered and reduced.

    Returns:
        - ``backend``: the backend of the device in the process group.
        - ``num_threads``: compute threads of a rank.
        - ``transports``: the transport of each pair of ranks, such as "0-1", and the reason if it
          is not shared memory; empty if the backend chooses it.
        - ``copied_per_second``: bytes that one thread of a rank copies from memory to memory in a
          second while the others do the same; ``None`` if the collectives do not use that memory.
        - ``all_gather``, ``reduce_scatter``: the class that runs the collective (``how``), the
          median ``seconds``, ``nbytes_received`` by one rank from the others, whether the result
          ``is_right`` on all ranks, and ``bytes_per_second`` that one rank receives.

    Raises:
        multiprocessing.TimeoutError: If the ranks do not end in time.
        Exception: The error of a rank.
    """
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, spawning.Pool(num_ranks) as pool:
        be_rank = partial(_be_rank, num_ranks, device_type, nbytes, folder)
        found = pool.imap_unordered(be_rank, range(num_ranks))
        *_, measured = (found.next(TIMEOUT) for _ in range(num_ranks))
        return measured


def _be_rank(num_ranks: int, device_type: str, nbytes: int, folder: str, rank: int) -> Facts:
    for variable in LAUNCHER_VARIABLES:  # set by a launcher around the doctor
        os.environ.pop(variable, None)
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device(device_type, rank)
        torch.accelerator.set_device_index(rank)
    backend, store = dist.get_default_backend_for_device(device), f"file://{folder}/store"
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(backend, store, timeout=timeout, rank=rank, world_size=num_ranks)
    found = _measure_rank(device, nbytes)
    dist.barrier()
    dist.destroy_process_group()
    return found


Launch = Callable[[], list[Waitable] | None]


def _measure_rank(device: torch.device, nbytes: int) -> Facts:
    """Measure; all ranks return the figures of the slowest."""
    mesh = resolve_mesh(init_device_mesh(device.type, (dist.get_world_size(),)))
    channel, group = Channel(mesh), mesh.shard_group
    assert group is not None
    rank, num_ranks, backend = group.rank(), group.size(), str(dist.get_backend(group))
    is_on_cpu, numel = device.type == "cpu", max(1, nbytes // (4 * num_ranks))
    received = 4 * numel * (num_ranks - 1)
    numbers = torch.arange(1.0, num_ranks + 1, device=device)
    shard = torch.full((numel,), float(rank + 1), device=device)
    gathered = torch.empty(num_ranks, numel, device=device)
    full = torch.full((num_ranks * numel,), float(rank + 1), device=device)
    # Bytes are copied without the operators of torch, which too many threads make slow.
    source, target = bytearray(received), memoryview(bytearray(received))

    gather = partial(channel.gather, [gathered.view(-1)], [shard])
    reduce = partial(channel.reduce, [shard], [full], shard.dtype, None)

    def copy() -> None:
        target[:] = source

    def measured(how: object, launch: Launch, result: torch.Tensor, right: torch.Tensor) -> Facts:
        seconds, is_wrong = worst(device, _median(launch, device), bool((result != right).any()))
        return {
            "how": type(how).__name__,
            "seconds": seconds,
            "nbytes_received": received,
            "is_right": not is_wrong,
            "bytes_per_second": received / seconds,
        }

    [copy_seconds] = worst(device, _median(copy, device))
    return {
        "backend": backend,
        "num_threads": torch.get_num_threads(),
        "transports": _transports(group) if is_on_cpu and backend == "gloo" else {},
        "copied_per_second": received / copy_seconds if is_on_cpu else None,
        "all_gather": measured(channel.all_gather, gather, gathered, numbers[:, None]),
        "reduce_scatter": measured(channel.reduce_scatter, reduce, shard, numbers.sum()),
    }


def _median(launch: Launch, device: torch.device) -> float:
    """Return the median time of an operation that all ranks launch at once."""
    seconds = []
    for _ in range(WARM_UPS + REPEATS):
        dist.barrier()
        start = time.perf_counter()
        for work in launch() or ():
            work.wait()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UPS:])


def worst(device: torch.device, *figures: float) -> list[float]:
    """Return the highest value of each figure on any rank. Collective: an all-reduce."""
    highest = torch.tensor(figures, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return [float(value) for value in highest]


def _transports(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the transport of each pair of ranks. Collective: an all-gather of small objects."""
    reasons, rank = why_not_shared(group), group.rank()
    ways = {
        f"{rank}-{peer}": SENDS + reasons[peer] if peer in reasons else SHARES
        for peer in range(rank + 1, group.size())
    }
    gathered = gather_objects(ways, group, "describing transports")
    return {pair: way for told in gathered for pair, way in told.items()}


# Problems and warnings of a measurement -----------------------------------------------------------

SLOW = 20
"""A collective that is this many times slower than a copy of its bytes gets a warning. Sockets on
one host, the slowest supported transport, are about 10 times slower."""
UNREACHED = "if they cannot connect, set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME): lo on one machine"


def judge(report: Facts, nbytes: int) -> None:
    """Measure, and report what is wrong."""
    num_ranks = report["num_ranks"]
    try:
        measured = report["measured"] = measure(num_ranks, report["machine"]["device_type"], nbytes)
    except Exception as error:  # noqa: BLE001 (any failure of a rank is a finding)
        reason = str(error).strip().rpartition("\n")[2]
        if isinstance(error, multiprocessing.TimeoutError):
            reason = f"no result within {TIMEOUT:g} s"
        problem = f"{num_ranks} ranks could not measure: {type(error).__name__}: {reason}"
        report["problems"].append(f"{problem}; {UNREACHED}")
        return
    report["problems"] += [
        f"{name} gave wrong values: the backend or the machine is broken"
        for key, name in COLLECTIVES.items()
        if not measured[key]["is_right"]
    ]
    report["warnings"] += [
        f"ranks {pairs} do not share memory: {way.removeprefix(SENDS)}"
        for way, pairs in pairs_by_way(measured).items()
        if way != SHARES
    ]


def pairs_by_way(measured: Facts) -> dict[str, str]:
    """Return the pairs of ranks by transport."""
    ways: dict[str, list[str]] = {}
    for pair, way in measured["transports"].items():
        ways.setdefault(way, []).append(pair)
    return {way: ", ".join(pairs) for way, pairs in ways.items()}


def speed_warnings(report: Facts) -> Iterator[str]:
    """Yield slow collectives and too many threads of ranks on the CPU."""
    machine, num_ranks, measured = report["machine"], report["num_ranks"], report["measured"]
    if machine["device_type"] != "cpu" or num_ranks == 1:
        return
    threads, cores = (measured or machine)["num_threads"], machine["num_cores"]
    fitting, slow = max(1, cores // num_ranks), list[str]()
    for key, name in COLLECTIVES.items() if measured else ():
        times = measured["copied_per_second"] / measured[key]["bytes_per_second"]
        if times > SLOW:
            slow.append(f"{name} is {times:.0f} times slower")
    advice = f"other programs may run, or a container may allow fewer than {cores} cores"
    if threads > fitting:
        shared = f"{num_ranks} ranks with {threads} threads each share {cores} cores"
        advice = f"{shared}: set OMP_NUM_THREADS={fitting}"
    if slow:
        yield f"{', '.join(slow)} than a copy of memory; {advice}"
    elif threads > fitting:
        yield advice


# The command --------------------------------------------------------------------------------------

_MIB = 1 << 20


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
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
        machine = {**machine, "device_type": "cpu", "devices": []}
    num_ranks = arguments.ranks or len(machine["devices"]) or 2
    report: Facts = {
        "is_well": True,
        "machine": machine,
        "num_ranks": num_ranks,
        "measured": None,
        "problems": list(problems_of(machine, num_ranks)),
        "warnings": list(warnings_of(machine)),
    }
    if num_ranks > 1 and not arguments.no_measure and not report["problems"]:
        judge(report, arguments.mib * _MIB)
    report["warnings"] += speed_warnings(report)
    report["is_well"] = not report["problems"]
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        lines = list(_lines(report))
        width = max(len(topic) for topic, _ in lines) + 2
        print("\n".join(f"{topic:{width}}{text}" for topic, text in lines))
    return 0 if report["is_well"] else 1


def _lines(report: Facts) -> Iterator[tuple[str, str]]:
    machine, measured = report["machine"], report["measured"]
    versions, cores = machine["versions"], counted(machine["num_cores"], "core")
    devices = ", ".join(machine["devices"]) or "the CPU alone"
    threads = counted(machine["num_threads"], "thread")
    backends = [name for name, is_there in machine["backends"].items() if is_there]
    variables = [f"{name}={value}" for name, value in machine["variables"].items() if value]
    yield "torch", f"{versions['torch']}, built for {machine['build']}"
    yield "python", f"{versions['python']} on {machine['system']}"
    yield "devices", f"{devices}; {cores}, {threads}, load {machine['load']:.1f}"
    yield "backends", ", ".join(backends) or "none"
    yield "variables", ", ".join(variables) or "no relevant variable is set"
    ranks = f"{report['num_ranks']} on {machine['device_type']}"
    if measured is not None:
        yield from _lines_of_ranks(ranks, measured)
    elif report["num_ranks"] == 1:
        yield "ranks", f"{ranks}, which has no collectives"
    yield from (("warning", text) for text in report["warnings"])
    yield from (("problem", text) for text in report["problems"])
    if report["is_well"]:
        reservation = "training works; see the warnings above"
        yield "verdict", reservation if report["warnings"] else "nothing is wrong"


def _lines_of_ranks(ranks: str, measured: Facts) -> Iterator[tuple[str, str]]:
    backend, ways = measured["backend"], pairs_by_way(measured)
    yield "ranks", f"{ranks} over {backend}, {counted(measured['num_threads'], 'thread')} each"
    yield from (("transport", f"{way}: ranks {pairs}") for way, pairs in ways.items())
    way = "in shared memory" if list(ways) == [SHARES] else "sent from rank to rank over gloo"
    for key, name in COLLECTIVES.items():
        result = measured[key]
        how = f"one coalesced launch of {backend} for a group"
        if result["how"].startswith("Direct"):
            how = f"{way}, summed in rank order" if key == "reduce_scatter" else way
        speed = f"{result['bytes_per_second'] / 1e9:.2f} GB/s to each rank"
        took = f"({result['nbytes_received'] / _MIB:.0f} MiB in {result['seconds'] * 1e3:.1f} ms)"
        yield name, f"{speed} {took}, {how}"
