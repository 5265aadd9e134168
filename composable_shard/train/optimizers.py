"""One optimizer or several, as users pass them."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from composable_shard.arguments import check_type, checked_list


def listed(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that were passed; raise ``TypeError`` if something else was."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    what = "a torch.optim.Optimizer or several"
    given = checked_list("optimizer", optimizer, what)
    for one in given:
        check_type("optimizer", one, isinstance(one, Optimizer), what)
    return given
