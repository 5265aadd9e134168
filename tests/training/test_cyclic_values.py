"""Values that refer to themselves go in and out of modules: each node once, and cycles stay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from nets import full
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.core.nested import map_tensors, tensors_in
from composable_shard.testing import fake_ranks, run_ranks


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


def test_every_tensor_is_found_and_changed_once() -> None:
    root, changed = tree(), []
    root.note = note = object()

    def negative(tensor: torch.Tensor) -> torch.Tensor:
        changed.append(tensor)
        return -tensor

    assert [float(tensor[0, 0]) for tensor in tensors_in(root)] == [1, 2, 3]
    copied = map_tensors(negative, {"tree": root, "rest": 1})["tree"]
    assert len(changed) == 3
    assert [float(tensor[0, 0]) for tensor in tensors_in(copied)] == [-1, -2, -3]
    assert copied is not root and type(copied) is Node
    assert all(node.above is copied for node in copied.below)
    assert copied.note is note
    assert float(root.value[0, 0]) == 1 and root.below[0].above is root


def test_what_is_not_changed_stays_itself() -> None:
    root = tree()
    assert map_tensors(lambda tensor: tensor, root) is root


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_containers_within_themselves(kind: str) -> None:
    tensor = torch.ones(2)
    value: Any = [tensor] if kind == "list" else {0: tensor}
    if kind == "list":
        value.append(value)
    else:
        value[1] = value
    assert list(tensors_in(value)) == [tensor]
    copied = map_tensors(torch.neg, value)
    assert copied[1] is copied and torch.equal(copied[0], -tensor)


def test_what_is_in_two_places_is_no_cycle() -> None:
    shared = [torch.ones(2)]
    copied = map_tensors(torch.neg, [shared, shared])
    assert [float(one[0][0]) for one in copied] == [-1, -1]


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


def differences(dtype: torch.dtype | None) -> list[float]:
    """Train two layers that hand a tree on; compare gradients with those of plain layers."""
    torch.manual_seed(0)
    plain = nn.Sequential(OfTrees(), OfTrees())
    torch.manual_seed(0)
    model = nn.Sequential(OfTrees(), OfTrees())
    policy = MixedPrecisionPolicy(dtype, torch.float32, dtype)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for either in (model, plain):
        out = either(tree())
        assert len(out.below) == 2 and all(node.above is out for node in out.below)
        sum(node.value.float().sum() for node in (out, *out.below)).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [float((full(a.grad) - b.grad).abs().max()) for a, b in pairs]  # type: ignore[operator]


@pytest.mark.parametrize(("dtype", "most"), [(None, 0.0), (torch.bfloat16, 0.3)])
def test_modules_pass_on_dataclasses_that_refer_to_each_other(
    dtype: torch.dtype | None, most: float
) -> None:
    for found in run_ranks(differences, 2, dtype):
        assert max(found) <= most


def test_inputs_need_no_gradient() -> None:
    with fake_ranks(2):
        model = fully_shard(OfTrees())
        with torch.no_grad():
            assert model(tree()).value.shape == (2, 4)
