"""Ranks with less work: sitting out a module, and loops over different numbers of batches.

A rank that sits out repeats the calls of its last forward with a zero as their input and output.
Nothing is computed, and the tape, the markers and the output hooks are those of any call.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.arguments import check_module, check_type
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.hooks import groups_in, run_as_forward
from composable_shard.core.tape import CallRecord, Interval
from composable_shard.core.transport.process_groups import SmallAllReduce
from composable_shard.core.tree import Tree
from composable_shard.errors import CommunicationError, ShardError
from composable_shard.mesh import ShardMesh, largest_of


def sharded_groups(model: nn.Module, call: str) -> list[ParamGroup]:
    """Return the groups of a model; raise ``ShardError`` that names ``call`` if there are none."""
    groups = groups_in(model.modules())
    if not groups:
        raise ShardError(
            f"Expected a model with sharded modules, got none in {type(model).__name__}; apply "
            f"fully_shard before {call}"
        )
    return groups


def sit_out(module: nn.Module) -> torch.Tensor:
    """Take part in a call of a module without computing anything.

    Ranks gather and reduce together. If a rank has no input for a module that others run, such as
    images for a vision tower, it calls this instead of the module, with gradients enabled or
    disabled as on the other ranks. It sends its shards of the parameters, and in backward zeros as
    their gradients. If all ranks sit out, the gradients of a group are ``None``.

    It repeats the calls of sharded modules inside from the last forward of this rank, run or sat
    out. Before the first forward, it assumes that each sharded module inside runs once, in the
    order of registration, and without activation checkpoints. If a module runs differently, first
    run it once on all ranks; ``torch.no_grad()`` is allowed if it has no checkpoints.

    Args:
        module: A sharded module, or a module with sharded modules inside.

    Returns:
        A zero. If gradients are enabled and anything is trained, its backward takes part in that of
        the other ranks: add the zero to the loss, or run its backward if there is no other loss.

    Raises:
        TypeError: If ``module`` is no module.
        ShardError: If no module inside or around it is sharded, or if it is not sharded itself and
            its last forward has called a sharded module inside several times.

    Collective: the same as a forward of the module.
    Memory: the parameters, as in a forward of the module; no activations.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = fully_shard(nn.Linear(4, 4))
        ...     zero = sit_out(model)
        ...     zero.backward()
        >>> zero
        tensor(0., grad_fn=<CloneBackward0>)
    """
    calls = _calls_like(module)
    zero = torch.zeros((), device=calls[0].record.group.mesh.device if calls else None)
    if torch.is_grad_enabled() and any(call.may_train() for call in calls):
        zero.requires_grad_()
    intervals: dict[Interval, Interval] = {}
    for call in calls:
        zero = call.take_part(zero, intervals)
    return zero


class _NestedCall:
    """A call to take part in, with the calls inside it."""

    def __init__(self, record: CallRecord[ParamGroup], inner: Sequence[_NestedCall]) -> None:
        self.record, self.inner = record, inner

    def may_train(self) -> bool:
        """Return whether an output may get a gradient."""
        trains = any(param.sharded.requires_grad for param in self.record.group.params)
        return self.record.needs_grad or trains or any(call.may_train() for call in self.inner)

    def take_part(self, zero: torch.Tensor, intervals: dict[Interval, Interval]) -> torch.Tensor:
        """Make the call with ``zero`` as its input and output; return the output.

        Args:
            zero: The output of the call before.
            intervals: The new interval of each checkpoint interval in the recorded forward.
        """
        record, module = self.record, self.record.module
        assert isinstance(module, nn.Module)
        is_reentrant = _is_of_checkpoint(record.interval) and not record.has_grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and (record.has_grad or is_reentrant)):
            given = zero if record.has_grad else zero.detach()
            output: torch.Tensor
            output = run_as_forward(module, partial(self._take_part_inside, intervals), given)
        if output.requires_grad or not zero.requires_grad:
            return output
        zero = zero.clone()
        if is_reentrant and zero.grad_fn is not None:  # a checkpoint that begins a backward
            zero.grad_fn.register_prehook(self._call.on_output_gradient)
        return zero

    def _take_part_inside(
        self, intervals: dict[Interval, Interval], zero: torch.Tensor
    ) -> torch.Tensor:
        group, interval = self.record.group, self.record.interval
        if not group.is_in_unsharded_context:
            self._call = group.tree.call_stack[-1]
            visit = self._call.visit
            if visit is not None and interval is not None and _is_of_checkpoint(interval):
                visit.interval.is_checkpoint = True
                visit.interval = intervals.setdefault(interval, visit.interval)
        for inner in self.inner:
            zero = inner.take_part(zero, intervals)
        return zero.clone() if self.may_train() else zero.detach()


_torch.count_as_module_call(_NestedCall.take_part)


def _is_of_checkpoint(interval: Interval | None) -> bool:
    return interval is not None and interval.is_checkpoint


# Which calls to take part in ----------------------------------------------------------------------


def _calls_like(module: nn.Module) -> Sequence[_NestedCall]:
    """Return the calls of groups in a call of ``module``, as far as they are known.

    Raises:
        TypeError: See sit_out.
        ShardError: See sit_out.
    """
    check_module("module", module)
    groups = sharded_groups(module, "sit_out(), or call it on all ranks")
    group = group_of(module)
    if group is not None:
        calls = _last_calls(group.tree, {module}) or _unknown_calls(module)
        running = _outermost(_nested(group.tree.tape.calls), {module})
        num_before = len(running) if group.tree.call_stack else 0
        return [calls[min(num_before, len(calls) - 1)]]
    expected, last = _unknown_calls(module), list[_NestedCall]()
    for tree in dict.fromkeys(group.tree for group in groups):
        unknown = [call for call in expected if call.record.group.tree is tree]
        last += _last_calls(tree, {*module.modules()}) or unknown
    called = [call.record.module for call in last]
    if len(set(called)) < len(called):
        raise ShardError(
            f"Expected a module to sit out that is sharded itself, got {type(module).__name__}, "
            "which calls a sharded module several times; call sit_out() for each of these calls"
        )
    return last


def _last_calls(tree: Tree, modules: Collection[Hashable]) -> list[_NestedCall]:
    """Return the outermost calls of ``modules`` in the last forward that is like this one."""
    stack, tape, has_grad = tree.call_stack, tree.tape, torch.is_grad_enabled()
    around = stack[0].module if stack else None
    for is_alike in (has_grad, not has_grad):
        known = {m: calls for (m, has), calls in tape.last_calls.items() if has is is_alike}
        ways = [
            [calls for outermost, calls in known.items() if outermost is around],
            [calls for outermost, calls in known.items() if outermost in modules],
            *([calls] for calls in reversed(known.values())),
        ]
        for way in ways:
            nested = [_nested(calls, enables_grad=not is_alike) for calls in way]
            found = [call for calls in nested for call in _outermost(calls, modules)]
            if found:
                return found
    return _outermost(_nested(tape.calls), modules) if stack else []


def _nested(records: Sequence[tuple[Any, ...]], *, enables_grad: bool = False) -> list[_NestedCall]:
    """Return the outermost calls, each with the calls inside it; gradients may be enabled."""
    by_depth: dict[int, list[_NestedCall]] = {}
    for record in starmap(CallRecord[ParamGroup], records):
        record = record._replace(has_grad=record.has_grad or enables_grad)
        inner = by_depth.pop(record.depth + 1, [])
        by_depth.setdefault(record.depth, []).append(_NestedCall(record, inner))
    return [call for depth in sorted(by_depth) for call in by_depth[depth]]


def _outermost(calls: Sequence[_NestedCall], modules: Collection[Hashable]) -> list[_NestedCall]:
    """Return the calls of some modules that are not inside another of these calls."""
    found: list[_NestedCall] = []
    for call in calls:
        is_within = call.record.module in modules
        found += [call] if is_within else _outermost(call.inner, modules)
    return found


def _unknown_calls(module: nn.Module) -> list[_NestedCall]:
    """Return the calls to expect of a module that this rank has never run."""
    inner = [call for child in module.children() for call in _unknown_calls(child)]
    group = group_of(module)
    if group is None:
        return inner
    record = CallRecord(0, group, module, None, has_grad=True, needs_grad=False)
    return [_NestedCall(record, inner)]


# Loops over batches for ranks with different numbers of them --------------------------------------

_AGREEING = "agreeing on whether any rank has a batch"
_HAS_NONE, _HAS_ONE, _FAILED = range(3)  # and on which rank, added to the last

Batch = TypeVar("Batch")


class uneven(Generic[Batch]):
    """Iterate over batches on all ranks until none of them has any left.

    A rank without more batches gets ``None`` while others continue. It takes part in their forward
    and backward by :func:`sit_out`, and in the rest of a step: clipping, the optimizer, the
    schedule. So no rank waits for a rank that has finished, and optimizer states stay the same on
    all ranks. The losses of ranks without a batch count as zeros in the mean over ranks.

    It also serves for microbatches: ``is_last`` is the same on all ranks, and shows when to reduce.

    Args:
        model: A sharded module, or a module with sharded modules inside.
        batches: The batches of this rank, of any number. Each loop reads them again, one batch
            ahead.

    Raises:
        TypeError: If ``model`` is no module, or ``batches`` cannot be iterated over.
        ShardError: If nothing in ``model`` is sharded; from the loop, if the model is parked or on
            other ranks.
        ValueError: From the loop, if a batch is ``None``; on the rank that has it.
        CommunicationError: From the loop, on the other ranks, if ``batches`` raises on one of them.

    Collective: an all-reduce of 8 bytes for each iteration, launched one iteration ahead.

    Example:
        >>> from composable_shard import fully_shard, sit_out
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = fully_shard(nn.Linear(4, 1))
        ...     for batch in uneven(model, [torch.ones(1, 4), torch.ones(3, 4)]):
        ...         loss = sit_out(model) if batch is None else model(batch).mean()
        ...         loss.backward()
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch]) -> None:
        check_module("model", model)
        is_iterable = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
        check_type("batches", batches, is_iterable, "iterable")
        sharded_groups(model, "uneven()")
        self._model, self._batches = model, batches
        self._next: _Turn[Batch] | None = None

    @property
    def is_last(self) -> bool:
        """Whether no rank has another batch. Waits for the other ranks."""
        return self._next is not None and not self._next.is_anybodys()

    def __iter__(self) -> Iterator[Batch | None]:
        """Yield this rank's batches, then ``None`` while other ranks have more."""
        batches, groups = iter(self._batches), groups_in(self._model.modules())
        for group in groups:
            group.check_in_memory("for a loop of uneven()")
        mesh = largest_of(group.mesh for group in groups)
        turn = self._next = _Turn(batches, mesh)
        try:
            while turn.is_anybodys():
                self._next = _Turn(batches, mesh)
                yield turn.batch
                turn = self._next
        finally:
            turn.end()
            self._next.end()
            self._next = None


class _Turn(Generic[Batch]):
    """One iteration of a loop.

    Attributes:
        batch: The batch of this rank, or ``None``.
    """

    def __init__(self, batches: Iterator[Batch], mesh: ShardMesh) -> None:
        self.batch: Batch | None = None
        self._failure: Exception | None = None
        word = _HAS_NONE
        try:
            self.batch = next(batches)
            word = _HAS_ONE
            if self.batch is None:
                raise ValueError("Expected batches that are not None, since None means no batch")
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 (any error; it is sent to all ranks)
            self._failure, word = error, _FAILED + dist.get_rank()
        largest: Any = dist.ReduceOp.MAX
        self._said = SmallAllReduce(torch.tensor([word]), largest, mesh, _AGREEING)

    def is_anybodys(self) -> bool:
        """Return whether any rank has a batch.

        Raises:
            CommunicationError: On the other ranks, if a rank failed to take its batch.
        """
        (word,) = self._said.wait()
        if self._failure is not None:
            raise self._failure
        if word >= _FAILED:
            raise CommunicationError(f"Rank {word - _FAILED} failed while taking its next batch")
        return word == _HAS_ONE

    def end(self) -> None:
        """Wait for the words of all ranks."""
        self._said.wait()
