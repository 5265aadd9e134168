"""The checks of a tensor subclass: run on ranks that are threads, in a model that is sharded."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_shard._torch import leaves, local_tensor, waited
from composable_shard.testing.extension_kit.hooks import (
    GRADIENT_CHECKS,
    HOOK_CHECKS,
    Broken,
    Compute,
    Finding,
    Report,
    Shape,
    Subject,
    has_gradient_hooks,
    has_hooks,
    hooks,
    mine,
    plain,
    shard_of,
)
from composable_shard.testing.ranks import RankError, RankTimeout, run_threads

# The tensor in a model that ``fully_shard`` shards: trained, saved, copied, offloaded -------------

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
TOLERANCE_OF_LOW = 0.05
STEPS = 3


def training(subject: Subject, shape: Shape) -> None:
    """Training sharded gives what training unsharded on the same batches gives."""
    for reshards in (True, False):
        _train(subject, shape, subject.sharded(shape, reshard_after_forward=reshards))


def fewer_ranks(subject: Subject, shape: Shape) -> None:
    """Gathering again from fewer ranks (an int for reshard_after_forward) trains alike."""
    if dist.get_world_size() % 2 == 0:
        fewer = dist.get_world_size() // 2
        if fewer > 1:
            _train(subject, shape, subject.sharded(shape, reshard_after_forward=fewer))


def offload(subject: Subject, shape: Shape) -> None:
    """Training with parameters offloaded to the CPU gives the same."""
    policy = CPUOffloadPolicy(pin_memory=False)
    _train(subject, shape, subject.sharded(shape, offload_policy=policy))


def _train(subject: Subject, shape: Shape, model: nn.Sequential) -> None:
    """Compare outputs with those of an unsharded model, which sees the batches of all ranks."""
    reference = subject.model(shape)
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) if subject.trains else None
        for one in (model, reference)
    ]
    for step in range(STEPS):
        batch = subject.batch(shape, reference.get_parameter("0.weight").dtype, step)
        (own,) = mine(batch)
        outputs = [model(own), reference(batch)]
        what = f"outputs as of the unsharded model in step {step}"
        subject.expect_alike(plain(outputs[0]), mine(outputs[1]), what)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            if optimizer is not None:
                output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def mixed_precision(subject: Subject, shape: Shape) -> None:
    """A policy with param_dtype bfloat16 computes in it."""
    model = subject.sharded(shape, mp_policy=LOW)
    batch = subject.batch(shape, torch.float32)
    with torch.no_grad():
        for _ in range(2):
            found, expected = model(*mine(batch)), subject.model(shape)(batch.to(_dtype(subject)))
    if found.dtype != torch.bfloat16:
        raise Broken(f"Expected outputs of torch.bfloat16, got {found.dtype}")
    loose = Subject(
        subject.make, subject.compute, subject.trains, max(subject.tolerance, TOLERANCE_OF_LOW)
    )
    loose.expect_alike(plain(found), mine(expected), "outputs as in full precision")


def _dtype(subject: Subject) -> torch.dtype:
    dtype = subject.tensor((4, 4)).dtype
    return dtype if dtype.is_floating_point else torch.float32


def meta_device(subject: Subject, shape: Shape) -> None:
    """It can be made on the meta device, sharded, allocated and then filled."""
    tensor = subject.tensor(shape, device="meta")
    if not tensor.is_meta:
        raise Broken(
            f"Expected a tensor on the meta device from make_tensor, got one on {tensor.device}"
        )
    model = subject.sharded(shape, device="meta")
    model.to_empty(device="cpu")
    with torch.no_grad():
        shard_of(model).copy_(shard_of(subject.sharded(shape)))
    _expect_forward(subject, shape, model, "after initialisation from the meta device")


def tensor_parallel(subject: Subject, shape: Shape) -> None:
    """Within a DTensor of two ranks (tensor parallelism) it is gathered, and filled again."""
    if dist.get_world_size() % 2:
        return
    ranks = dist.get_world_size() // 2, 2
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("data", "model"))
    layer, batch = subject.model(shape)[0], subject.batch(shape, _dtype(subject))
    weight = layer.get_parameter("weight").detach()
    alike = DTensor.from_local(weight, mesh["model"], [Replicate()], run_check=False)
    layer.weight = nn.Parameter(alike, requires_grad=subject.trains)
    module = fully_shard(layer, mesh=mesh["data"])
    with torch.no_grad():
        expected = plain(subject.compute(batch, subject.tensor(shape)))
        for _ in range(2):
            module.unshard()  # type: ignore[operator]
            found = plain(subject.compute(batch, local_tensor(layer.get_parameter("weight"))))
            subject.expect_alike(found, expected, "the same outputs within a DTensor")
            module.reshard()  # type: ignore[operator]


def sharded_state_dict(subject: Subject, shape: Shape) -> None:
    """A sharded state dict survives saving and loading, into a model of other values."""
    file = io.BytesIO()
    torch.save(subject.sharded(shape).state_dict(), file)
    file.seek(0)
    model = subject.sharded(shape, seed=1)
    _forward(subject, shape, model)
    model.load_state_dict(torch.load(file, weights_only=False))
    _expect_forward(subject, shape, model, "after loading a sharded state dict")


def full_state_dict(subject: Subject, shape: Shape) -> None:
    """A full state dict can be taken, saved, and loaded into a sharded model of other values."""
    options = StateDictOptions(full_state_dict=True)
    full: dict[str, Any] = get_model_state_dict(subject.sharded(shape), options=options)
    for leaf in leaves(full["0.weight"]):
        waited(leaf)
    file = io.BytesIO()
    torch.save(full, file)
    file.seek(0)
    model = subject.sharded(shape, seed=1)
    _forward(subject, shape, model)
    model.load_state_dict(torch.load(file, weights_only=False))
    _expect_forward(subject, shape, model, "after loading a full state dict")


def deepcopy(subject: Subject, shape: Shape) -> None:
    """A deep copy of a sharded model is a model of its own."""
    model = subject.sharded(shape)
    _forward(subject, shape, model)
    copied = copy.deepcopy(model)
    model.load_state_dict(subject.sharded(shape, seed=1).state_dict())
    _expect_forward(subject, shape, copied, "from a deep copy")


def _forward(subject: Subject, shape: Shape, model: nn.Sequential) -> list[torch.Tensor]:
    with torch.no_grad():
        return plain(model(*mine(subject.batch(shape, _dtype(subject)))))


def _expect_forward(subject: Subject, shape: Shape, model: nn.Sequential, when: str) -> None:
    with torch.no_grad():
        expected = mine(subject.model(shape)(subject.batch(shape, _dtype(subject))))
    for _ in range(2):
        found = _forward(subject, shape, model)
        subject.expect_alike(found, expected, f"the same outputs {when}")


MODEL_CHECKS = (
    training,
    fewer_ranks,
    offload,
    mixed_precision,
    tensor_parallel,
    meta_device,
    sharded_state_dict,
    full_state_dict,
    deepcopy,
)

# Running the checks, on ranks that are threads ----------------------------------------------------

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
