"""What a call on several ranks raises in the caller: which rank failed, how, and where."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class RankFailure:
    """One rank's exception, as far as it can travel between processes.

    Args:
        rank: the rank that raised.
        exception_type: the exception's class, or its nearest base that this process knows.
        type_name: the name of the exception's own class.
        message: `str(exception)`.
        traceback: the text Python would have printed on that rank.
    """

    rank: int
    exception_type: type[BaseException]
    type_name: str
    message: str
    traceback: str

    def __str__(self) -> str:
        head, body = f"[rank {self.rank}] {self.type_name}: {self.message}", self.traceback.rstrip()
        return f"{head}\n{body}" if body else head


class PackedFailure(NamedTuple):
    """A failure on the wire: classes go by name, as the receiver may not know them all."""

    class_names: tuple[tuple[str, str], ...]  # (module, name), from the class to its last base
    message: str
    traceback: str

    @classmethod
    def pack(cls, error: BaseException) -> PackedFailure:
        names = tuple((base.__module__, base.__qualname__) for base in type(error).__mro__)
        return cls(names, str(error), "".join(traceback.format_exception(error)))

    def unpack(self, rank: int) -> RankFailure:
        found = (getattr(sys.modules.get(module), name, None) for module, name in self.class_names)
        exception_type = next(one for one in found if isinstance(one, type))
        return RankFailure(
            rank, exception_type, self.class_names[0][1], self.message, self.traceback
        )


class RankError(RuntimeError):
    """Some ranks raised. The text holds every failing rank's traceback.

    Args:
        num_ranks: how many ranks were called.
        failures: what each failing rank raised, in rank order.
        unfinished: ranks that had neither returned nor raised when the call was given up.
        stacks: where each unfinished rank stood, when that could be found out.
    """

    def __init__(
        self,
        num_ranks: int,
        failures: Sequence[RankFailure] = (),
        unfinished: Sequence[int] = (),
        stacks: Mapping[int, str] | None = None,
        reason: str = "",
    ) -> None:
        self.num_ranks = num_ranks
        self.failures = tuple(sorted(failures, key=lambda failure: failure.rank))
        self.unfinished = tuple(sorted(unfinished))
        self.stacks = dict(stacks or {})
        self.reason = reason
        super().__init__(self._text())

    def agreed(self) -> RankFailure:
        """Return rank 0's failure if every rank raised the same type with the same text.

        Raises:
            AssertionError: a rank did not raise, or raised something else.
        """
        kinds = {(failure.type_name, failure.message) for failure in self.failures}
        if len(self.failures) != self.num_ranks or len(kinds) != 1:
            raise AssertionError(f"Expected one error on all ranks, got: {self}") from self
        return self.failures[0]

    def _text(self) -> str:
        lines = [self.reason] if self.reason else []
        if self.failures:
            lines.append(f"{len(self.failures)} of {self.num_ranks} ranks failed:")
            lines.extend(str(failure) for failure in self.failures)
        if self.unfinished:
            lines.append(f"Ranks that had not finished: {list(self.unfinished)}")
        for rank, stack in sorted(self.stacks.items()):
            lines.append(f"[rank {rank}] stood at:\n{stack.rstrip()}")
        return "\n".join(lines)


class RankTimeout(RankError):
    """Some ranks did not finish in time, and none of the others raised."""
