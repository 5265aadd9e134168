"""Running the checks, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from composable_shard.testing.extension_kit.gradients import GRADIENT_CHECKS, has_gradient_hooks
from composable_shard.testing.extension_kit.protocol import HOOK_CHECKS, has_hooks, hooks
from composable_shard.testing.extension_kit.report import Broken, Finding, Report
from composable_shard.testing.extension_kit.sharded import MODEL_CHECKS
from composable_shard.testing.extension_kit.subject import Compute, Shape, Subject
from composable_shard.testing.ranks import RankError, RankTimeout
from composable_shard.testing.threads import run_threads

TIMEOUT = 60.0

Check = Callable[..., None]


def check_extension(
    make_tensor: Callable[[Shape], torch.Tensor],
    *,
    compute: Compute = torch.nn.functional.linear,
    shapes: Sequence[Shape] = ((8, 4), (5, 4)),
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    trains: bool = True,
    tolerance: float = 1e-5,
    skip: Collection[str] = (),
    strict: bool = True,
) -> Report:
    """Check that a tensor subclass keeps what the extension protocol promises.

    The hooks are called as ``fully_shard`` would call them, on one to four ranks (threads of this
    process) with rows that divide evenly and rows that do not; then a model with one weight is
    sharded, trained, saved, loaded, copied and offloaded. A hook that is wrong is reported alone.
    Hooks for gradients are checked where there are some.

    Args:
        make_tensor: Makes a tensor of a shape. The random generator is seeded before each call, and
            ranks rely on getting the same tensor.
        compute: What a model does with an input ``[rows, shape[-1]]`` and the tensor.
        shapes: Shapes to try; sharded over the first dim.
        world_sizes: Numbers of ranks to try.
        trains: Whether the tensor can be trained; outputs are then compared over three steps of
            SGD, else without.
        tolerance: How far results may be off from those of the unsharded tensor, in parts of the
            largest value; a tensor that quantizes shard by shard needs more.
        skip: Names of checks that the tensor does not promise.
        strict: Whether to raise if anything fails.

    Returns:
        What was found; ``str()`` of it says it in words.

    Raises:
        AssertionError: With the report as its text, if anything fails and ``strict``.
        ValueError: If ``skip`` names no check.

    Example:
        >>> from torch.testing._internal.two_tensor import TwoTensor
        >>> def make(shape):
        ...     return TwoTensor(torch.randn(shape), torch.randn(shape))
        >>> report = check_extension(make, world_sizes=[2], skip=["full state dict"])
        >>> report.findings[0]
        Finding(check='hooks', ok=True, sentence='none: it travels inner tensor by inner tensor')
        >>> report.ok
        True
    """
    checks: tuple[Check, ...] = (hooks, *HOOK_CHECKS, *GRADIENT_CHECKS, *MODEL_CHECKS)
    names = [_name(check) for check in checks]
    unknown = sorted(set(skip) - set(names))
    if unknown:
        raise ValueError(f"Expected skip to name checks out of {names}, got {unknown}")
    subject = Subject(make_tensor, compute, trains, tolerance)
    cases = [(num_ranks, tuple(shape)) for num_ranks in world_sizes for shape in shapes]
    kind = type(subject.tensor(cases[0][1])).__name__
    report = Report(kind, tuple(_findings(subject, cases, skip)))
    if strict and not report.ok:
        raise AssertionError(str(report))
    return report


def _findings(
    subject: Subject, cases: Sequence[tuple[int, Shape]], skip: Collection[str]
) -> Iterator[Finding]:
    """Run the checks; after a hook that is wrong, those that build on it are left out."""
    found = _run(hooks, subject, cases[:1])
    if found.ok and not has_hooks(subject, cases[0][1]):
        yield Finding("hooks", True, "none: it travels inner tensor by inner tensor")
    else:
        yield found
        for check in HOOK_CHECKS:
            if not found.ok:
                return
            found = _run(check, subject, cases, skip)
            yield found
        if not found.ok:
            return
    if has_gradient_hooks(subject, cases[0][1]):
        for check in GRADIENT_CHECKS:
            found = _run(check, subject, cases, skip)
            yield found
            if not found.ok:
                return
    for model_check in MODEL_CHECKS:
        yield _run(model_check, subject, cases, skip)


def _name(check: Check) -> str:
    return check.__name__.replace("_", " ")


def _run(
    check: Check,
    subject: Subject,
    cases: Sequence[tuple[int, Shape]],
    skip: Collection[str] = (),
) -> Finding:
    """Run one check in all cases; the first that fails is told."""
    name, promise = _name(check), (check.__doc__ or "").strip()
    if name in skip:
        return Finding(name, True, "skipped")
    for num_ranks, shape in cases:
        shows = check in (hooks, *HOOK_CHECKS, *GRADIENT_CHECKS)
        more = (_board(num_ranks),) if shows else ()
        try:
            run_threads(check, num_ranks, subject, shape, *more, timeout=TIMEOUT)
        except (RankError, RankTimeout) as error:
            where = f"{num_ranks} rank{'s' * (num_ranks > 1)}, shape {list(shape)}"
            return Finding(name, False, f"{_in_words(error)} ({where})")
    return Finding(name, True, promise)


def _in_words(error: RankError | RankTimeout) -> str:
    if not error.failures:
        return "Expected an end, got ranks that wait for each other"
    first = min(error.failures, key=lambda failure: failure.rank)
    if first.exception_type is Broken:
        return first.message
    kind = getattr(first.exception_type, "__name__", str(first.exception_type))
    return f"Expected no error, got {kind} on rank {first.rank}: {first.message}"


def _board(num_ranks: int) -> Callable[[Any], list[Any]]:
    """Return a function by which ranks that are threads show each other objects."""
    shown: list[Any] = [None] * num_ranks

    def show(value: Any) -> list[Any]:
        shown[dist.get_rank()] = value
        dist.barrier()
        seen = list(shown)
        dist.barrier()
        return seen

    return show
