"""A test for authors of tensor subclasses: does a class follow the extension protocol?

.. code-block:: python

    from composable_shard.testing.extension_kit import check_extension

    def test_my_tensor():
        check_extension(lambda shape: MyTensor(torch.randn(shape)))

The hooks are checked alone, then the tensor in a sharded model. Each check runs on every rank. The
ranks are threads of this process. The code of ``fully_shard`` itself calls the hooks.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import and_, ne
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, _torch, fully_shard
from composable_shard.arguments import check_value
from composable_shard.core import codec
from composable_shard.core.extension import ExtensionBucket, GradExtension
from composable_shard.core.group import group_of
from composable_shard.errors import ExtensionError
from composable_shard.testing.oracle import apart, written_and_read
from composable_shard.testing.ranks import RankError, run_threads

# Findings -----------------------------------------------------------------------------------------


class Broken(AssertionError):
    """A promise is broken; the text names the promise and the fact found instead."""


def expect(holds: bool, promise: str, got: object, remedy: str = "") -> None:
    """Raise unless a promise holds."""
    if not holds:
        raise Broken(f"Expected {promise}, got {got}" + (f"; {remedy}" if remedy else ""))


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        check: Its name, which ``skip`` takes.
        ok: Whether the tensor keeps this promise; also true if the check was skipped.
        sentence: The promise if it is kept, else the fault, with the ranks and the shape.
    """

    check: str
    ok: bool
    sentence: str


@dataclass(frozen=True)
class Report:
    """The results of all checks of one tensor subclass.

    Attributes:
        kind: Name of the class.
        findings: One for each check, in the order of the checks.
    """

    kind: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every promise is kept."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings of the checks that fail."""
        return tuple(finding for finding in self.findings if not finding.ok)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        num, bad = len(self.findings), len(self.failures)
        result = f"{bad} of {num} checks fail" if bad else f"all {num} checks pass"
        lines = (f"  {'ok   ' if f.ok else 'FAILS'} {f.check}: {f.sentence}" for f in self)
        return "\n".join([f"{self.kind}: {result}", *lines])


# The tensor subclass under test, and a model with one weight of it --------------------------------

Shape = tuple[int, ...]
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ROWS = 4
"""Rows of a batch on one rank."""

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Case:
    """A tensor of one shape, on a number of ranks.

    Attributes:
        make: Makes a tensor of a shape; called after seeding, so that all ranks make the same.
        compute: Computes the output of a model from an input and the tensor.
        trains: Whether it can be trained.
        tolerance: The allowed error of results, relative to the largest value.
        shape: The shape of the tensor.
        num_ranks: The number of ranks.
        shown: The objects that the ranks show each other, by rank.
    """

    make: Callable[[Shape], torch.Tensor]
    compute: Compute
    trains: bool
    tolerance: float
    shape: Shape
    num_ranks: int
    shown: list[Any]

    def __str__(self) -> str:
        return f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}, shape {list(self.shape)}"

    def show(self, value: Any) -> list[Any]:
        """Show an object to the other ranks; return the objects of all ranks."""
        self.shown[dist.get_rank()] = value
        dist.barrier()
        seen = list(self.shown)
        dist.barrier()
        return seen

    def tensor(self, seed: int = 0, device: str = "cpu") -> torch.Tensor:
        """Make the tensor that all ranks make for this seed."""
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            return self.make(self.shape)

    def model(self, seed: int = 0, device: str = "cpu") -> nn.Sequential:
        """Make a model with one tensor, named ``0.weight``."""
        return nn.Sequential(OneWeight(self.tensor(seed, device), self.compute, self.trains))

    def sharded(self, seed: int = 0, device: str = "cpu", **settings: object) -> nn.Sequential:
        """Make the model and shard it over all ranks."""
        model, mesh = self.model(seed, device), init_device_mesh("cpu", (self.num_ranks,))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh, **settings)  # type: ignore[arg-type]
        return model

    def batch(self, step: int = 0) -> torch.Tensor:
        """Return the batch of all ranks together, in float32 for a tensor of integers."""
        generator, dtype = torch.Generator().manual_seed(step), self.tensor().dtype
        rows = torch.randn(ROWS * self.num_ranks, self.shape[-1], generator=generator)
        return rows.to(dtype if dtype.is_floating_point else torch.float32)

    def outputs_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute with an unsharded tensor, in its dtype."""
        batch = self.batch()
        with torch.no_grad():
            dtype = tensor.dtype if tensor.dtype.is_floating_point else batch.dtype
            return values(self.compute(batch.to(dtype), tensor))

    def expect_alike(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Compare values up to the tolerance."""
        error, largest = apart(found, expected)
        off, allowed = error / largest if largest else math.inf, self.tolerance
        got = f"values that are off by {off:.1e} of the largest, where {allowed:g} is allowed"
        expect(error <= allowed * largest, what, got)

    def expect_outputs(self, model: nn.Sequential, when: str) -> None:
        """Compare outputs with those of an unsharded model; the second gather reuses memory."""
        expected = values(self.model()(self.batch()), own_rows())
        for _ in range(2):
            self.expect_alike(self.outputs(model), expected, f"the same outputs {when}")

    def outputs(self, model: nn.Sequential) -> torch.Tensor:
        """Return the outputs of a sharded model for this rank's rows of the batch."""
        with torch.no_grad():
            return values(model(self.batch()[own_rows()]))


