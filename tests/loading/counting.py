"""What is launched when whole tensors are gathered, and how much memory that takes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from composable_shard.core.transport.channel import Channel
from composable_shard.train import full
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights import gathering


class Counted(NamedTuple):
    """What was launched: of each gather the bytes sent and the bytes received; the words said."""

    gathers: list[tuple[int, int]]
    words: list[int]


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    found = Counted([], [])

    def noting(real: Any) -> Any:
        def call(*args: Any) -> Any:
            outputs, inputs = args[-2:]
            found.gathers.append((sum(t.nbytes for t in inputs), sum(t.nbytes for t in outputs)))
            return real(*args)

        return call

    def say(self: Ranks, word: int) -> Any:
        found.words.append(word)
        return real_say(self, word)

    real_say = Ranks.say
    with (
        mock.patch.object(Channel, "gather", noting(Channel.gather)),
        mock.patch.object(Channel, "gather_to", noting(Channel.gather_to)),
        mock.patch.object(Ranks, "say", say),
    ):
        yield found


@contextlib.contextmanager
def held() -> Iterator[list[int]]:
    """Count how many bytes there are at most of what a pass makes.

    Not counted: words, numbers of rows, and what a transport needs in a call.
    """
    made: list[weakref.ref[torch.UntypedStorage]] = []
    most, outside, make = [0], [0], gathering._torch.empty

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if not outside[0]:
            made.append(weakref.ref(tensor.untyped_storage()))
            alive = [storage for one in made if (storage := one()) is not None]
            most[0] = max(most[0], sum(storage.nbytes() for storage in alive))
        return tensor

    def uncounted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outside[0] += 1
            try:
                return real(*args, **kwargs)
            finally:
                outside[0] -= 1

        return call

    calls = [(Ranks, "say"), (Ranks, "gather"), (Channel, "gather"), (Channel, "gather_to")]
    with contextlib.ExitStack() as until:
        for owner, name in (*calls, (full, "_runs")):
            patch = mock.patch.object(owner, name, uncounted(getattr(owner, name)))
            until.enter_context(patch)
        until.enter_context(mock.patch.object(gathering._torch, "empty", counting))
        yield most
