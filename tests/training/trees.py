"""A tree of modules with small, big, inner-sharded and frozen parameters, and batches for it."""

from __future__ import annotations

import torch

from composable_shard.testing.programs import BATCH, WIDTH, ParamSpec, Tree, TreeSpec

TREE = TreeSpec(
    (ParamSpec((3,)),),
    (
        TreeSpec((ParamSpec((5, 2)), ParamSpec((257, 193)))),
        TreeSpec((ParamSpec((3, 5), dim=1), ParamSpec((4,), trainable=False), ParamSpec((6,)))),
    ),
)
NUM_PARAMS = TREE.num_params


def build(spec: TreeSpec) -> Tree:
    """Build the model of ``spec`` with the same values on every rank and in every call."""
    torch.manual_seed(1)
    return Tree(spec)


def inputs_for(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the batch of one rank: the same in every call, different on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator).to(dtype)