class OneWeight(nn.Module):
    """Computes with one weight."""

    def __init__(self, weight: torch.Tensor, compute: Compute, trains: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trains)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute with the function of the tensor's author."""
        return self.compute(x, self.weight)


def weight_of(model: nn.Sequential) -> torch.Tensor:
    """Return the weight, or this rank's shard of it while it is sharded."""
    return _torch.local_part(model.get_parameter("0.weight"))


def own_rows() -> slice:
    """Return the rows of this rank in the batch of all ranks."""
    return slice(ROWS * dist.get_rank(), ROWS * (dist.get_rank() + 1))


def values(output: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
    """Flatten the elements of an output; for a subclass, those of all its inner tensors."""
    return torch.cat([leaf[rows].flatten() for leaf in _torch.leaves(output.detach())])


# The hooks for all-gathers, called directly -------------------------------------------------------

LOW = torch.bfloat16


def bucket_of(model: nn.Sequential) -> ExtensionBucket:
    """Return the bucket of the weight, which calls its hooks."""
    group = group_of(model[0])
    assert group is not None
    (bucket,) = group.buckets
    assert isinstance(bucket, ExtensionBucket)
    return bucket


def gather(model: nn.Sequential) -> torch.Tensor:
    """Gather the weight, as a forward would; return the unsharded tensor."""
    model[0].unshard()  # type: ignore[operator]
    return weight_of(model)


def dtypes_of(local: torch.Tensor) -> list[torch.dtype | None]:
    """Return the values of ``param_dtype`` to try for a shard."""
    return [None, LOW] if local.dtype.is_floating_point else [None]


def hooks(case: Case) -> str | None:
    """Both hooks exist."""
    local = case.tensor()
    found = [name for name in (codec.PRE, codec.POST) if hasattr(local, name)]
    fits = len(found) != 1 and (bool(found) or codec.needs_extension(local))
    expect(fits, f"{codec.PRE} and {codec.POST}", f"{found[0]} alone" if found else "neither")
    return None if found else "no hooks: its inner tensors are sent one by one"


def sent(case: Case) -> None:
    """All ranks send equally many tensors, with the same dtypes, trailing dims and metadata."""
    bucket = bucket_of(case.sharded())
    shard = bucket.param.local
    formats = dict(enumerate(case.show(codec.formats_of(bucket.encode(shard)))))
    codec.check_same_formats(codec.PRE, "the tensor", formats)
    _, metadata = bucket.call_pre(shard)
    what = "equal metadata on all ranks, since each rank gets its own back"
    expect_same(case.show(metadata), what, str, "send the parts that differ")


def expect_same(
    shown: Sequence[Any], what: str, words: Callable[[Any], str], remedy: str = ""
) -> None:
    """Expect the same object from all ranks."""
    first = shown[0]
    for rank, other in enumerate(shown):
        got = f"{words(first)} on rank 0 and {words(other)} on rank {rank}"
        expect(alike(other, first), what, got, remedy)


def alike(left: Any, right: Any) -> bool:
    """Compare metadata: tensors in containers bit by bit, all else by comparison."""
    tensors, others = _torch.tensors_of(left), _torch.tensors_of(right)
    if len(tensors) != len(others) or not all(map(same_bytes, tensors, others)):
        return False
    left, right = (_torch.map_tensors(lambda _: None, metadata) for metadata in (left, right))
    return bool(left == right)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit, which works for every dtype."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


def shard(case: Case) -> None:
    """The hooks leave the shard as it is."""
    model = case.sharded()
    local, bucket = weight_of(model), bucket_of(model)
    before = [leaf.detach().clone() for leaf in _torch.leaves(local)]
    calls: list[Callable[[], Any]] = [partial(bucket.call_pre, local), partial(gather, model)]
    for hook, call in zip((codec.PRE, codec.POST), calls, strict=True):
        with suppress(ExtensionError):  # of a wrong result, which `gathered` reports
            call()
        for index, (now, then) in enumerate(zip(_torch.leaves(local), before, strict=True)):
            what = f"{hook} to leave the shard as it is"
            got = f"inner tensor {index} of it changed in place"
            expect(same_bytes(now, then), what, got, "work on a copy")


def gathered(case: Case) -> None:
    """The gathered tensor has the full shape, the requested dtype and the unsharded values."""
    whole = case.tensor()
    for dtype in dtypes_of(whole):
        tensor = gather(case.sharded(mp_policy=MixedPrecisionPolicy(dtype)))
        expected = dtype or whole.dtype
        what = f"{codec.POST} to return a tensor of param_dtype, {expected}"
        expect(tensor.dtype == expected, what, tensor.dtype)
        if tensor.dtype == whole.dtype:
            what = "the gathered tensor to give the outputs of the unsharded one"
            case.expect_alike(case.outputs_of(tensor), case.outputs_of(whole), what)


def out(case: Case) -> None:
    """The second gather fills the tensor that the first one made, in the same storages."""
    for dtype in dtypes_of(case.tensor()):
        policy = MixedPrecisionPolicy(dtype)
        model, other = (case.sharded(seed, mp_policy=policy) for seed in (0, 1))
        tensor = gather(model)
        old = case.outputs_of(tensor)
        before = list(map(_torch.storage_number, _torch.leaves(tensor)))
        model[0].reshard()  # type: ignore[operator]
        freed = [not leaf.untyped_storage().size() for leaf in _torch.leaves(tensor)]
        model.load_state_dict(other.state_dict())
        gather(model)
        found, expected = case.outputs_of(tensor), case.outputs_of(gather(other))
        what = f"{codec.POST} to write the received values into out"
        got = "the values of the previous gather" if torch.equal(found, old) else "other values"
        remedy = "write every part of out that is not an all-gather output"
        expect(torch.equal(found, expected), what, got, remedy)
        after = map(_torch.storage_number, _torch.leaves(tensor))
        kept = not any(map(and_, freed, map(ne, before, after)))
        what = f"{codec.POST} to keep the storages of out, which are freed and refilled"
        expect(kept, what, "another one", "copy into out instead of replacing its inner tensors")


HOOK_CHECKS = (sent, shard, gathered, out)

# The hooks for gradients, called directly ---------------------------------------------------------

NUM_STEPS = 8
"""Reductions of the same gradient; their errors must cancel out."""

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of reduction."""


class Reductions:
    """The reductions of one weight's gradient, one after the other, through its hooks.

    Attributes:
        parts: The gradient of this rank, which differs by rank, [num_shards, shard_numel].
    """

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        self._rank, self._model = dist.get_rank(), case.sharded()
        param = bucket_of(self._model).param
        self._hooks, self._numel = GradExtension(param), param.layout.flat.shard_numel
        generator = torch.Generator().manual_seed(self._rank)
        self.parts = torch.randn(case.num_ranks, self._numel, generator=generator).to(dtype)

    def encode(self) -> list[torch.Tensor]:
        """Return the tensors that this rank sends."""
        return self._hooks.encode(self.parts)

    def decode(self, sent: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return the sum that this rank decodes from the tensors of all ranks."""
        received = tuple(self.own_rows(of_all) for of_all in zip(*sent, strict=True))
        out = torch.full((self._numel,), torch.nan)
        self._hooks.decode(received, out)
        what, got = f"{codec.GRAD_POST} to fill out, {self._numel} elements", "unwritten elements"
        expect(not out.isnan().any(), what, got, "write into it")
        return out

    def own_rows(self, of_all: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this rank's row of the tensor of every rank."""
        return torch.stack([rows[self._rank] for rows in of_all])


def gradient_sent(case: Case) -> None:
    """An encoded gradient has a row for each rank, with one format on all ranks in all steps."""
    what = f"{codec.GRAD_PRE} to return the same dtypes and shapes on all ranks and each time"
    for reductions in map(partial(Reductions, case), DTYPES):
        for _ in range(2):
            expect_same(case.show(codec.formats_of(reductions.encode())), what, codec.to_text)


def gradient_summed(case: Case) -> None:
    """The decoded sum of the same gradients, averaged over several steps, is their sum."""
    what = f"the mean of {NUM_STEPS} reductions to be the sum over ranks"
    for reductions in map(partial(Reductions, case), DTYPES):
        exact = reductions.own_rows(case.show(reductions.parts)).sum(0, dtype=torch.float32)
        sums = [reductions.decode(case.show(reductions.encode())) for _ in range(NUM_STEPS)]
        case.expect_alike(torch.stack(sums).mean(0), exact, what)


def no_gradient(case: Case) -> None:
    """Zero bytes, which a rank without a gradient sends, decode to zeros."""
    sent = case.show([torch.zeros_like(each) for each in Reductions(case).encode()])
    try:
        total = Reductions(case).decode(sent)
    except Exception as error:
        raise Broken(
            f"Expected {codec.GRAD_POST} to work with metadata None on a rank that never had a "
            f"gradient, got {type(error).__name__}: {error}"
        ) from error
    largest = max(map(abs, total.tolist()), default=0)
    what, got = f"{codec.GRAD_POST} to make zeros of zero bytes", f"values up to {largest:.3g}"
    expect(not largest, what, got, "a rank without a gradient sends zero bytes")


GRADIENT_CHECKS = (gradient_sent, gradient_summed, no_gradient)

# The tensor in a sharded model --------------------------------------------------------------------

TOLERANCE_OF_LOW = 0.05
STEPS = 3


def training(case: Case) -> None:
    """Training sharded equals training unsharded on the same batches."""
    for reshards in (True, False):
        _train(case, case.sharded(reshard_after_forward=reshards))


def fewer_ranks(case: Case) -> None:
    """Training that gathers again from fewer ranks (an int reshard_after_forward) is equal."""
    if case.num_ranks > 2 and case.num_ranks % 2 == 0:
        _train(case, case.sharded(reshard_after_forward=case.num_ranks // 2))


def offload(case: Case) -> None:
    """Training with parameters offloaded to the CPU is equal."""
    _train(case, case.sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)))


def _train(case: Case, model: nn.Sequential) -> None:
    """Compare outputs with those of an unsharded model that gets the batches of all ranks."""
    reference = case.model()
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) if case.trains else None
        for one in (model, reference)
    ]
    for step in range(STEPS):
        batch = case.batch(step)
        outputs = [model(batch[own_rows()]), reference(batch)]
        what = f"outputs as of the unsharded model in step {step}"
        case.expect_alike(values(outputs[0]), values(outputs[1], own_rows()), what)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            if optimizer is not None:
                output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def mixed_precision(case: Case) -> None:
    """With param_dtype bfloat16, the model computes in bfloat16."""
    model = case.sharded(mp_policy=MixedPrecisionPolicy(param_dtype=LOW))
    for _ in range(2):
        found = case.outputs(model)
    expect(found.dtype == LOW, f"outputs of {LOW}", found.dtype)
    loose = replace(case, tolerance=max(case.tolerance, TOLERANCE_OF_LOW))
    expected = values(case.model()(case.batch()), own_rows())
    loose.expect_alike(found, expected, "outputs as in full precision")


