"""An optimizer steps the flat buffers that hold shards, instead of one parameter after another.

Users see the same optimizer: its parameters and its states are DTensors. A second optimizer of the
same class steps plain tensors, without the overhead of DTensors. Neighbouring shards that are
stepped alike form one tensor, a *run*. The states of a run lie in flat buffers, and the DTensor
states are views of these.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import chain, pairwise
from operator import attrgetter, is_, sub
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.arguments import check_flags, check_type
from composable_shard.core.reduction import is_partial
from composable_shard.core.storage import owner_of_sharded
from composable_shard.optim import stepping

# Elementwise optimizers: those of torch are known, others have to be declared ---------------------

ELEMENTWISE: set[type[Optimizer]] = {
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam, torch.optim.NAdam),
    *(torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad),
}
"""The elementwise optimizers of torch."""


def flat(optimizer: Optimizer, *, elementwise: bool = False) -> Optimizer:
    """Let an optimizer step the flat buffers of shards, with the same result bit by bit.

    Its parameter groups, schedulers, hooks, gradient scaler and state dicts are as before.

    Args:
        optimizer: An optimizer of sharded and any other parameters; modified in place and returned.
        elementwise: Declares that a class other than torch's updates each element independently.

    Raises:
        TypeError: If ``optimizer`` is not an optimizer, or is not known to be elementwise. LAMB,
            Adafactor, Muon and Shampoo, for example, take norms or products of matrices.
        ValueError: If it is ``differentiable``, if something other than a learning-rate scheduler
            replaced its ``step``, or if ``elementwise`` is not a bool.

    Collective: none, neither here nor in a step.
    Memory: none beyond the states of the optimizer. In a step, one shard of the gradients more
    where they do not lie as the parameters do, as in mixed precision.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = fully_shard(nn.Linear(8, 8))
        ...     optimizer = flat(torch.optim.AdamW(model.parameters()))
        >>> type(optimizer).__name__, isinstance(optimizer, torch.optim.AdamW)
        ('FlatAdamW', True)
    """
    check_type("optimizer", optimizer, isinstance(optimizer, Optimizer), "a torch.optim.Optimizer")
    check_flags(elementwise=elementwise)
    kind: Any = type(optimizer)
    if issubclass(kind, FlatSteps):
        return optimizer
    if kind not in ELEMENTWISE and not elementwise:
        raise TypeError(
            f"Expected an elementwise optimizer, got {kind.__name__}, which is not in the list of "
            "known elementwise optimizers; pass elementwise=True if it updates each element "
            "independently of the others, without norms or matrix products"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("Expected differentiable=False to step flat buffers, got True")
    replaced = vars(optimizer).pop("step", None)
    if replaced is not None and not _torch.is_counted(replaced, kind.step):
        vars(optimizer)["step"] = replaced
        raise ValueError(
            f"Expected an optimizer with the step of its class, got {kind.__name__} with another "
            "step; call flat before replacing the step"
        )
    optimizer.__class__ = _flat_class(kind)
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        owner = owner_of_sharded(param)
        if owner is not None and not owner.group.settings.has_flat_grads:
            owner.group.settings.has_flat_grads = True
            owner.group.tree.invalidate_programs()
    _torch.call_hooks_of_steps(optimizer)
    return optimizer


class FlatSteps(Optimizer):
    """The methods that a flat optimizer has instead of those of its stock class."""

    stock_class: ClassVar[type[Optimizer]]

    def num_tensors(self) -> list[int]:
        """Return how many tensors each parameter group steps if no gradient is missing."""
        return self._flat.num_tensors()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step as the class of the stock optimizer does. Collective: none."""
        self._opt_called = True  # schedulers look at it, instead of wrapping this method
        loss = stepping.loss_of(closure)
        makes_states = stepping.only_makes_states(self)
        if self._flat.step():
            self._renew()
        self.__dict__[_MADE] = stepping.counts_of(self.state) if makes_states else {}
        return loss

    vars(step)["_wrapped_by_lr_sched"] = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states without changing their dtypes. Collective: none."""
        stepping.load_states(super().load_state_dict, state_dict, self.__dict__.pop(_MADE, {}))
        self.num_tensors()  # adopts the loaded tensors now: the caller may go on to use them

    @property
    def _flat(self) -> _Steps:
        steps = self.__dict__.get(_STEPS)
        return self._renew() if steps is None or steps.is_outdated() else steps

    def _renew(self) -> _Steps:
        self.__dict__.pop(_STEPS, None)  # frees states that are no longer referenced
        steps = self.__dict__[_STEPS] = _Steps(self)
        return steps

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.pop(_STEPS, None)
        super().__setstate__(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self.stock_class,), self.__getstate__()


_STEPS, _MADE = "_composable_shard_flat", "_composable_shard_made"


def flat_states(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the flat buffers that hold the states of a flat optimizer; empty for any other."""
    steps: _Steps | None = optimizer.__dict__.get(_STEPS)
    return [] if steps is None else list(steps.buffers.values())


