"""How much memory ``parked`` would free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from composable_shard.insight.report import Table, nbytes_text
from composable_shard.train.parking import parkable


@dataclass(frozen=True)
class ParkingExplanation:
    """What ``parked`` would free of the memory of one device, in bytes on this rank.

    It is what is there now: gradients and states of optimizers come with the first step.

    Attributes:
        device: Such as ``"cuda:0"``. Memory of the host is not parked.
        parameters: Of shards, padding included, and of parameters that are not sharded.
        gradients: Of gradients, reduced or accumulated without sync.
        states: Of states of the optimizer.
        buffers: Of buffers of the model.
        left: Of what stays where it is; see ``Parked``.
    """

    device: str
    parameters: int
    gradients: int
    states: int
    buffers: int
    left: int

    @property
    def nbytes(self) -> int:
        """All that would be free."""
        return self.parameters + self.gradients + self.states + self.buffers


def explain_parking(
    model: nn.Module, optimizer: Optimizer | None
) -> tuple[ParkingExplanation, ...]:
    """Tell what ``parked`` would free now. Collective: none."""
    return tuple(
        ParkingExplanation(
            device=device,
            parameters=memory.parameters,
            gradients=memory.gradients,
            states=memory.states,
            buffers=memory.buffers,
            left=memory.left,
        )
        for device, memory in parkable(model, [] if optimizer is None else [optimizer])
    )


def parking_table(parking: Sequence[ParkingExplanation]) -> Table:
    """Show it as a table, with a row for each device."""
    columns = ("of", "parameters", "gradients", "states", "buffers", "freed", "left")
    rows = tuple(
        (
            one.device,
            *map(nbytes_text, (one.parameters, one.gradients, one.states, one.buffers)),
            *map(nbytes_text, (one.nbytes, one.left)),
        )
        for one in parking
    )
    return Table("Parking: bytes of this rank that parked() would free now", columns, rows, 1)
