"""Bytes that a training step copies without computing with them, and the messages that it sends.

Run `python benchmarks/copies.py`. Two gloo ranks train each contestant for some steps. Then rank 0
watches each operation of `--rounds` further steps, and the benchmark prints the mean. It subtracts
the floor: the plain module with its parameters in the dtype of compute.

The columns count the bytes that operations of torch *write*:

- moved (forward, backward, optimizer): operations that copy, cast, concatenate, split or pad,
  including FSDP2's own operators and DDP's scaled copy into its bucket; no other arithmetic;
- arithmetic: divisions and additions in place or into a given tensor;
- in comms: both kinds, where torch operations are a part of a collective. In this library's gloo
  collectives, these are the sum of a reduce-scatter, the rank's own part of an all-gather, and
  copies into and out of shared memory; a message of gradients has the own part, too.
  In gloo's own reduce-scatter, which FSDP2 uses, it is the copy of the result. (FSDP2 gathers in
  place: its copy-in, which counts as moved, corresponds to the own part here.)

`moved/P` and `all/P` divide by P, the bytes of all parameters in fp32; "all" is the sum of the
three kinds. A call is one launch of a collective. A message is one send between two ranks, or one
read by a rank of another rank's memory on the same host. The benchmark does not count the work of a
collective inside the backend, allocations, writes inside of an operation, and reads. Under the bf16
policy, DDP and the plain module use autocast, so they cast weights at every use and cast gradients
back. FSDP2 and this library cast shards.

The last row is FSDP2 by arithmetic, computed from the sizes of the parameters alone: a gather
copies each shard in and each parameter out, after a cast of the shard if the policy asks for one; a
reduction copies each gradient in, cast to fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from contestants import LABELS, WRAPPERS, Contestant, Spec, build_contestant, build_floor
from limit import REDUCE_DTYPE, groups_of
from observe import Observer, nbytes, written
from report import MEGABYTE, load_average, print_load, print_table, write_json
from starting import end_ranks, on_ranks

PHASES = ("forward", "backward", "optimizer")
NUM_WARMUP_STEPS = 3  # by then orders are recorded and buffers made
MOVES = {
    *("aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat", "aten::cat.out", "aten::stack"),
    *("aten::split_with_sizes_copy", "aten::split_with_sizes_copy.out", "aten::_chunk_cat.out"),
    *("aten::_chunk_cat", "aten::_foreach_copy_", "aten::constant_pad_nd", "aten::zero_"),
    *("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat"),
    "fsdp::chunk_cat_mixed_dtype",  # since torch 2.15
    "aten::mul.out",  # DDP divides a gradient on its way into the bucket
}
ARITHMETIC = {
    *("aten::div_.Tensor", "aten::div_.Scalar", "aten::mul_.Tensor", "aten::mul_.Scalar"),
    *("aten::add_.Tensor", "aten::add.out", "aten::div.out", "aten::_foreach_add_.List"),
    *("aten::_foreach_div_.Scalar", "aten::_foreach_mul_.Scalar"),
}
COLLECTIVES_OF = (
    "composable_shard.core.transport.gloo.point_to_point",
    "torch.distributed.distributed_c10d",
)


@dataclass
class Counts:
    """What steps did: bytes by phase and kind, calls."""

    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    arithmetic: int = 0
    in_collectives: int = 0
    collectives: int = 0
    messages: int = 0
    sent: int = 0


class Copies(Observer):
    """Counts copied bytes and sent messages."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.counts = Counts()
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Copies:
        """Begin to watch operations, and copies of this library's collectives that use none."""
        from composable_shard.core.transport.gloo import exchange, point_to_point

        watched = {
            (point_to_point.DirectAllGather, "launch"): self._saw_launch,
            (point_to_point.DirectReduceScatter, "launch"): self._saw_launch,
            (exchange, "copy_bytes"): self._saw_copy,
            (point_to_point, "copy_bytes"): self._saw_copy,
            (exchange.Exchange, "_find"): self._saw_message,
        }
        for (owner, name), note in watched.items():
            self._patches.enter_context(noticed(owner, name, note))
        return cast(Copies, super().__enter__())

    def __exit__(self, *error: Any) -> None:
        """Stop watching."""
        super().__exit__(*error)
        self._patches.close()

    def _saw_launch(self, *_: Any) -> None:
        self.counts.collectives += 1

    def _saw_copy(self, into: int, source: int, nbytes: int) -> None:
        self.counts.in_collectives += nbytes

    def _saw_message(self, exchange: Any, rank: int, *_: Any) -> None:
        if rank == exchange._group.rank():
            return  # its own message
        for numel, dtype in zip(exchange.spec.numels, exchange.spec.dtypes, strict=True):
            self.counts.messages += 1
            self.counts.sent += numel * dtype.itemsize

    def saw(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        counts, name = self.counts, func.name()
        if name == "c10d::send":
            counts.messages += 1
            counts.sent += nbytes(args[0])
        elif name.startswith("c10d::"):
            counts.collectives += not name.startswith("c10d::recv")
        elif name in MOVES or name in ARITHMETIC:
            # This one returns views and declares no output.
            is_copy_in = name == "fsdp::all_gather_copy_in"
            num_bytes = nbytes(args[0]) if is_copy_in else written(func, args, kwargs, result)
            if is_within_collective():
                counts.in_collectives += num_bytes
            elif name in MOVES:
                counts.moved[self.phase] += num_bytes
            else:
                counts.arithmetic += num_bytes


@contextlib.contextmanager
def noticed(owner: Any, name: str, note: Callable[..., None]) -> Iterator[None]:
    """Call `note` with the arguments of a function whenever that is called."""
    before = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args)
        return before(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, before)


