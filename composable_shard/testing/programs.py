"""What a training loop may do, as words; a list of them is a training program.

Any list is a program: what has nothing to act on does nothing, or does first what it needs.
So a failing program shrinks by leaving out words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

__all__ = ["STEPS", "Step", "check_program"]

Step = Literal[
    "backward",
    "step",
    "zero_grad",
    "evaluate",
    "forward",
    "accumulate",
    "sync",
    "reshard",
    "checkpoint",
    "fail_forward",
    "fail_backward",
]
"""One step of a program:

- `forward`: run a forward, and keep its loss for the next backward;
- `backward`: go back from the sum of the losses kept, or of a new one, and reduce the gradients;
- `accumulate`: the same without reduction (`no_sync`);
- `sync`: reduce what was accumulated, without another backward (`synchronize_gradients`);
- `zero_grad`: clear the gradients, by the module or by the optimizer in turn;
- `step`: reduce what was accumulated, and take an optimizer step; losses kept are let go, and
  gradients stay until `zero_grad`;
- `evaluate`: run a forward in evaluation mode and under `no_grad`;
- `reshard`: free the unsharded parameters of all groups;
- `checkpoint`: save the states of model and optimizer, build both anew with other values, load;
- `fail_forward`: an exception ends a forward on all ranks, and is caught; losses kept are let go;
- `fail_backward`: an exception ends a backward on all ranks, is caught, and gradients are cleared.
"""

STEPS: tuple[Step, ...] = get_args(Step)
"""All steps, the plainest first."""


def check_program(program: Iterable[str]) -> tuple[Step, ...]:
    """Return the program as a tuple.

    Raises:
        ValueError: If a word is no step.

    Example:
        >>> check_program(["backward", "step"])
        ('backward', 'step')
    """
    known = {str(step): step for step in STEPS}
    steps: list[Step] = []
    for place, word in enumerate(program):
        if word not in known:
            raise ValueError(f"Expected step {place} to be one of {STEPS}, got {word!r}")
        steps.append(known[word])
    return tuple(steps)
