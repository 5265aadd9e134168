"""Streams of torch, of which there are none to run here: what they are told."""

from __future__ import annotations

import torch

from composable_shard._torch.streams import on_stream


def test_a_stream_is_entered_by_an_object_for_each_time() -> None:
    stream = torch.Stream(7, 1, 1)
    first, second = on_stream(stream), on_stream(stream)
    assert first == second == stream
    assert hash(first) == hash(stream)
    assert len({id(one) for one in (first, second, stream)}) == 3
