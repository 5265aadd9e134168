"""``composable-shard doctor``: what will be used on this machine, how fast it is, what is wrong."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from composable_shard.cli.bandwidth import Collective, Measurement, Request, measure
from composable_shard.cli.machine import Findings, Machine, advice_on_near_memory, judge, look
from composable_shard.cli.printing import Line, print_lines

_EXAMPLES = """examples:
  composable-shard doctor                      with a rank for each GPU, or two ranks on the CPU
  composable-shard doctor --ranks 4 --mib 256  four ranks that gather 256 MiB
  composable-shard doctor --device cpu         two ranks on the CPU, whatever else there is
  composable-shard doctor --no-measure         start no ranks
  composable-shard doctor --json               for programs

exit codes: 0 nothing is wrong (there may be warnings), 1 something is, 2 wrong arguments
"""
_MIB = 1 << 20
_HOW = {
    "DirectAllGather": "{way}",
    "DirectReduceScatter": "{way}, summed in rank order",
    "CoalescedAllGather": "one coalesced launch of {backend} for a group",
    "CoalescedReduceScatter": "one coalesced launch of {backend} for a group",
}


def add_parser(subparsers: Any) -> None:
    """Add ``doctor`` to the commands."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what this machine will use, how fast it is, and what is wrong",
        description=(
            "Say which torch, devices and collectives will be used on this machine, measure the "
            "bandwidth of the collectives on ranks started here, and advise."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=_positive, help="how many ranks to measure with")
    parser.add_argument("--mib", type=_positive, default=64, help="size to gather (default: 64)")
    parser.add_argument(
        "--repeats", type=_positive, default=7, help="measurements, of which the median is shown"
    )
    parser.add_argument("--device", choices=["cpu"], help="measure there, whatever else there is")
    parser.add_argument("--timeout", type=_positive, default=120, help="seconds (default: 120)")
    parser.add_argument("--no-measure", action="store_true", help="start no ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look, measure and print; return 1 if something is wrong."""
    machine = look()
    if arguments.device == "cpu":
        machine = Machine(**{**vars(machine), "device_type": "cpu", "devices": []})
    num_ranks = arguments.ranks or len(machine.devices) or 2
    found = judge(machine, num_ranks)
    measured = None
    if num_ranks > 1 and not arguments.no_measure and not found.problems:
        request = Request(
            num_ranks,
            machine.device_type,
            arguments.mib * _MIB,
            arguments.repeats,
            arguments.timeout,
        )
        measured = _measure(request, machine, found)
    if arguments.json:
        print(json.dumps(_as_dict(machine, num_ranks, measured, found), indent=2))
    else:
        print_lines(_lines(machine, num_ranks, measured, found))
    return 1 if found.problems else 0


def _measure(request: Request, machine: Machine, found: Findings) -> Measurement | None:
    try:
        measured = measure(request)
    except Exception as error:  # noqa: BLE001 (whatever a rank fails with is what is wrong)
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        found.problems.append(
            f"{request.num_ranks} ranks could not measure: {reason[0]}; if they do not reach each "
            "other, set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to a network interface, lo for one "
            "machine"
        )
        return None
    for name in ("all_gather", "reduce_scatter"):
        if not getattr(measured, name).is_right:
            found.problems.append(f"{name} gave wrong values: the backend or the machine is broken")
    is_direct = measured.all_gather.how == "DirectAllGather"
    if is_direct and measured.num_readable < request.num_ranks - 1:
        found.warnings.append(advice_on_near_memory(machine))
    return measured


def _as_dict(
    machine: Machine, num_ranks: int, measured: Measurement | None, found: Findings
) -> dict[str, Any]:
    collectives = None
    if measured is not None:
        collectives = asdict(measured)
        for name in ("all_gather", "reduce_scatter"):
            rate = getattr(measured, name).bytes_per_second
            collectives[name]["bytes_per_second"] = rate
    return {
        "is_well": not found.problems,
        "machine": asdict(machine),
        "num_ranks": num_ranks,
        "measured": collectives,
        "problems": found.problems,
        "warnings": found.warnings,
    }


def _lines(
    machine: Machine, num_ranks: int, measured: Measurement | None, found: Findings
) -> list[Line]:
    versions = machine.versions
    backends = [name for name, there in machine.backends.items() if there]
    variables = [f"{name}={value}" for name, value in machine.variables.items() if value]
    devices = ", ".join(machine.devices) or "the CPU alone"
    cores, threads = _counted(machine.num_cores, "core"), _counted(machine.num_threads, "thread")
    lines = [
        Line("torch", f"{versions['torch']}, built for {machine.build}"),
        Line("python", f"{versions['python']} on {machine.system}"),
        Line("devices", f"{devices}; {cores}, {threads}"),
        Line("backends", ", ".join(backends) or "none"),
        Line("variables", ", ".join(variables) or "none of those that matter is set"),
    ]
    if measured is not None:
        lines += _lines_of_ranks(num_ranks, machine, measured)
    elif num_ranks == 1:
        lines.append(Line("ranks", f"1 on {machine.device_type}, which communicates with nobody"))
    lines += [Line("warning", text, "yellow") for text in found.warnings]
    lines += [Line("problem", text, "red") for text in found.problems]
    if not found.problems:
        lines.append(Line("verdict", "nothing is wrong", "green"))
    return lines


def _lines_of_ranks(num_ranks: int, machine: Machine, measured: Measurement) -> list[Line]:
    what = f"{num_ranks} on {machine.device_type} over {measured.backend}"
    lines = [Line("ranks", f"{what}, {_counted(measured.num_threads, 'thread')} each")]
    reads_all = measured.num_readable == num_ranks - 1
    way = "read from memory" if reads_all else "sent from rank to rank over gloo"
    if measured.all_gather.how == "DirectAllGather":
        number = f"{measured.num_readable} of {_counted(num_ranks - 1, 'other')}"
        lines.append(Line("memory", f"a rank reads that of {number} directly"))
    for name in ("all_gather", "reduce_scatter"):
        one: Collective = getattr(measured, name)
        how = _HOW[one.how].format(backend=measured.backend, way=way)
        lines.append(
            Line(
                name.replace("_", "-"),
                f"{one.bytes_per_second / 1e9:.2f} GB/s to each rank "
                f"({one.nbytes_received / _MIB:.0f} MiB in {one.seconds * 1e3:.1f} ms), {how}",
            )
        )
    return lines


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"Expected a positive number, got '{text}'")
    return int(text)
