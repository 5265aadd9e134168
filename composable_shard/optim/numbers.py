"""Numbers that an optimizer keeps of each parameter, stepped once for many of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable_shard import _torch


class Numbers:
    """A state that is one number for a parameter, such as the count of its steps.

    Users may change that of one parameter in place. So each has a tensor of its own, whose version
    counter tells of it; one call writes all of them after a step.

    Args:
        like: Has the dtype and the device.
        firsts: See :meth:`arrange`.

    Attributes:
        stepped: What steps change, in the place of the first member of each run, [num_members].
        seen: What users see, [num_members].
        own: The parts of it that they have, by member.
    """

    def __init__(self, like: torch.Tensor, firsts: Sequence[int]) -> None:
        with torch.inference_mode(False):
            self.seen = torch.zeros(len(firsts), dtype=like.dtype, device=like.device)
        self.own: dict[int, torch.Tensor] = {}
        self.arrange(firsts)

    def arrange(self, firsts: Sequence[int]) -> None:
        """Let members be stepped with others.

        Args:
            firsts: For each member the first one of its run; itself if it is not stepped.
        """
        with torch.inference_mode(False):  # else no step without it could change them
            self.stepped = self.seen.clone()
        self._firsts = torch.tensor(firsts, device=self.seen.device)

    def show(self) -> None:
        """Let members have what has been stepped."""
        torch.index_select(self.stepped, 0, self._firsts, out=self.seen)

    def of(self, member: int) -> torch.Tensor:
        """Return the number of a member as users have it."""
        if member not in self.own:
            with torch.inference_mode(False), torch.no_grad():  # else it has no version counter
                self.own[member] = _torch.with_own_storage(self.seen[member])
        return self.own[member]
