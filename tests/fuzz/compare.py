"""Runs a case on ranks and on the oracle, and tells what differs."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from composable_shard.testing import RankError, RankTimeout, run_on_ranks

from .oracle import Invalid, Oracle
from .program import Case, Find
from .ranks import Held, Seen, run_case

TOLERANCE = {"": 1e-9, "float32": 2e-5, "bfloat16": 6e-2}

LARGEST = 1e6
REGISTERED_AFTER = ("train", "alone", "evaluate", "step")


class Expected(NamedTuple):
    heard: Any
    params: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]
    is_synced: bool


def expected(case: Case) -> list[Expected]:
    """Follow a case with the oracle; what no training can do is ``Invalid``."""
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = Oracle(case)
        for num_op, op in enumerate(case.ops):
            try:
                oracle.do(num_op, op)
            except RuntimeError as error:
                raise Invalid(str(error)) from error  # an in-place change, a useless checkpoint
            params = {name: p.detach().clone() for name, p in oracle.params().items()}
            if any(not param.abs().max() < LARGEST for param in params.values()):
                raise Invalid("training that diverges")
            steps.append(Expected(oracle.heard, params, oracle.totals(), oracle.is_synced))
    return steps


def run(
    case: Case, timeout: float = 60.0, follow: Callable[[Case], list[Seen]] = run_case
) -> Find | None:
    """Run a case within some seconds; return what went wrong.

    ``follow`` is what each rank does; another only to see that faults are found.
    """
    wanted = expected(case)
    try:
        everywhere = run_on_ranks(follow, case.num_ranks, case, timeout=timeout)
    except RankTimeout as error:
        return Find("hang", str(error))
    except RankError as error:
        return Find(_error_kind(error), str(error))
    by_hand = False
    for num_op, (op, step) in enumerate(zip(case.ops, wanted, strict=True)):
        seen = [ranks_seen[num_op + 1] for ranks_seen in everywhere]
        found = _differences(case, seen, *step)
        if case.checks_registered and not found and op.name in REGISTERED_AFTER:
            by_hand |= "unshard" in (one.name for one in case.ops[:num_op])
            names = {n for one in seen for n, is_so in one.registered.items() if not is_so}
            if names and not by_hand:
                found = [f"registered: the unsharded {sorted(names)}"]
        if found:
            kind = found[0].split(":")[0]
            return Find(kind, f"after step {num_op} ({op.name}):\n" + "\n".join(found))
    return None


def _error_kind(error: RankError) -> str:
    first = error.failures[0]
    text = str(first.message).strip().split("\n")[0][:60]
    some = "" if len(error.failures) == error.num_ranks else " on some ranks"
    return f"{first.exception_type.__name__ if first.exception_type else ''} {text}{some}"


def _differences(
    case: Case,
    seen: list[Seen],
    heard: list[list[float]] | None,
    params: dict[str, torch.Tensor],
    grads: dict[str, torch.Tensor],
    is_synced: bool,
) -> list[str]:
    found = []
    tolerance = TOLERANCE[case.precision]
    if any(block.low for block in case.walk()):
        tolerance = max(tolerance, 2e-5)
    if heard is not None:
        for rank, (own, theirs) in enumerate(zip(heard, (s.heard for s in seen), strict=True)):
            got, wanted = (torch.tensor(x, dtype=torch.float64) for x in (theirs, own))
            if not _close(got, wanted, tolerance * 10, 0.1):
                found.append(f"output: rank {rank} has {theirs}, expected {own}")
    for name, whole in params.items():
        parts = [s.params[name] for s in seen]
        got = assembled(parts, whole, case.mesh)
        if got is None:
            found.append(f"param places: {name} has {[p.places for p in parts]}")
        elif not _close(got, whole, tolerance, 1.0):
            found.append(f"param: {name} is off by {_off(got, whole)}")
    largest = max((g.abs().max().item() for g in grads.values() if g.numel()), default=0.0)
    for name in params:
        held = [s.grads[name] for s in seen]
        total = grads.get(name)
        if total is None:
            if any(h is not None for h in held):
                found.append(f"grad kind: {name} has {_places(held)}, expected None")
            continue
        if all(h is None for h in held):
            found.append(f"grad kind: {name} has None, expected a gradient of {_size(total)}")
            continue
        if is_synced and any(
            h is None or h.places != s.params[name].places for h, s in zip(held, seen, strict=True)
        ):
            found.append(f"grad kind: {name} has {_places(held)}, expected reduced ones")
            continue
        got = assembled(held, total, case.mesh)
        if got is None:
            found.append(f"grad places: {name} has {_places(held)}")
        elif not _close(got, total, tolerance, largest):
            found.append(f"grad: {name} is off by {_off(got, total)}")
    return found


def assembled(
    parts: list[Held | None], whole: torch.Tensor, mesh: tuple[int, ...]
) -> torch.Tensor | None:
    """Put together what ranks hold; replicas count once, and a missing part as zeros."""
    total = torch.zeros_like(whole)
    for part, place in zip(parts, itertools.product(*map(range, mesh)), strict=True):
        if part is None:
            continue
        local = part.local
        index = [slice(None)] * whole.ndim
        if len(part.places) != len(mesh):
            return None
        for axis, rank, extent in [*zip(part.places, place, mesh, strict=True)][::-1]:
            if axis in ("R", "P"):
                local = local / extent
            elif axis[0] in "ST":
                dim = int(axis[1:])
                start, end, _ = index[dim].indices(whole.shape[dim])
                rows = -(-(end - start) // extent)
                first, last = (min(start + n * rows, end) for n in (rank, rank + 1))
                index[dim] = slice(first, last)
            elif axis != "Psum":
                return None
        if total[tuple(index)].shape != local.shape:
            return None
        total[tuple(index)] += local
    return total


def _close(got: torch.Tensor, wanted: torch.Tensor, relative: float, largest: float) -> bool:
    if got.shape != wanted.shape or not got.isfinite().all():
        return False
    if not wanted.numel():
        return True
    scale = max(wanted.abs().max().item(), largest)
    if wanted.dtype == torch.float32:
        relative = max(relative, 1e-5)
    return (got.double() - wanted.double()).abs().max().item() <= relative * scale + 1e-13


def _off(got: torch.Tensor, wanted: torch.Tensor) -> str:
    return f"{(got - wanted).abs().max().item():.3g} of {_size(wanted)}"


def _size(tensor: torch.Tensor) -> str:
    return f"{tensor.abs().max().item() if tensor.numel() else 0.0:.3g}"


def _places(held: list[Held | None]) -> list[str]:
    return ["None" if h is None else "".join(h.places) or "plain" for h in held]
