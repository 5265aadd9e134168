"""The hooks of a tensor subclass by themselves: what they are promised, what they must return.

Each check runs on every rank. The ranks are threads, which show each other what they would send;
so a hook is called with what ``fully_shard`` would call it with, and nothing is communicated.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from composable_shard._torch import leaves, local_tensor
from composable_shard.core.codec import (
    GRAD_POST,
    GRAD_PRE,
    POST,
    PRE,
    Format,
    bound_hook,
    flatten,
    has_grad_extension,
    needs_extension,
)
from composable_shard.core.features.grad_extension import GradExtension, formats_of
from composable_shard.core.layout import ParamLayout
from composable_shard.errors import ExtensionError
from composable_shard.module import group_of
from composable_shard.testing.oracle import apart

# What the checks found, in words ------------------------------------------------------------------


class Broken(AssertionError):
    """A promise is broken; the text says which, and what was found instead."""


class Finding(NamedTuple):
    """What one check found.

    Attributes:
        check: Its name, which ``skip`` takes.
        ok: Whether the tensor keeps this promise; also true for what was skipped.
        sentence: The promise if it is kept, else what is wrong, with the ranks and the shape.
    """

    check: str
    ok: bool
    sentence: str


@dataclass(frozen=True)
class Report:
    """What all checks found about one tensor subclass.

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
        """What fails."""
        return tuple(finding for finding in self.findings if not finding.ok)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        count = f"{len(self.failures)} of {len(self.findings)} checks fail" if self.failures else ""
        lines = [f"{self.kind}: {count or f'all {len(self.findings)} checks pass'}"]
        lines += [f"  {'ok   ' if f.ok else 'FAILS'} {f.check}: {f.sentence}" for f in self]
        return "\n".join(lines)


# The tensor subclass under test, and a model with one weight of it --------------------------------

Shape = tuple[int, ...]
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ROWS = 4
"""Rows of a batch on one rank."""

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        make: Makes a tensor of a shape; called after seeding, so that all ranks make the same.
        compute: What a model does with an input and the tensor.
        trains: Whether it can be trained.
        tolerance: How far results may be off, in parts of the largest value.
    """

    make: Callable[[Shape], torch.Tensor]
    compute: Compute
    trains: bool
    tolerance: float

    def tensor(self, shape: Shape, seed: int = 0, device: str = "cpu") -> torch.Tensor:
        """Make the tensor that all ranks make for this seed."""
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            return self.make(shape)

    def model(self, shape: Shape, seed: int = 0, device: str = "cpu") -> nn.Sequential:
        """Make a model with one tensor, named ``0.weight``."""
        tensor = self.tensor(shape, seed, device)
        return nn.Sequential(OneWeight(tensor, self.compute, self.trains))

    def sharded(
        self, shape: Shape, seed: int = 0, device: str = "cpu", **settings: object
    ) -> nn.Sequential:
        """Make the model and shard it over all ranks."""
        model = self.model(shape, seed, device)
        for module in (model[0], model):
            fully_shard(module, mesh=whole_mesh(), **settings)  # type: ignore[arg-type]
        assert isinstance(model, FSDPModule)
        return model

    def batch(self, shape: Shape, dtype: torch.dtype, step: int = 0) -> torch.Tensor:
        """Return the batch of all ranks together."""
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(ROWS * dist.get_world_size(), shape[-1], generator=generator)
        return rows.to(dtype if dtype.is_floating_point else torch.float32)

    def expect_alike(
        self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str
    ) -> None:
        """Compare results, inner tensor by inner tensor."""
        for mine, theirs in zip(found, expected, strict=True):
            error, largest = apart(mine, theirs)
            if not error <= self.tolerance * largest:
                off = error / largest if largest else math.inf
                raise Broken(
                    f"Expected {what}, got values that are off by {off:.1e} of the "
                    f"largest, where {self.tolerance:g} is allowed"
                )


class OneWeight(nn.Module):
    """Computes with one weight."""

    def __init__(self, weight: torch.Tensor, compute: Compute, trains: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trains)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Do what the author of the tensor says."""
        return self.compute(x, self.weight)


def whole_mesh() -> DeviceMesh:
    """Return a mesh of all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard_of(model: nn.Sequential) -> torch.Tensor:
    """Return what this rank holds of the weight."""
    return local_tensor(model.get_parameter("0.weight"))


def mine(output: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's rows of what the whole batch gave."""
    return [leaf[dist.get_rank() * ROWS :][:ROWS] for leaf in plain(output)]