def meta_device(case: Case) -> None:
    """The tensor can be created on the meta device, sharded, allocated and then filled."""
    device = case.tensor(device="meta").device
    what = "a tensor on the meta device from make_tensor"
    expect(device.type == "meta", what, f"one on {device}")
    model = case.sharded(device="meta")
    model.to_empty(device="cpu")
    with torch.no_grad():
        weight_of(model).copy_(weight_of(case.sharded()))
    case.expect_outputs(model, "after initialisation from the meta device")


def tensor_parallel(case: Case) -> None:
    """Within a DTensor of two ranks (tensor parallelism) it is gathered, twice into one memory."""
    if case.num_ranks % 2:
        return
    ranks = case.num_ranks // 2, 2
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("data", "model"))
    model, whole = case.model(), case.tensor()
    alike = DTensor.from_local(whole, mesh["model"], [Replicate()], run_check=False)
    model[0].weight = nn.Parameter(alike, requires_grad=case.trains)
    module = fully_shard(model[0], mesh=mesh["data"])
    for _ in range(2):
        found, expected = case.outputs_of(gather(model)), case.outputs_of(whole)
        case.expect_alike(found, expected, "the same outputs within a DTensor")
        module.reshard()  # type: ignore[operator]


def sharded_state_dict(case: Case) -> None:
    """A sharded state dict survives saving and loading, into a model of other values."""
    _expect_loaded(case, case.sharded().state_dict(), "after loading a sharded state dict")


