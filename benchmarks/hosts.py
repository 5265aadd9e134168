"""Time of a training step on two hosts with a slow network between them: ours beside FSDP2.

Run `python benchmarks/hosts.py` on Linux. The hosts are two network namespaces of this machine, and
the cable between them is as slow as asked for: 0.2 ms of latency and 1 Gbit/s by default. Where
the system has no `netem`, the latency is that of the machine and the rate is kept by `tbf`; the
title says so. Each host runs one rank with one thread. Contestants live in the same processes and
take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from report import load_average, print_load, print_table

ADDRESSES = ("10.78.0.1", "10.78.0.2")
PORT = 29517
LIMIT = 900  # seconds
ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.rank is not None:
        be_rank(options)
        return 0
    from rounds import Turn, join_ranks, quartiles, ratios, spread

    load = load_average()
    command = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments)]
    with hosts(options.latency, options.rate) as (entries, how):
        ranks = [
            subprocess.Popen(
                [*entry, *command, "--rank", str(rank)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"slow{rank}"}
                | {"PYTHONPATH": str(ROOT), "COMPOSABLE_SHARD_SHARED_MEMORY": "0"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, entry in enumerate(entries)
        ]
        try:
            told = [json.loads(rank.communicate(timeout=LIMIT)[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    rounds = [
        join_ranks([{name: Turn(*turn) for name, turn in one.items()} for one in both])
        for both in zip(*told, strict=True)
    ]
    walls = {name: [one[name].wall for one in rounds] for name in contestants(options)}
    rows = [
        (name, f"{1e3 * quartiles(wall).median:.1f}", spread(ratios(wall, walls["fsdp2"])))
        for name, wall in walls.items()
    ]
    title = (
        f"2 hosts, {how}; {options.rounds} rounds, "
        f"{options.layers} layers, width {options.width}, {options.dtype_policy}"
    )
    print_table(title, ("", "step ms", "of FSDP2's (quartiles)"), rows)
    print_load(load)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--latency", type=float, default=0.2, help="milliseconds, one way")
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype-policy", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--wire", nargs="*", default=[], help="also with messages in these dtypes")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def contestants(options: argparse.Namespace) -> list[str]:
    return ["ours", *(f"ours {dtype}" for dtype in options.wire), "fsdp2"]


def be_rank(options: argparse.Namespace) -> None:
    """Train all contestants on one host; print the times of its rounds."""
    import torch
    import torch.distributed as dist
    from contestants import Spec
    from rounds import build_one, orders, time_round

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=options.rank, world_size=2
    )
    spec = Spec(options.layers, options.width, dtype_policy=options.dtype_policy)
    for name in contestants(options):
        build_one(name, spec)
    found = [time_round(order, 2) for order in orders(contestants(options), options.rounds)]
    dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()


@contextlib.contextmanager
def hosts(latency: float, rate: int) -> Iterator[tuple[list[list[str]], str]]:
    """Make two hosts; yield the command prefixes that run on each, and a text about the link."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(sleeping(["unshare", "--user", "--map-root-user", "--net"]))
        second = stack.enter_context(sleeping([*enter(first), "unshare", "--net"]))
        run(first, "ip", "link", "add", "slow0", "type", "veth", "peer", "name", "slow1")
        run(first, "ip", "link", "set", "slow1", "netns", str(second))
        netem = ("netem", "delay", f"{latency}ms", "rate", f"{rate}mbit", "limit", "100000")
        tbf = ("tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "100ms")
        how = f"{latency} ms, {rate} Mbit/s"
        for number, pid in enumerate((first, second)):
            cable = f"slow{number}"
            run(pid, "ip", "address", "add", f"{ADDRESSES[number]}/24", "dev", cable)
            run(pid, "ip", "link", "set", cable, "up")
            run(pid, "ip", "link", "set", "lo", "up")
            try:
                run(pid, "tc", "qdisc", "add", "dev", cable, "root", *netem)
            except subprocess.CalledProcessError:
                run(pid, "tc", "qdisc", "add", "dev", cable, "root", *tbf)
                how = f"no added latency, {rate} Mbit/s"
        yield [enter(first), enter(second)], how


def enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials"]


def run(pid: int, *command: str) -> None:
    subprocess.run([*enter(pid), *command], check=True, timeout=20, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def sleeping(command: list[str]) -> Iterator[int]:
    """Start a process that sleeps in new namespaces; yield its number."""
    process = subprocess.Popen([*command, "sleep", str(LIMIT)])
    try:
        while Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep":
            time.sleep(0.01)
        yield process.pid
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
