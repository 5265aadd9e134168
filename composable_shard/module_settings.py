"""When parameters and gradients of a sharded module come and go: what users may change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

from torch import nn

from composable_shard.core.comms.streams import Waitable
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.settings import check_reshard
from composable_shard.errors import ShardError


class HasGroup:
    """A sharded module, which has a group and may have others below."""

    def _group(self) -> ParamGroup:
        group = group_of(cast(nn.Module, self))
        assert group is not None
        return group

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        if not recurse:
            return [self._group()]
        modules = cast(nn.Module, self).modules()
        return list(dict.fromkeys(g for m in modules if (g := group_of(m)) is not None))


class ModuleSettings(HasGroup):
    """The setters of :class:`FSDPModule` for when parameters and gradients come and go.

    All act from the next forward or backward on. Those that take ``recurse`` act on all sharded
    modules below too, which is the default; the others on this module's own group.
    """

    # What is freed, what is gathered ahead --------------------------------------------------

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Set whether unsharded parameters are freed after forward.

        Args:
            reshard_after_forward: The choice, as for :func:`fully_shard`; also for a root, which
                has no say of its own then. ``False`` keeps them until backward; after a forward
                without gradients they are freed all the same.
            recurse: Whether to set it for all sharded modules below.

        Raises:
            ValueError: If it is neither a bool nor a number that divides that of the shards.

        Example:
            >>> model.set_reshard_after_forward(False)
            >>> output = model(x)
            >>> tuple(model[0].weight.shape), hasattr(model[0].weight, "to_local")
            ((4, 4), False)
        """
        groups = self._groups(recurse)
        checked = [check_reshard(reshard_after_forward, group.channels) for group in groups]
        for group, choice in zip(groups, checked, strict=True):
            group.settings.reshard_after_forward = choice

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether unsharded parameters are freed after backward.

        ``False`` saves the gather of the next microbatch, as long as gradients are accumulated
        without sync or another backward is said to come (:meth:`set_is_last_backward`). The sharded
        parameters are registered meanwhile, so what is done to them or their gradients counts.

        Args:
            reshard_after_backward: The choice.
            recurse: Whether to set it for all sharded modules below.

        Example:
            >>> model.set_reshard_after_backward(False)
            >>> with model.no_sync():
            ...     model(x).sum().backward()
            >>> with record_events(model, "all_gather") as events:
            ...     output = model(x)
            >>> events
            []
        """
        checked_bool("reshard_after_backward", reshard_after_backward)
        for group in self._groups(recurse):
            group.settings.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of unsharded parameters stays when they are resharded.

        Then every gather fills the same memory, as a captured CUDA graph needs. Parameters that are
        replaced (by loading with ``assign=True``, by moving the module) get other memory.

        Args:
            keep: The choice; ``False`` frees at once what is not unsharded.
            recurse: Whether to set it for all sharded modules below.

        Memory: with ``True``, the unsharded parameters, all the time.

        Example:
            >>> model[0].set_keep_unsharded_storage(True)
            >>> places = []
            >>> for _ in range(2):
            ...     model[0].unshard()
            ...     places.append(model[0].weight.data_ptr())
            ...     model[0].reshard()
            >>> places[0] == places[1]
            True
        """
        checked_bool("keep", keep)
        for group in self._groups(recurse):
            group.keep_unsharded_storage(keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's own group.

        ``False`` is for parameters whose values backward does not read, such as an embedding's.

        Args:
            unshard_in_backward: The choice.

        Example:
            >>> model[0].set_unshard_in_backward(False)
            >>> model(x).sum().backward()
            >>> model[0].bias.grad.placements
            (Shard(dim=0),)
        """
        checked_bool("unshard_in_backward", unshard_in_backward)
        self._group().settings.unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these modules' groups when this one runs forward, instead of the recorded next.

        Args:
            modules: Sharded modules, in the order to gather them; empty for the recorded order.

        Raises:
            ValueError: If one of them is not sharded.

        Example:
            >>> model.set_modules_to_forward_prefetch([model[0], model[1]])
            >>> with record_events(model, "all_gather") as events:
            ...     output = model(x)
            >>> events
            [('all_gather', '0'), ('all_gather', '1')]
        """
        self._group().settings.forward_prefetch = groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these modules' groups when this one runs backward, instead of the recorded next.

        Args:
            modules: Sharded modules, in the order to gather them; empty for the recorded order.

        Raises:
            ValueError: If one of them is not sharded.

        Example:
            >>> model[1].set_modules_to_backward_prefetch([model[0]])
            >>> model(x).sum().backward()
        """
        self._group().settings.backward_prefetch = groups_of(modules)

    def set_post_optim_event(self, event: Waitable | None) -> None:
        """Let the next gather wait for ``event``, such as the end of an optimizer step.

        Needed for an optimizer that steps on a stream, or on a thread, of its own.

        Args:
            event: Any object with a ``wait``, called without arguments before the next gather is
                launched, once: a ``torch.Event``, that of a backend such as ``torch.cuda.Event``,
                or a ``threading.Event``. ``None`` (what a stream of the CPU records) waits for
                nothing.

        Raises:
            TypeError: If it has no ``wait``.

        Example:
            >>> import torch
            >>> model.set_post_optim_event(torch.Event("cpu"))
            >>> output = model(x)
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(
                "Expected event to have a method wait, as a torch.Event has, got "
                f"{type(event).__name__}"
            )
        self._group().context.post_optim_event = event

    # When gradients are reduced -------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the end of a backward waits for its reductions.

        ``False`` lets the last reductions of a microbatch overlap with the next one; gradients
        are complete after a backward for which it is ``True``. Acts on the whole tree.

        Args:
            is_last_backward: The choice.

        Example:
            >>> model.set_is_last_backward(False)
            >>> model(x).sum().backward()
            >>> model.set_is_last_backward(True)
            >>> model(x).sum().backward()
            >>> model[0].weight.grad.placements
            (Shard(dim=0),)
        """
        self._group().context.backward.reductions.is_last = checked_bool(
            "is_last_backward", is_last_backward
        )

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether :meth:`FSDPModule.finalize_backward` finishes reductions, by a call.

        Then no end of a backward waits for its reductions, whatever ``set_is_last_backward`` says;
        what it reduces and frees is what is set at the time. Call it on the root, between
        iterations.

        Args:
            enabled: The choice.

        Raises:
            ValueError: If it is no bool.
            ShardError: Below the root; while a backward runs, or one has run that is not finished.

        Example:
            >>> model.set_manual_backward_finalization(True)
            >>> model(x).sum().backward()
            >>> model.finalize_backward()
            >>> model[0].weight.grad.placements
            (Shard(dim=0),)
            >>> model.set_manual_backward_finalization(False)
        """
        checked_bool("enabled", enabled)
        group = self._group()
        context = group.context
        if group is context.root:
            context.backward.finalize_by_hand(enabled)
            return
        if enabled or not group.settings.finalizes_by_hand:
            raise ShardError(
                "Expected set_manual_backward_finalization() on the root, got it on "
                f"{group.label}; call it on the outermost sharded module"
            )
        group.settings.finalizes_by_hand = False  # it was a root when it was set

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients over the ranks.

        Without, gradients are accumulated unsharded, visible as ``Partial`` DTensors in ``.grad``,
        and reduced by the next backward with it.

        Args:
            requires_gradient_sync: The choice.
            recurse: Whether to set it for all sharded modules below.

        Example:
            >>> model.set_requires_gradient_sync(False)
            >>> model(x).sum().backward()
            >>> model[0].weight.grad.placements
            (Partial(avg),)
        """
        checked_bool("requires_gradient_sync", requires_gradient_sync)
        for group in self._groups(recurse):
            group.settings.requires_gradient_sync = requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication within this context.

        Nests, and restores what was set before. Acts on this module and all below.

        Example:
            >>> with model.no_sync():
            ...     model(x).sum().backward()
            >>> model[0].weight.grad.placements
            (Partial(avg),)
        """
        groups = self._groups(recurse=True)
        before = [group.settings.requires_gradient_sync for group in groups]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, value in zip(groups, before, strict=True):
                group.settings.requires_gradient_sync = value

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward goes on to reduce gradients over the replicas of a hybrid mesh.

        Without, gradients are reduced over the shards alone, visible as ``(Partial, Shard)``
        DTensors in ``.grad``, and over the replicas by the next backward with it.

        Args:
            requires_all_reduce: The choice; without effect on other meshes.
            recurse: Whether to set it for all sharded modules below.

        Example:
            >>> model.set_requires_all_reduce(False)
            >>> model(x).sum().backward()
        """
        checked_bool("requires_all_reduce", requires_all_reduce)
        for group in self._groups(recurse):
            group.settings.reduction.all_reduces = requires_all_reduce


def groups_of(modules: Sequence[nn.Module]) -> list[ParamGroup]:
    """Return the group of each sharded module; raise ``ValueError`` if one is not sharded."""
    groups = []
    for module in modules:
        group = group_of(module) if isinstance(module, nn.Module) else None
        if group is None:
            raise ValueError(
                f"Expected sharded modules, got {type(module).__name__}; apply fully_shard to it"
            )
        groups.append(group)
    return groups


def checked_bool(name: str, value: object) -> bool:
    """Return ``value``; raise ``ValueError`` if it is no bool."""
    if not isinstance(value, bool):
        raise ValueError(f"Expected {name} to be a bool, got {type(value).__name__}: {value!r}")
    return value
