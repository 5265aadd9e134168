"""Values that hold themselves go in and out of modules as they are, or are refused."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field

import pytest
import torch
from nets import assert_parity, average_gradients
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.errors import ShardError
from composable_shard.testing import fake_ranks


@dataclass
class Node:
    """A node of a tree that knows the one above it."""

    value: torch.Tensor
    above: Node | None = None
    below: list[Node] = field(default_factory=list)
    note: object = None

    def under(self, value: torch.Tensor) -> Node:
        node = Node(value, above=self)
        self.below.append(node)
        return node


def tree() -> Node:
    root = Node(torch.ones(2, 4))
    root.under(torch.full((2, 4), 2.0))
    root.under(torch.full((2, 4), 3.0))
    return root


class OfTrees(nn.Module):
    """Gives every node a new value, and the same tree."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, root: Node) -> Node:
        for node in (root, *root.below):
            assert node.above is None or node.above is root
            node.value = self.linear(node.value)
        return root


REFUSAL = (
    "Expected inputs and outputs without containers that hold themselves, got a Node with itself "
    "inside and a tensor to cast or to watch; pass its tensors by themselves"
)


@on_ranks(2)
def test_what_needs_no_change_goes_in_and_out() -> None:
    torch.manual_seed(0)
    plain = OfTrees()
    model = fully_shard(copy.deepcopy(plain))
    for net in (plain, model):
        root = tree()
        out = net(root)
        assert out is root and all(node.above is out for node in out.below)
        sum(node.value.sum() for node in (out, *out.below)).backward()
    average_gradients(plain.parameters())
    assert_parity(model, plain)


@on_ranks(2)
def test_a_tensor_that_is_to_be_changed_in_there_is_refused() -> None:
    """As an input that needs a gradient, and as an output that is cast."""
    plain = OfTrees()
    model = fully_shard(copy.deepcopy(plain))
    casting = fully_shard(OfTrees(), mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    with pytest.raises(ShardError, match=f"^{re.escape(REFUSAL)}$"):
        model(model(tree()))
    with pytest.raises(ShardError, match=f"^{re.escape(REFUSAL)}$"):
        casting(tree())
    for net in (plain, model, casting):  # and goes on
        value = net(Node(torch.ones(2, 4))).value
        assert value.dtype == (torch.bfloat16 if net is casting else torch.float32)
        value.sum().backward()
    average_gradients(plain.parameters())
    assert_parity(model, plain)


def test_inputs_need_no_gradient() -> None:
    with fake_ranks(2):
        model = fully_shard(OfTrees())
        with torch.no_grad():
            assert model(tree()).value.shape == (2, 4)