def full_state_dict(case: Case) -> None:
    """A full state dict can be taken, saved, and loaded into a sharded model of other values."""
    options, model = StateDictOptions(full_state_dict=True), case.sharded()
    full: dict[str, Any] = get_model_state_dict(model, options=options)
    for leaf in _torch.leaves(full["0.weight"]):
        _torch.waited(leaf)
    _expect_loaded(case, full, "after loading a full state dict")


def _expect_loaded(case: Case, states: dict[str, Any], when: str) -> None:
    model = case.sharded(seed=1)
    case.outputs(model)
    model.load_state_dict(written_and_read(states))
    case.expect_outputs(model, when)


def deepcopy(case: Case) -> None:
    """A deep copy of a sharded model is a model of its own."""
    model = case.sharded()
    case.outputs(model)
    copied = copy.deepcopy(model)
    model.load_state_dict(case.sharded(seed=1).state_dict())
    case.expect_outputs(copied, "from a deep copy")


MODEL_CHECKS = (
    *(training, fewer_ranks, offload, mixed_precision, tensor_parallel),
    *(meta_device, sharded_state_dict, full_state_dict, deepcopy),
)

# Running the checks -------------------------------------------------------------------------------

TIMEOUT = 60.0

Check = Callable[[Case], str | None]


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
    """Check that a tensor subclass keeps the promises of the extension protocol.

    The hooks are called as ``fully_shard`` would call them, on one to four ranks (threads of this
    process) with rows that divide evenly and rows that do not; then a model with one weight is
    sharded, trained, saved, loaded, copied and offloaded. If a hook is wrong, the checks that
    build on it are skipped. Hooks for gradients are checked if there are any.

    Args:
        make_tensor: Makes a tensor of a shape. The random generator is seeded before each call, and
            ranks rely on getting the same tensor.
        compute: Computes the output of a model from an input ``[rows, shape[-1]]`` and the tensor.
        shapes: Shapes to try; sharded over the first dim.
        world_sizes: Numbers of ranks to try.
        trains: Whether the tensor can be trained. If so, outputs are compared over three steps of
            SGD; otherwise, in a forward alone.
        tolerance: The allowed error against the unsharded tensor, relative to the largest value; a
            tensor that quantizes shard by shard needs more.
        skip: Names of checks to leave out, because the tensor does not promise what they check.
        strict: Whether to raise if anything fails.

    Returns:
        The results; ``str()`` formats them.

    Raises:
        AssertionError: With the report as its text, if anything fails and ``strict``.
        ValueError: If ``skip`` names no check.

    Example:
        >>> from torch.testing._internal.two_tensor import TwoTensor
        >>> def make(shape):
        ...     return TwoTensor(torch.randn(shape), torch.randn(shape))
        >>> report = check_extension(make, world_sizes=[2], skip=["full state dict"])
        >>> report.findings[0]
        Finding(check='hooks', ok=True, sentence='no hooks: its inner tensors are sent one by one')
        >>> report.ok
        True
    """
    checks: tuple[Check, ...] = (hooks, *HOOK_CHECKS, *GRADIENT_CHECKS, *MODEL_CHECKS)
    names = list(map(_name, checks))
    unknown = sorted(set(skip) - set(names))
    check_value("skip", unknown, not unknown, f"to name checks out of {names}")
    cases = [
        Case(make_tensor, compute, trains, tolerance, tuple(shape), n, [None] * n)
        for n in world_sizes
        for shape in shapes
    ]
    report = Report(type(cases[0].tensor()).__name__, tuple(_findings(cases, skip)))
    if strict and not report.ok:
        raise AssertionError(str(report))
    return report


