"""Whether unsharded parameters still are what the shards say.

In-place operations on a sharded parameter move its version counter or that of its local tensor;
foreach and fused optimizers move neither, so their steps are counted besides.
"""

from __future__ import annotations

from composable_shard.core.params.param_set import ParamSet


class Freshness:
    """Numbers the states of a group's sharded parameters.

    Attributes:
        at_forward: The number when a forward ran whose backward is to come, if any.
    """

    def __init__(self, params: ParamSet) -> None:
        self.at_forward: int | None = None
        self._params = params
        self._num_optimizer_steps = 0

    def version(self) -> int:
        """Return a number that grows whenever the sharded parameters change in place."""
        return self._num_optimizer_steps + self._params.version()

    def note_optimizer_step(self) -> None:
        """Count a step of an optimizer that has some of the parameters."""
        self._num_optimizer_steps += 1

    def forget_forward(self) -> None:
        """Expect no backward of the last forward any more."""
        self.at_forward = None

    def changed_since_forward(self) -> bool:
        """Tell whether a backward now would use other parameters than its forward did."""
        return self.at_forward is not None and self.at_forward != self.version()