def is_within_collective() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in COLLECTIVES_OF:
            return True
    return False


def count(name: str, spec: Spec, num_steps: int) -> Counts:
    """Count the copies and messages of this rank in steps of a contestant, or of the floor."""
    contestant = build_floor(spec) if name == "floor" else build_contestant(name, spec)
    for step in range(NUM_WARMUP_STEPS):
        contestant.step(step)
    gc.collect()
    with Copies() as copies:
        for step in range(num_steps):
            watched_step(contestant, NUM_WARMUP_STEPS + step, copies)
    return copies.counts


def watched_step(contestant: Contestant, step: int, copies: Copies) -> None:
    copies.phase = "forward"
    loss = contestant.forward(step)
    copies.phase = "backward"
    loss.backward()
    copies.phase = "optimizer"
    contestant.update()


def fsdp2_by_arithmetic(spec: Spec, num_ranks: int) -> dict[str, int]:
    """Return the bytes that FSDP2 moves in each phase of one step, if all shards are even."""
    groups = groups_of(spec)
    wire = spec.compute_dtype
    num_casts = 1 if wire == torch.float32 else 2  # the cast, and the copy of its result
    gathers = {g: num_casts * g.nbytes(wire) // num_ranks + g.nbytes(wire) for g in set(groups)}
    again = sum(gathers[group] for group in groups if not group.is_root)
    return {
        "forward": sum(gathers[group] for group in groups),
        "backward": again + sum(group.nbytes(REDUCE_DTYPE) for group in groups),
        "optimizer": 0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    figures = {}
    load = load_average()
    try:
        for policy in options.dtype_policies:
            spec = Spec(options.layers, options.width, options.batch, options.context, policy)
            names = [*options.only, "floor"]
            figures[policy] = {
                name: on_ranks(count, options.ranks, name, spec, options.rounds)[0]
                for name in names
            }
            show(figures[policy], spec, options)
    finally:
        end_ranks()
    print_load(load)
    if options.json:
        counts = {
            policy: {name: asdict(counts) for name, counts in row.items()}
            for policy, row in figures.items()
        }
        facts = {"spec": asdict(spec), "ranks": options.ranks, "rounds": options.rounds}
        write_json(options.json, {**facts, "load": [load, load_average()], "counts": counts})
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2, help="steps that are watched")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--context", type=int, default=32, help="tokens per sequence")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--dtype-policies", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"]
    )
    parser.add_argument("--only", nargs="+", choices=list(WRAPPERS), default=list(WRAPPERS))
    parser.add_argument("--json", metavar="FILE", help="write all counts to this file")
    return parser.parse_args(arguments)


def show(figures: Mapping[str, Counts], spec: Spec, options: argparse.Namespace) -> None:
    whole = sum(group.nbytes(torch.float32) for group in groups_of(spec))
    columns = ["", *PHASES, "moved/P", "arithmetic", "in comms", "all/P", "calls", "messages"]
    rows = []
    for name in options.only:
        beyond = beyond_floor(figures[name], figures["floor"], options.rounds)
        everything = sum(beyond.values())
        rows.append([LABELS[name], *moved_cells(beyond, whole)])
        rows[-1] += [megabytes(beyond[kind]) for kind in ("arithmetic", "in_collectives")]
        calls = figures[name].collectives, figures[name].messages
        rows[-1] += [f"{everything / whole:.3f}", *(f"{n / options.rounds:g}" for n in calls)]
    arithmetic = fsdp2_by_arithmetic(spec, options.ranks)
    rows.append(["FSDP2 by arithmetic", *moved_cells(arithmetic, whole), *[""] * 5])
    title = f"MB a step beyond the floor, P = {whole / MEGABYTE:.1f} MB"
    print_table(f"{title}, {options.ranks} ranks, {spec.dtype_policy}", columns, rows)


def beyond_floor(counts: Counts, floor: Counts, num_steps: int) -> dict[str, float]:
    """Return the bytes of one step by phase and kind, minus those of the floor."""
    kinds = ("arithmetic", "in_collectives")
    beyond = {phase: counts.moved[phase] - floor.moved[phase] for phase in PHASES}
    beyond |= {kind: getattr(counts, kind) - getattr(floor, kind) for kind in kinds}
    return {kind: num_bytes / num_steps for kind, num_bytes in beyond.items()}


def moved_cells(moved: Mapping[str, float], whole: int) -> list[str]:
    phases = [moved[phase] for phase in PHASES]
    return [*map(megabytes, phases), f"{sum(phases) / whole:.3f}"]


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / MEGABYTE:.1f}"


if __name__ == "__main__":
    sys.exit(main())