def _findings(cases: Sequence[Case], skip: Collection[str]) -> Iterator[Finding]:
    """Run the checks; once a hook is wrong, skip the checks that build on it."""
    found, tensor = _run(hooks, cases[:1]), cases[0].tensor()
    yield found
    checks = HOOK_CHECKS if hasattr(tensor, codec.PRE) else ()
    for check in (*checks, *(GRADIENT_CHECKS if codec.has_grad_extension(tensor) else ())):
        if found.ok:
            found = _run(check, cases, skip)
            yield found
    for check in MODEL_CHECKS if found.ok else ():
        yield _run(check, cases, skip)


def _name(check: Check) -> str:
    return check.__name__.replace("_", " ")


def _run(check: Check, cases: Sequence[Case], skip: Collection[str] = ()) -> Finding:
    """Run one check in all cases; report the first failure."""
    name = _name(check)
    if name in skip:
        return Finding(name, True, "skipped")
    sentence = None
    for case in cases:
        try:
            (sentence, *_) = run_threads(check, case.num_ranks, case, timeout=TIMEOUT)
        except RankError as error:
            return Finding(name, False, f"{_in_words(error)} ({case})")
    return Finding(name, True, sentence or (check.__doc__ or "").strip())


def _in_words(error: RankError) -> str:
    if not error.failures:
        return "Expected the ranks to finish, got ranks that wait for each other"
    first = error.failures[0]
    if first.exception_type in (Broken, ExtensionError):
        return first.message
    kind = first.exception_type.__name__
    return f"Expected no error, got {kind} on rank {first.rank}: {first.message}"
