"""What is launched when whole tensors are gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from composable_shard.core.transport.channel import Channel
from composable_shard.train.ranks import Ranks


class Counted(NamedTuple):
    """What was launched: of each gather the bytes sent and the bytes received; the words said."""

    gathers: list[tuple[int, int]]
    words: list[int]


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    gathers, words = list[tuple[int, int]](), list[int]()
    gather, gather_to, say = Channel.gather, Channel.gather_to, Ranks.say

    def note(outputs: Any, inputs: Any) -> None:
        gathers.append((sum(t.nbytes for t in inputs), sum(t.nbytes for t in outputs)))

    def gather_and_note(self: Channel, outputs: Any, inputs: Any) -> Any:
        note(outputs, inputs)
        return gather(self, outputs, inputs)

    def gather_to_and_note(self: Channel, to: int, outputs: Any, inputs: Any) -> Any:
        note(outputs, inputs)
        return gather_to(self, to, outputs, inputs)

    def say_and_note(self: Ranks, word: int) -> Any:
        words.append(word)
        return say(self, word)

    with (
        mock.patch.object(Channel, "gather", gather_and_note),
        mock.patch.object(Channel, "gather_to", gather_to_and_note),
        mock.patch.object(Ranks, "say", say_and_note),
    ):
        yield Counted(gathers, words)
