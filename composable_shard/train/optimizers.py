"""One optimizer or several, as users pass them."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer


def listed(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that were passed; raise ``TypeError`` if something else was."""
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for one in given:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"Expected optimizer to be a torch.optim.Optimizer or several, got "
                f"{type(one).__name__}"
            )
    return given
