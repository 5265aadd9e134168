"""From the gradients that autograd leaves on unsharded parameters to those the optimizer sees.

A group's parameters may be sharded over several meshes; each has its own way.
"""

from __future__ import annotations

from collections.abc import Sequence

from composable_shard.core.comms.channel import Channel
from composable_shard.core.grads.mesh_gradients import MeshGradients
from composable_shard.core.grads.route import Route
from composable_shard.core.grads.sharded_grad import is_partial, to_reduce
from composable_shard.core.params.param import ShardedParam
from composable_shard.core.settings import ReductionSettings


class GroupGradients:
    """Accumulates, reduces and hands out the gradients of one group."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        channels: Sequence[Channel],
        settings: ReductionSettings,
    ) -> None:
        self._params = list(params)
        self._meshes = [
            MeshGradients([p for p in params if p.mesh == channel.mesh], channel, settings)
            for channel in channels
        ]

    @property
    def is_pending(self) -> bool:
        """Whether a reduction was launched and is not finished."""
        return any(one.pending is not None for one in self._meshes)

    @property
    def are_to_reduce(self) -> bool:
        """Whether a reduction takes in any of them, which all ranks tell alike."""
        return bool(to_reduce(self._params))

    def next_routes(self) -> list[list[Route]]:
        """Return for each channel the ways of the next reduction. Collective: none."""
        return [one.next_routes() for one in self._meshes]

    def accumulate(self) -> None:
        """Add the unsharded gradients to what is not yet reduced. Collective: none."""
        self.finish()
        for one in self._meshes:
            one.accumulate()

    def reduce(self) -> None:
        """Launch the reduction of everything that is not yet reduced; see MeshGradients."""
        self.finish()
        for one in self._meshes:
            one.reduce()

    def wait(self) -> None:
        """Wait for what was launched last; what comes of it is left to the methods below."""
        for one in self._meshes:
            if one.pending is not None:
                one.pending.wait()

    def start_all_reduce(self) -> bool:
        """Go on to the reduction over the replicas; return whether there is one."""
        return any([one.start_all_reduce() for one in self._meshes])

    def finish(self) -> None:
        """Wait for the launched reduction and put its results on the sharded parameters."""
        for one in self._meshes:
            one.finish()

    def start_return(self) -> None:
        """Wait for the launched reduction; its results may be on their way to the host then."""
        for one in self._meshes:
            one.start_return()

    def end_return(self) -> None:
        """Put on the sharded parameters what was on its way to the host."""
        for one in self._meshes:
            one.end_return()

    def release(self) -> None:
        """Free what other ranks were reading when reductions were finished, and have read now."""
        for one in self._meshes:
            one.release()

    def discard(self) -> None:
        """Let the launched reduction end and drop it, and all unsharded gradients."""
        for one in self._meshes:
            one.discard()

    def has_partial(self) -> bool:
        """Tell whether any parameter has a gradient that is not reduced over all ranks."""
        return any(is_partial(param.sharded.grad) for param in self._params)

    def discard_partial(self) -> None:
        """Drop the gradients that are accumulated but not reduced."""
        for param in self._params:
            if is_partial(param.sharded.grad):
                param.sharded.grad = None
