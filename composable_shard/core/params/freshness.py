"""Whether unsharded parameters still are what the shards say.

In-place operations on a sharded parameter move its version counter or that of its local tensor.
Foreach and fused functions, ``.data`` and NumPy move neither. Of those, steps of ``torch.optim``
are counted; see "What stays gathered" in ``docs/design.md`` for the others.
"""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from composable_shard.core.params.param_set import ParamSet
from composable_shard.mesh import ShardMesh

_steps: Counter[tuple[object, ...]] = Counter()
"""Optimizer steps on sharded parameters, by this rank and the process groups they lie on."""


class Freshness:
    """Numbers the states of a group's sharded parameters.

    Attributes:
        at_forward: The number when a forward ran whose backward is to come, if any.
    """

    def __init__(self, params: ParamSet, mesh: ShardMesh) -> None:
        self.at_forward: int | None = None
        self._params = params
        self._num_optimizer_steps = 0
        groups = [group for group in (mesh.shard_group, mesh.replica_group) if group is not None]
        self._ranks = (dist.get_rank(), *(group.group_name for group in groups))
        self._steps_at_gather = 0

    def version(self) -> int:
        """Return a number that grows whenever the sharded parameters change in place."""
        return self._num_optimizer_steps + self._params.version()

    def note_optimizer_step(self) -> None:
        """Count a step of an optimizer that has some of the parameters."""
        self._num_optimizer_steps += 1
        _steps[self._ranks] += 1

    def note_gather(self) -> None:
        """Note that the parameters are gathered as they are now."""
        self._steps_at_gather = _steps[self._ranks]

    @property
    def saw_step(self) -> bool:
        """Whether an optimizer of any model over the same ranks has stepped since the gather.

        Averages of weights are updated after such a step, often by foreach functions. All ranks
        must give the same answer, so models over other ranks do not count.
        """
        return self._steps_at_gather != _steps[self._ranks]

    def forget_forward(self) -> None:
        """Expect no backward of the last forward any more."""
        self.at_forward = None

    def changed_since_forward(self) -> bool:
        """Tell whether a backward now would use other parameters than its forward did."""
        return self.at_forward is not None and self.at_forward != self.version()
