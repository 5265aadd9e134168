"""Small models of every shape of tree, described by values that a test can generate and send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from composable_shard import fully_shard

WIDTH = 6
BATCH = 3


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, and the dim it is to be sharded on."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    dim: int = 0
    trainable: bool = True


@dataclass(frozen=True)
class TreeSpec:
    """A module with parameters of its own and children that run after one another.

    Attributes:
        params: Its own parameters.
        children: Specs of its child modules.
        grouped: Whether it is a communication group; else it belongs to its parent's.
        together: Whether its grouped children form one group instead of one each.
    """

    params: tuple[ParamSpec, ...] = ()
    children: tuple[TreeSpec, ...] = ()
    grouped: bool = True
    together: bool = False


class Tree(nn.Module):
    """Uses every parameter, of whatever shape, so that each element has its own gradient.

    ``used`` tells for each parameter of the tree, in the order of ``parameters()``, whether this
    forward uses it; parameters that are not used are not part of the graph. With ``skips_unused``
    a child none of whose parameters are used does not run at all.
    """

    skips_unused = False

    def __init__(self, spec: TreeSpec) -> None:
        super().__init__()
        self.num_own = len(spec.params)
        for index, param in enumerate(spec.params):
            self.register_parameter(f"p{index}", _new_param(param))
        self.inner = nn.ModuleList(Tree(child) for child in spec.children)

    def forward(self, x: torch.Tensor, used: Sequence[bool] | None = None) -> torch.Tensor:
        own = list(self._parameters.values())
        for index, param in enumerate(own):
            if param is not None and (used is None or used[index]):
                x = mix(x, param)
        start = len(own)
        for child in self.inner:
            assert isinstance(child, Tree)
            end = start + child.num_params
            theirs = None if used is None else used[start:end]
            if theirs is None or any(theirs) or not self.skips_unused:
                x = child(x, theirs)
            start = end
        return x

    @property
    def num_params(self) -> int:
        return self.num_own + sum(child.num_params for child in self.inner)  # type: ignore[misc]


def mix(x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Add to ``x`` a number that depends on every element of ``param``, each in its own way."""
    if not param.is_floating_point():
        param = param.to(x.dtype)
    weight = _weights(param.shape, param.dtype)
    level = (param * weight * x.mean().to(param.dtype)).sin().sum() / max(1, param.numel()) ** 0.5
    return x + level * x.sin()


@lru_cache(maxsize=256)
def _weights(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        place = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
        return (1.5 + torch.cos(0.7 * place)).to(dtype)


def _new_param(spec: ParamSpec) -> nn.Parameter:
    if not spec.dtype.is_floating_point:
        return nn.Parameter(torch.randint(-3, 4, spec.shape, dtype=spec.dtype), requires_grad=False)
    return nn.Parameter(torch.randn(spec.shape).to(spec.dtype), requires_grad=spec.trainable)


def build(spec: TreeSpec) -> Tree:
    """Build the model of ``spec`` with the same values on every rank and in every call."""
    torch.manual_seed(1)
    return Tree(spec)


def shard(model: Tree, spec: TreeSpec, **kwargs: Any) -> Tree:
    """Apply ``fully_shard`` to ``model`` from the bottom up, as ``spec`` tells."""
    dims = {id(param): of.dim for param, of in _params_with_specs(model, spec)}

    def placement(param: nn.Parameter) -> Shard | None:
        dim = dims[id(param)]
        return None if dim == 0 else Shard(dim)

    def visit(module: Tree, own: TreeSpec) -> None:
        pairs = list(zip(module.inner, own.children, strict=True))
        for child, child_spec in pairs:
            assert isinstance(child, Tree)
            visit(child, child_spec)
        members = [child for child, child_spec in pairs if child_spec.grouped]
        if own.together and members:
            fully_shard(members, shard_placement_fn=placement, **kwargs)
            return
        for child in members:
            fully_shard(child, shard_placement_fn=placement, **kwargs)

    visit(model, spec)
    fully_shard(model, shard_placement_fn=placement, **kwargs)
    return model


def group_names(spec: TreeSpec, name: str = "") -> list[str]:
    """Return the names of the modules that ``shard`` makes a group of, the root first."""
    names = [name]
    for index, child in enumerate(spec.children):
        inner = group_names(child, f"{name}.inner.{index}".lstrip("."))
        names += inner if child.grouped else inner[1:]
    return names


def _params_with_specs(model: Tree, spec: TreeSpec) -> list[tuple[nn.Parameter, ParamSpec]]:
    pairs = [(getattr(model, f"p{index}"), own) for index, own in enumerate(spec.params)]
    for child, child_spec in zip(model.inner, spec.children, strict=True):
        assert isinstance(child, Tree)
        pairs += _params_with_specs(child, child_spec)
    return pairs


def inputs_for(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the batch of one rank: the same in every call, different on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator).to(dtype)
