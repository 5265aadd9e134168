"""Parameters whose memory is freed: autograd must refuse to read them.

Hazard: a loss that is computed only from tensors kept where the hooks do not look (a global list,
a closure) starts a backward that gathers nothing, and reads freed memory. Guard: while parameters
are freed their version counters stand elsewhere, so that autograd raises its error about saved
tensors that were changed. Tested in ``tests/dist/test_modules_losses.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from composable_shard import _torch

if TYPE_CHECKING:
    from composable_shard.core.group import ParamGroup

VERSION_OF_FREED = 1_000_000_000
"""What a version counter shows while the parameter is freed; no parameter is changed so often."""


class FreedParameters:
    """Marks the parameters that must not be read, by group."""

    def __init__(self) -> None:
        self._marked: dict[ParamGroup, tuple[Sequence[torch.Tensor], Sequence[int]]] = {}

    def mark(self, group: ParamGroup) -> None:
        """Let autograd refuse the group's unsharded parameters, unless they cannot be freed."""
        if group in self._marked or group.units.share_storage:
            return
        params = group.units.all.readable
        if params:
            self._marked[group] = params, group.units.all.readable_versions()
            _torch.set_versions(params, [VERSION_OF_FREED] * len(params))

    def unmark(self, group: ParamGroup) -> None:
        """Let autograd read the group's unsharded parameters again."""
        marked = self._marked.pop(group, None)
        if marked is not None:
            _torch.set_versions(*marked)