def plain(output: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that an output is made of."""
    return leaves(output.detach())


# The hooks by themselves: what they are promised, what they must return ---------------------------

Show = Callable[[Any], list[Any]]
"""Shows something to the other ranks, and returns what each of them shows."""

LOW = torch.bfloat16


class Gathers:
    """The gathers of one weight, one after the other, through its hooks."""

    def __init__(self, subject: Subject, shape: Shape, show: Show, dtype: torch.dtype) -> None:
        self.subject, self.shape, self.show = subject, shape, show
        self.model = subject.sharded(shape)
        self.dtype = dtype
        self.local = shard_of(self.model)
        self.metadata: Any = None
        self._buffers: list[torch.Tensor] = []

    def send(self) -> list[torch.Tensor]:
        """Call the first hook; return what this rank sends."""
        hook = bound_hook(getattr(self.local, PRE), self.local)
        weight = self.model.get_parameter("0.weight")
        policy = MixedPrecisionPolicy(param_dtype=self.dtype)
        given = (whole_mesh(), weight.shape, weight.stride(), self.model[0], policy)
        result = hook(*given[: len(inspect.signature(hook).parameters)])
        if not (isinstance(result, tuple) and len(result) == 2):
            raise Broken(
                f"Expected {PRE} to return (tensors, metadata), got {type(result).__name__}"
            )
        sent, self.metadata = result
        if not isinstance(sent, (tuple, list)) or not all(map(torch.is_tensor, sent)):
            raise Broken(
                f"Expected {PRE} to return a tuple of tensors and metadata, got "
                f"{type(sent).__name__} as its first element"
            )
        flat, self._rebuild = flatten(sent)
        return [tensor.detach() if tensor.ndim else tensor.detach().view(1) for tensor in flat]

    def arrive(self, sent: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Put what all ranks send into the buffers, the same ones at each gather."""
        ranks = self.show(sent)
        whole = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
        if not self._buffers:
            self._buffers = [torch.empty_like(tensor) for tensor in whole]
        for buffer, tensor in zip(self._buffers, whole, strict=True):
            buffer.copy_(tensor)
        arrived: tuple[torch.Tensor, ...] = self._rebuild(list(self._buffers))
        return arrived

    def receive(self, arrived: tuple[torch.Tensor, ...], out: torch.Tensor | None = None) -> Any:
        """Call the second hook."""
        hook = bound_hook(getattr(self.local, POST), self.local)
        return hook(arrived, self.metadata, self.dtype, **({} if out is None else {"out": out}))

    def first(self) -> tuple[torch.Tensor, set[int]]:
        """Gather for the first time; return the unsharded tensor and where its storages lie."""
        arrived = self.arrive(self.send())
        result = self.receive(arrived)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise Broken(
                f"Expected {POST} to return (tensor, inner tensors) when out is None, got "
                f"{type(result).__name__}"
            )
        tensor, inner = result
        return tensor, {place for one in (*arrived, *inner) for place in places(one)}

    def outputs(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Compute with an unsharded tensor."""
        with torch.no_grad():
            batch = self.subject.batch(self.shape, self.dtype)
            return plain(self.subject.compute(batch, tensor))


def dtypes_of(local: torch.Tensor) -> list[torch.dtype]:
    """Return the dtypes that a shard is asked to be gathered for."""
    return [local.dtype, LOW] if local.dtype.is_floating_point else [local.dtype]


def places(tensor: torch.Tensor) -> list[int]:
    """Return where the storages of a tensor lie."""
    return [leaf.untyped_storage().data_ptr() for leaf in leaves(tensor)]


def hooks(subject: Subject, shape: Shape, show: Show) -> None:
    """Both hooks exist, and the first takes (mesh) or all five arguments."""
    local = subject.tensor(shape)
    found = [name for name in (PRE, POST) if hasattr(local, name)]
    if len(found) == 1 or not (found or needs_extension(local)):
        got = f"{found[0]} alone" if found else "neither"
        raise Broken(f"Expected {PRE} and {POST}, got {got}")
    if found:
        signature = inspect.signature(bound_hook(getattr(local, PRE), local))
        if len(signature.parameters) not in (1, 5):
            raise Broken(
                f"Expected {PRE} to take (mesh) or (mesh, outer_size, outer_stride, module, "
                f"mp_policy), got {len(signature.parameters)} parameters: {signature}"
            )


def sent(subject: Subject, shape: Shape, show: Show) -> None:
    """All ranks send tensors of the same number, dtypes and trailing dims, with equal metadata."""
    gathers = Gathers(subject, shape, show, shard_dtype(subject, shape))
    formats = show([(tensor.dtype, list(tensor.shape[1:])) for tensor in gathers.send()])
    for rank, theirs in enumerate(formats):
        if theirs != formats[0]:
            raise Broken(
                "Expected tensors of the same number, dtypes and trailing dims from all ranks, got "
                f"{in_words(formats[0])} on rank 0 and {in_words(theirs)} on rank {rank}"
            )
    metadata = show(gathers.metadata)
    for rank, theirs in enumerate(metadata):
        if not alike(theirs, metadata[0]):
            raise Broken(
                "Expected equal metadata on all ranks, since each rank gets its own back, got "
                f"{metadata[0]} on rank 0 and {theirs} on rank {rank}; send what differs"
            )


def shard_dtype(subject: Subject, shape: Shape) -> torch.dtype:
    """Return the dtype that a tensor says it has."""
    return subject.tensor(shape).dtype


def in_words(formats: list[tuple[torch.dtype, list[int]]]) -> str:
    """Name dtypes and trailing dims."""
    return ", ".join(f"{dtype} {['rows', *dims]}".replace("'", "") for dtype, dims in formats)


def alike(mine: Any, theirs: Any) -> bool:
    """Compare metadata, tensors by value, and objects that cannot be compared by attributes."""
    if isinstance(mine, torch.Tensor) or type(mine) is not type(theirs):
        return isinstance(theirs, torch.Tensor) and same_bytes(mine, theirs)
    if isinstance(mine, (tuple, list)):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(alike(mine[key], theirs[key]) for key in mine)
    if type(mine).__eq__ is object.__eq__:
        return alike(getattr(mine, "__dict__", {}), getattr(theirs, "__dict__", {}))
    return bool(mine == theirs)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit, also dtypes that know no comparison."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


def shard(subject: Subject, shape: Shape, show: Show) -> None:
    """The hooks leave the shard as it is."""
    gathers = Gathers(subject, shape, show, shard_dtype(subject, shape))
    before = [leaf.detach().clone() for leaf in leaves(gathers.local)]
    arrived = gathers.arrive(gathers.send())
    _expect_unchanged(gathers.local, before, PRE)
    gathers.receive(arrived)
    _expect_unchanged(gathers.local, before, POST)


def _expect_unchanged(local: torch.Tensor, before: list[torch.Tensor], hook: str) -> None:
    for index, (now, then) in enumerate(zip(leaves(local), before, strict=True)):
        if not same_bytes(now, then):
            raise Broken(
                f"Expected {hook} to leave the shard as it is, got inner tensor {index} of it "
                "changed in place; work on a copy"
            )


def gathered(subject: Subject, shape: Shape, show: Show) -> None:
    """What comes back has the full shape, the dtype asked for, and the unsharded values."""
    whole = subject.tensor(shape)
    for dtype in dtypes_of(whole):
        gathers = Gathers(subject, shape, show, dtype)
        tensor, _ = gathers.first()
        if tensor.shape != whole.shape:
            raise Broken(
                f"Expected {POST} to return a tensor of shape {list(whole.shape)}, got "
                f"{list(tensor.shape)}"
            )
        if tensor.dtype != dtype:
            raise Broken(
                f"Expected {POST} to return a tensor of param_dtype, {dtype}, got {tensor.dtype}"
            )
        if dtype == whole.dtype:
            expected = gathers.outputs(whole)
            what = "to compute with the gathered tensor what the unsharded one gives"
            subject.expect_alike(gathers.outputs(tensor), expected, what)


def out(subject: Subject, shape: Shape, show: Show) -> None:
    """The second gather fills the tensor that the first one made, in the same storages."""
    for dtype in dtypes_of(subject.tensor(shape)):
        gathers = Gathers(subject, shape, show, dtype)
        tensor, lasting = gathers.first()
        before, old = places(tensor), [part.clone() for part in gathers.outputs(tensor)]
        gathers.local = shard_of(subject.sharded(shape, seed=1))
        arrived = gathers.arrive(gathers.send())
        gathers.receive(arrived, tensor)
        copies = tuple(one.clone() for one in arrived)
        expected = gathers.outputs(gathers.receive(copies)[0])
        found = gathers.outputs(tensor)
        if not all(map(torch.equal, found, expected)):
            kept = all(map(torch.equal, found, old))
            got = "those of the gather before" if kept else "others"
            raise Broken(
                f"Expected {POST} to write into out the values that arrived, got {got}; fill out "
                "where it is not the all-gather outputs themselves"
            )
        for then, now in zip(before, places(tensor), strict=True):
            if then in lasting and now != then:
                raise Broken(
                    f"Expected {POST} to keep the storages of out, which are freed and refilled, "
                    "got another one; copy into out instead of replacing what it is made of"
                )


def has_hooks(subject: Subject, shape: Shape) -> bool:
    """Tell whether there are hooks, or the tensor travels by its inner tensors."""
    return hasattr(subject.tensor(shape), PRE)


HOOK_CHECKS = (sent, shard, gathered, out)

# The hooks for gradients by themselves: what they are promised, what they must return -------------

NUM_STEPS = 8
"""Reductions of the same gradient: what one of them loses has to come with the others."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of reduction, in which gradients come."""


class Reductions:
    """The reductions of one weight's gradient, one after the other, through its hooks."""

    def __init__(
        self, subject: Subject, shape: Shape, show: Show, dtype: torch.dtype = torch.float32
    ) -> None:
        self._show = show
        self._dtype = dtype
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._numel = ParamLayout(shape, 0, self._num_ranks).shard_numel
        self._model = subject.sharded(shape)
        group = group_of(self._model[0])
        assert group is not None
        self._hooks = GradExtension(group.params[0])

    def parts(self) -> torch.Tensor:
        """Return the gradient of this rank, [num_shards, shard_numel]; another on each."""
        generator = torch.Generator().manual_seed(self._rank)
        return torch.randn(self._num_ranks, self._numel, generator=generator).to(self._dtype)

    def encode(self) -> list[torch.Tensor]:
        """Return what this rank sends."""
        try:
            return self._hooks.encode(self.parts())
        except ExtensionError as error:
            raise Broken(str(error)) from error

    def decode(self, sent: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return what this rank makes of what all have sent."""
        received = tuple(
            torch.stack([rows[self._rank] for rows in of_all]) for of_all in zip(*sent, strict=True)
        )
        out = torch.full((self._numel,), torch.nan)
        self._hooks.decode(received, out)
        if out.isnan().any():
            raise Broken(
                f"Expected {GRAD_POST} to fill out, {self._numel} elements, got some that it left; "
                "write into it"
            )
        return out

    def reduce(self) -> torch.Tensor:
        """Return this rank's part of the sum."""
        return self.decode(self._show(self.encode()))

    def exact(self) -> torch.Tensor:
        """Return what that sum is."""
        parts: list[torch.Tensor] = self._show(self.parts())
        return torch.stack([one[self._rank] for one in parts]).sum(0, dtype=torch.float32)


def gradient_sent(subject: Subject, shape: Shape, show: Show) -> None:
    """What is sent for a gradient has a row for each rank, alike on all ranks and each time."""
    for dtype in DTYPES:
        reductions = Reductions(subject, shape, show, dtype)
        for _ in range(2):
            formats = show(formats_of(reductions.encode()))
            for rank, theirs in enumerate(formats):
                if theirs != formats[0]:
                    raise Broken(
                        f"Expected {GRAD_PRE} to return the same dtypes and shapes on all ranks "
                        f"and each time, got {formats_in_words(formats[0])} on rank 0 and "
                        f"{formats_in_words(theirs)} on rank {rank}"
                    )


def gradient_summed(subject: Subject, shape: Shape, show: Show) -> None:
    """The sum of what ranks send is, in the mean over steps, that of their gradients."""
    for dtype in DTYPES:
        reductions = Reductions(subject, shape, show, dtype)
        exact = reductions.exact()
        mean = torch.stack([reductions.reduce() for _ in range(NUM_STEPS)]).mean(0)
        if exact.numel():
            what = f"the mean of {NUM_STEPS} reductions to be the sum over ranks"
            subject.expect_alike([mean], [exact], what)


def no_gradient(subject: Subject, shape: Shape, show: Show) -> None:
    """Zero bytes, which a rank without a gradient sends, stand for a gradient of zeros."""
    zeros = [torch.zeros_like(each) for each in Reductions(subject, shape, show).encode()]
    sent = show(zeros)
    try:
        total = Reductions(subject, shape, show).decode(sent)
    except Exception as error:
        raise Broken(
            f"Expected {GRAD_POST} to work on a rank that never had a gradient, whose metadata is "
            f"None, got {type(error).__name__}: {error}"
        ) from error
    if total.any():
        raise Broken(
            f"Expected {GRAD_POST} to make zeros of zero bytes, got values up to "
            f"{total.abs().max().item():.3g}; a rank without a gradient sends zero bytes"
        )


def formats_in_words(formats: Sequence[Format]) -> str:
    """Name dtypes and shapes."""
    return f"[{', '.join(map(str, formats))}]"


def has_gradient_hooks(subject: Subject, shape: Shape) -> bool:
    """Tell whether the tensor decides what its gradient is on the wire."""
    return has_grad_extension(subject.tensor(shape))


GRADIENT_CHECKS = (gradient_sent, gradient_summed, no_gradient)
