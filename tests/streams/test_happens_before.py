"""What counts as a fault in the order of streams, and what does not."""

from __future__ import annotations

import pytest
from support.happens_before import Block, Memory, Order, Span

COMPUTE, OTHER = "compute", "another stream"
FREED = Span(0, 8)


def after_a_free() -> Memory:
    """Return memory that went back to the compute stream while another one reads it."""
    order = Order()
    memory = Memory(order)
    block = Block(FREED, COMPUTE)
    memory.add(block)
    memory.touch(order.work(OTHER, "read"), [FREED], [])
    memory.free(block)
    return memory


def test_memory_is_given_to_what_its_stream_allocates_next() -> None:
    memory = after_a_free()
    memory.add(Block(Span(8, 16), COMPUTE))
    assert len(memory.faults) == 1


@pytest.mark.parametrize(
    ("block", "is_allocated"),
    [
        (Block(Span(8, 16), OTHER), True),
        (Block(Span(8, 16), COMPUTE, is_of_host=True), True),
        (Block(Span(8, 16), COMPUTE), False),
    ],
    ids=["of another stream", "of the host", "that was there"],
)
def test_memory_is_not_given_to_what_takes_none_of_its_stream(
    block: Block, is_allocated: bool
) -> None:
    memory = after_a_free()
    memory.add(block, is_allocated=is_allocated)
    assert memory.faults == []