@cache
def _flat_class(kind: Any) -> type[Optimizer]:
    members = {"__module__": kind.__module__, "stock_class": kind}
    return type(f"Flat{kind.__name__}", (FlatSteps, kind), members)


def _new(kind: Any) -> Any:
    return object.__new__(_flat_class(kind))


# Parameters and runs -----------------------------------------------------------------------------


class _Member:
    """A parameter of the optimizer.

    Args:
        param: The parameter as the optimizer has it.
        index: Its position among all parameters of the optimizer.
        group: The index of its parameter group.
        is_fused: Whether a fused kernel steps it.

    Attributes:
        local: Its local shard; the parameter itself if it is plain.
        buffer: The flat buffer that holds the shard, [numel], alone or with others; ``None`` if the
            optimizer steps the parameter unchanged.
        start: The offset of the shard in the buffer, in elements.
        following: The offset of the next shard, if there is one.
        multiple: The number of bytes that must divide the shard for another to follow in one run.
        numbers: Its states that are one number, by name: each at its index in a tensor of all
            members, [num_members].
        states: The flat buffers of its other states, by name, [numel].
    """

    def __init__(self, param: torch.Tensor, index: int, group: int, is_fused: bool) -> None:
        self.param, self.index, self.group = param, index, group
        self.local = local = _torch.local_part(param)
        self.multiple = _multiple_of(local, is_fused)
        self.buffer: torch.Tensor | None = None
        self.start = 0
        self.following: int | None = None
        self.numbers, self.states = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        is_plain = type(local) in (torch.Tensor, nn.Parameter) and local.is_contiguous()
        if not is_plain or not isinstance(param, DTensor) or is_partial(param):
            return
        self.buffer = local.detach().view(-1)
        owner = owner_of_sharded(param)
        if owner is not None and owner.flat_position is not None:
            buffer, start, following = owner.flat_position
            if local.data_ptr() in (0, buffer.data_ptr() + start * buffer.itemsize):
                self.buffer, self.start, self.following = buffer, start, following

    @property
    def end(self) -> int:
        return self.start + self.local.numel()

    def goes_on_with(self, other: _Member) -> bool:
        """Return whether ``other``, of the same buffer, may follow in the same run."""
        return (
            other.start in (self.start, self.following)
            and self.local.nbytes % self.multiple == 0
            and (other.start - self.start) * self.local.itemsize % self.multiple == 0
        )

    def part_of(self, state: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """View this member's part of a flat state that begins ``offset`` elements later."""
        return state[self.start - offset : self.end - offset].view(self.local.shape)

    def can_share(self, state: Any) -> bool:
        """Return whether a state can be stored with the states of other parameters."""
        if not isinstance(state, DTensor):
            return isinstance(state, torch.Tensor) and state.ndim == 0
        spec, other = _torch.spec_of(state), _torch.spec_of(self.param)
        is_alike = spec.mesh == other.mesh and spec.placements == other.placements
        is_plain = not _torch.is_subclass(_torch.local_tensor(state))
        return is_alike and is_plain and state.shape == self.param.shape


LONGEST_VECTOR = 64
"""Bytes of the longest vectors of a CPU, and of the units that torch assigns to threads."""


def _multiple_of(local: torch.Tensor, is_fused: bool) -> int:
    """Return the number of bytes that must divide a shard for others to follow it in one run.

    On the CPU, fused kernels compute whole vectors. They compute the elements behind the last whole
    vector one by one, and round them in another way. So these elements must stay at the end of a
    tensor. Operations on dtypes below 32 bits do this in every thread, so no shard may follow them.
    """
    if local.device.type != "cpu":
        return 1
    if local.itemsize < torch.float32.itemsize:
        return sys.maxsize
    return LONGEST_VECTOR if is_fused else 1


class _Run:
    """Neighbouring members of one buffer that are stepped as one tensor.

    Attributes:
        members: The members, in the order of their offsets.
        tensor: The stepped tensor, [numel]; the parameter itself if it is stepped unchanged.
        is_flat: Whether the tensor is a part of a buffer.
        kept: The states that the members have; ``None`` before the first step.
        with_elements: The members with elements on this rank.
    """

    def __init__(self, members: list[_Member]) -> None:
        first, last = members[0], members[-1]
        self.members, self.with_elements = members, list[_Member]()
        self.kept: dict[str, Any] | None = None
        self.tensor, self.is_flat = first.param, first.buffer is not None
        if first.buffer is None:
            return
        self._start, self._range = first.start, slice(first.start, last.end)
        self.tensor = first.buffer[self._range].detach()
        self.with_elements = [member for member in members if member.local.numel()]
        self._indices = [member.index for member in self.with_elements]
        starts = [member.start * self.tensor.itemsize for member in self.with_elements]
        self._distances = list(map(sub, starts[1:], starts))
        gaps = [(a.end - first.start, b.start - first.start) for a, b in pairwise(members)]
        self._gaps = [slice(*gap) for gap in gaps if gap[0] < gap[1]]

    def states(self) -> dict[str, torch.Tensor]:
        """Return the states of a flat run: numbers of the first member, and parts of buffers."""
        first = self.members[0]
        with torch.inference_mode(False):  # else a step outside of it could not change them
            numbers = {name: numbers[first.index] for name, numbers in first.numbers.items()}
            return {**numbers, **{name: s[self._range] for name, s in first.states.items()}}

    def has_kept(self, states: dict[str, Any]) -> bool:
        """Return whether a step has only written to states that the members have."""
        if self.kept is None or not self.is_flat:
            return self.kept is not None
        return _are(states.values(), self.kept.values())

    def states_of(self, member: _Member, states: dict[str, Any], kind: str) -> dict[str, Any]:
        """Return a member's part of the states that a step of an optimizer class has made."""
        if not self.is_flat:
            return states
        found = dict(states)
        for name, value in states.items():
            if not isinstance(value, torch.Tensor):
                continue
            if value.ndim and (value.shape != self.tensor.shape or _torch.is_subclass(value)):
                raise TypeError(
                    f"Expected states of {kind} to be numbers, or plain tensors as large as the "
                    f"stepped tensor, got {name!r} of class {type(value).__name__} and shape "
                    f"{tuple(value.shape)} for {tuple(self.tensor.shape)}; it is not elementwise, "
                    "so use Owned to step whole tensors by it"
                )
            found[name] = value.clone()
            if value.ndim:
                found[name] = _torch.local_like(member.param, member.part_of(value, self._start))
        return found

    def take(self, all_grads: Sequence[Any]) -> None:
        """Set the gradient of the stepped tensor.

        If the gradients have the layout of the shards, they already form one tensor, within the
        storage of the first one. The gaps between them have no values, so they are zeroed.

        Args:
            all_grads: The gradients of all members.
        """
        grads = list(_torch.local_tensors(map(all_grads.__getitem__, self._indices)))
        whole = self._one_tensor(grads)
        if whole is None:
            whole = torch.empty_like(self.tensor, dtype=grads[0].dtype if grads else None)
            parts = [member.part_of(whole, self._start) for member in self.with_elements]
            _torch.copy_all_(parts, grads)
        for gap in self._gaps:
            whole[gap].zero_()
        stepping.set_grad(self.tensor, whole)

    def _one_tensor(self, grads: list[torch.Tensor]) -> torch.Tensor | None:
        addresses = list(map(torch.Tensor.data_ptr, grads))
        if not grads or list(map(sub, addresses[1:], addresses)) != self._distances:
            return None
        first, is_contiguous = grads[0], all(map(torch.Tensor.is_contiguous, grads))
        if first.itemsize != self.tensor.itemsize or not is_contiguous:
            return None
        try:
            return first.as_strided(self.tensor.shape, (1,), first.storage_offset())
        except RuntimeError:  # the storage is too short
            return None


# The steps ---------------------------------------------------------------------------------------


class _Steps:
    """The second optimizer and its runs.

    Users may change the number of one parameter in place. So each parameter has a tensor of its
    own, and its version counter shows such a change. One call writes all of them after a step.

    Args:
        optimizer: The optimizer that users see.

    Attributes:
        buffers: The flat buffers of states, by parameter buffer, name and dtype.
    """

    def __init__(self, optimizer: FlatSteps) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        self._kind = optimizer.stock_class
        step: Any = self._kind.step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._members = list[_Member]()
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                index, is_fused = len(self._members), bool(group.get("fused"))
                self._members.append(_Member(param, index, number, is_fused))
        self._params = [member.param for member in self._members]
        self._sharded = [param for param in self._params if isinstance(param, DTensor)]
        self.buffers: dict[tuple[int, str, torch.dtype], torch.Tensor] = {}
        self._numbers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._shown_numbers = list[torch.Tensor]()
        self._shared_states = list[dict[str, Any]]()
        self._seen: list[Any] = [None]  # equals no result of `_kinds`
        self._adopt()
        self._remembered = self._visible()
        self._sum_of_versions = sum(map(_version_of, self._shown_numbers))  # they only grow

    def is_outdated(self) -> bool:
        """Return whether states, parameters or the memory of parameters were replaced.

        Hazard: users replace and delete states, and change numbers in place; a step would then use
        states that users no longer see. Guard: all visible objects are compared with those of the
        last step, by identity. Test: ``test_edits_of_states_count``.
        """
        visible, versions = self._visible(), map(_version_of, self._shown_numbers)
        return not _are(visible, self._remembered) or sum(versions) != self._sum_of_versions

    def _visible(self) -> list[Any]:
        """Return all objects that users may replace: parameters, their memory, and states."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        stepped = [(group.get("fused"), *group["params"]) for group in groups]
        sharded, shared = _torch.local_tensors(self._sharded), self._shared_states
        names, values = chain.from_iterable(shared), chain.from_iterable(map(dict.values, shared))
        return [state, *chain(*stepped), *sharded, *chain(state, state.values(), names, values)]

    def num_tensors(self) -> list[int]:
        """Return how many runs each parameter group has if no gradient is missing."""
        stepped = [member for member in self._members if member.param.requires_grad]
        runs = Counter(members[0].group for members in self._joined(stepped, self._params))
        return [runs[index] for index, _ in enumerate(self._optimizer.param_groups)]

    @torch.no_grad()
    def step(self) -> bool:
        """Step all parameters that have a gradient. Collective: see ``reduced_grad``.

        Returns:
            Whether there are new states, which are not in flat buffers.
        """
        with _torch.without_overrides():
            grads = list(map(_grad_of, self._params))
            seen = _kinds(grads)
            if not _are(seen, self._seen):
                self._arrange(grads)
                self._seen = seen
            for index in self._unreduced:
                grads[index] = stepping.reduced_grad(self._params[index])
            for run in self._flat_runs:
                run.take(grads)
        try:
            self._step(self._inner())
            return self._keep_states()
        finally:
            for run in self._flat_runs:
                run.tensor.grad = None

    def _inner(self) -> Optimizer:
        """Return the second optimizer: the first one, with runs as its parameters.

        Its DTensors have parameter groups of their own: foreach and fused kernels take no lists of
        plain tensors and DTensors.
        """
        inner: Optimizer = object.__new__(self._kind)
        inner.__dict__.update(self._optimizer.__dict__)
        inner.state = self._run_states
        groups = self._optimizer.param_groups
        inner.param_groups = [
            {**groups[index], "params": params} for (index, _), params in self._stepped.items()
        ]
        return inner

    # Runs -----------------------------------------------------------------------------------

    def _arrange(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Join the parameters that have gradients into runs."""
        stepped = [m for m, grad in zip(self._members, grads, strict=True) if grad is not None]
        flat_ones = [member for member in stepped if member.buffer is not None]
        self._unreduced = [m.index for m in flat_ones if _is_elsewhere(grads[m.index], m.param)]
        self._runs = list(map(_Run, self._joined(stepped, grads)))
        self._flat_runs = [run for run in self._runs if run.is_flat]
        self._run_states = defaultdict[torch.Tensor, dict[str, Any]](dict)
        self._stepped = defaultdict[tuple[int, bool], list[torch.Tensor]](list)
        firsts = list(range(len(self._members)))
        for run in self._runs:
            first = run.members[0]
            for member in run.members:
                firsts[member.index] = first.index
            self._stepped[first.group, isinstance(run.tensor, DTensor)].append(run.tensor)
            states: dict[str, Any] | None = self._state.get(first.param)
            if run.is_flat:
                states = run.states() or None
            if states is not None:
                self._run_states[run.tensor], run.kept = states, dict(states)
        self._firsts = [torch.tensor(firsts, device=each.device) for each in self._numbers.values()]

    def _joined(self, members: Sequence[_Member], grads: Sequence[Any]) -> list[list[_Member]]:
        """Join neighbouring members of a buffer that are stepped alike.

        Bias corrections depend on a parameter's number of steps, so parameters with different
        numbers are stepped separately. Members without a buffer may communicate in a step, so they
        keep the optimizer's order, which is the same on all ranks.

        Args:
            members: The members.
            grads: The gradients of all members, of which only the dtypes matter.
        """
        joined = [[member] for member in members if member.buffer is None]
        values = {id(numbers): numbers.tolist() for numbers in self._numbers.values()}
        alike = defaultdict[Any, list[_Member]](list)
        for member in members:
            if member.buffer is not None:
                index, grad = member.index, grads[member.index]
                numbers = [(id(n), values[id(n)][index]) for n in member.numbers.values()]
                kind = grad.dtype, frozenset(numbers), frozenset(map(id, member.states.values()))
                alike[member.group, id(member.buffer), kind].append(member)
        for neighbours in alike.values():
            neighbours.sort(key=attrgetter("start", "end"))
            for index, member in enumerate(neighbours):
                if index == 0 or not neighbours[index - 1].goes_on_with(member):
                    joined.append([])
                joined[-1].append(member)
        return joined

    # States ---------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Move the states that the optimizer has into flat buffers and numbers."""
        for member in self._members:
            states = self._state.get(member.param, {})
            if not all(map(member.can_share, states.values())):
                member.buffer = None
            if member.buffer is not None:
                self._shared_states.append(states)
                for name, value in states.items():
                    states[name] = self._adopted(member, name, value)

    def _adopted(self, member: _Member, name: str, value: torch.Tensor) -> torch.Tensor:
        """Move a state; return it as users see it."""
        if not isinstance(value, DTensor):
            with torch.inference_mode(False), torch.no_grad():  # else it has no version counter
                kind = name, value.dtype, value.device
                if kind not in self._numbers:
                    self._numbers[kind] = value.new_zeros(len(self._members))
                numbers = member.numbers[name] = self._numbers[kind]
                numbers[member.index] = value
                self._shown_numbers.append(_torch.with_own_storage(numbers[member.index]))
            return self._shown_numbers[-1]
        key = id(member.buffer), name, value.dtype
        if key not in self.buffers:
            assert member.buffer is not None
            self.buffers[key] = torch.zeros_like(member.buffer, dtype=value.dtype)
        member.states[name] = self.buffers[key]
        part = member.part_of(self.buffers[key])
        part.copy_(_torch.local_tensor(value))
        return _torch.local_like(member.param, _torch.with_own_storage(part))

    def _keep_states(self) -> bool:
        """Give users the states that the step has created or replaced.

        Returns:
            Whether there are any.
        """
        for numbers, firsts in zip(self._numbers.values(), self._firsts, strict=True):
            numbers.copy_(numbers[firsts])
        new = dict[int, tuple[torch.Tensor, dict[str, Any]]]()
        for run in self._runs:
            states = self._run_states.get(run.tensor)
            if states is not None and not run.has_kept(states):
                for member in run.members:
                    of_member = run.states_of(member, states, self._kind.__name__)
                    new[member.index] = member.param, of_member
        # Functions of torch gather states in the order of their creation: the optimizer's.
        self._state.update(new[index] for index in sorted(new))
        return bool(new)


_grad_of, _version_of = attrgetter("grad"), attrgetter("_version")


def _kinds(grads: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return an object for each gradient that stays the same as long as its layout does."""
    try:
        return list(_torch.specs_of(grads))
    except AttributeError:  # some are missing, or plain
        return [_torch.spec_of(grad) if isinstance(grad, DTensor) else type(grad) for grad in grads]


def _is_elsewhere(grad: torch.Tensor | None, param: torch.Tensor) -> bool:
    """Return whether the placements of a gradient differ from those of its parameter."""
    assert isinstance(param, DTensor)
    if not isinstance(grad, DTensor) or _torch.is_subclass(_torch.local_tensor(grad)):
        raise TypeError(
            "Expected the gradient of a sharded parameter to be a DTensor of plain tensors, got "
            f"{type(grad).__name__}"
        )
    return grad.placements != param.placements


def _are(some: Collection[Any], others: Collection[Any]) -> bool:
    """Return whether these are the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))
