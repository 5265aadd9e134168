"""Models and training programs, described by values that a test can generate and print.

A `TreeSpec` is a value: hypothesis draws and shrinks it, ranks receive it, and its `repr` can be
pasted into a test. Calling it builds the model, so it is a `build` for
`assert_trains_like_unsharded`.

Any list is a program: a step with nothing to act on does nothing, or first runs the steps that it
needs. So a failing program shrinks by leaving out steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.distributed.tensor import Shard

from composable_shard.api import fully_shard
from composable_shard.arguments import check_value

# Values as Python expressions that a person can paste into a test ---------------------------------


def call_expression(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Write a call, one argument a line.

    Example:
        >>> print(call_expression("train", (["backward"],), {"lr": 0.1}))
        train(
            ['backward'],
            lr=0.1,
        )
    """
    return f"{name}(\n" + "".join(f"    {part},\n" for part in _arguments(args, kwargs)) + ")"


def expression(value: Any) -> str:
    """Write a value: functions by their names, dataclasses without their defaults.

    Example:
        >>> from composable_shard import MixedPrecisionPolicy
        >>> import torch
        >>> expression((MixedPrecisionPolicy(torch.bfloat16), sum))
        '(MixedPrecisionPolicy(param_dtype=torch.bfloat16), sum)'
    """
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(_arguments((), changed_fields(value)))})"
    if isinstance(value, partial):
        return f"partial({', '.join(_arguments((value.func, *value.args), value.keywords))})"
    if type(value) is tuple:
        parts = ", ".join(map(expression, value))
        return f"({parts},)" if len(value) == 1 else f"({parts})"
    if type(value) is list:
        return f"[{', '.join(map(expression, value))}]"
    return getattr(value, "__qualname__", None) or repr(value)


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    values = ((field, getattr(value, field.name)) for field in fields(value) if field.init)
    return {field.name: own for field, own in values if own != field.default}


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    return [*map(expression, args), *(f"{key}={expression(one)}" for key, one in kwargs.items())]


# Small models of every shape of tree, described by values that a test can generate and print ------

WIDTH = 6
BATCH = 3


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, and the dim to shard it on.

    Args:
        shape: Its shape; `()` is a scalar.
        dtype: Its dtype.
        dim: The dim that `shard_tree` shards it on.
        trainable: Whether it needs a gradient.
        tied: Whether it is tied to the last parameter of this shape and dtype in the tree, if there
            is one; its own `dim` and `trainable` are then ignored.

    Example:
        >>> ParamSpec((3, 2)).trainable
        True
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    dim: int = 0
    trainable: bool = True
    tied: bool = False


@dataclass(frozen=True)
class TreeSpec:
    """A module with parameters of its own and children that run after one another.

    Args:
        params: Its own parameters.
        children: Specs of its child modules.
        grouped: Whether it is a communication group; else it belongs to its parent's.
        together: Whether its grouped children form one group instead of one each.

    Example:
        >>> model = TreeSpec((ParamSpec((3,)),), (TreeSpec((ParamSpec((2, 2)),)),))()
        >>> [(name, tuple(param.shape)) for name, param in model.named_parameters()]
        [('p0', (3,)), ('inner.0.p0', (2, 2))]
    """

    params: tuple[ParamSpec, ...] = ()
    children: tuple[TreeSpec, ...] = ()
    grouped: bool = True
    together: bool = False

    def __call__(self) -> Tree:
        """Build the model; its values come from torch's random state."""
        return Tree(self)

    @property
    def num_params(self) -> int:
        """Count the parameters in the tree, a tied parameter once for each use."""
        return len(self.params) + sum(child.num_params for child in self.children)


Known = dict[tuple[tuple[int, ...], torch.dtype], nn.Parameter]


class Tree(nn.Module):
    """Uses every parameter, of any shape, so that each element has its own gradient.

    A child without used parameters still runs, but the output of every second child of this kind is
    discarded, so that no gradient reaches it. With `skips_unused`, it does not run at all.

    Args:
        spec: Its description.
        known: The parameters so far, to which later ones may be tied; a tree passes them on.

    Example:
        >>> Tree(TreeSpec((ParamSpec((3,)),)))(torch.ones(2, 6)).shape
        torch.Size([2, 6])
    """

    skips_unused = False

    def __init__(self, spec: TreeSpec, known: Known | None = None) -> None:
        super().__init__()
        known = {} if known is None else known
        self.spec = spec
        for index, param in enumerate(spec.params):
            key = (param.shape, param.dtype)
            if not param.tied or key not in known:
                known[key] = _new_param(param)
            self.register_parameter(f"p{index}", known[key])
        self.inner = nn.ModuleList(Tree(child, known) for child in spec.children)

    @property
    def trees(self) -> list[Tree]:
        """The children."""
        return cast(list[Tree], list(self.inner))

    def forward(self, x: torch.Tensor, used: Sequence[bool] | None = None) -> torch.Tensor:
        """Run the tree.

        Args:
            x: Of shape `(batch, features)`, any extents.
            used: For each parameter of the tree, in the order of their registration, whether this
                forward uses it; an unused one is no part of the graph.
        """
        params = list(self._parameters.values())
        for index, param in enumerate(params):
            if param is not None and (used is None or used[index]):
                x = mix(x, param)
        start = len(params)
        for place, child in enumerate(self.trees):
            end = start + child.spec.num_params
            used_by_child = None if used is None else used[start:end]
            is_used = used_by_child is None or any(used_by_child)
            if is_used or not self.skips_unused:
                output = child(x, used_by_child)
                x = output if is_used or place % 2 == 0 else x
            start = end
        return x


def mix(x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Add to `x` a number that depends on every element of `param`, each in its own way.

    Example:
        >>> mix(torch.ones(2), torch.zeros(3))
        tensor([1., 1.])
    """
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


def shard_tree(model: Tree, **options: Any) -> Tree:
    """Apply `fully_shard` to a tree from the bottom up, as its spec says.

    Args:
        model: The tree.
        options: Further arguments of every `fully_shard`.

    Returns:
        The tree.

    Example:
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = shard_tree(TreeSpec((ParamSpec((3, 4), dim=1),))())
        ...     model.p0.placements
        (Shard(dim=1),)
    """
    params = reversed(_params_with_specs(model))  # of a tied parameter, the first use counts
    dims = {id(param): spec.dim for param, spec in params}

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(dims[id(param)]) if param.ndim else None

    def visit(tree: Tree) -> None:
        for child in tree.trees:
            visit(child)
        members: list[nn.Module] = [child for child in tree.trees if child.spec.grouped]
        groups: list[Any] = [members] if tree.spec.together and members else members
        for group in groups:
            fully_shard(group, shard_placement_fn=placement, **options)

    visit(model)
    fully_shard(model, shard_placement_fn=placement, **options)
    return model


def _params_with_specs(model: Tree) -> list[tuple[nn.Parameter, ParamSpec]]:
    trees = [module for module in model.modules() if isinstance(module, Tree)]
    specs = [(tree, index, s) for tree in trees for index, s in enumerate(tree.spec.params)]
    return [(getattr(tree, f"p{index}"), spec) for tree, index, spec in specs]


@dataclass(frozen=True)
class TreeLoss:
    """The loss of a tree that uses some of its parameters, on a random batch.

    Args:
        used: Which parameters forwards use, one tuple for each rank: rank `r` uses `used[(step + r)
            % len(used)]` in a step, so ranks and steps differ. Empty: all parameters. All ranks use
            the first trained parameter, so that all run a backward.

    Example:
        >>> loss = TreeLoss(((True, True), (True, False)))
        >>> model = TreeSpec((ParamSpec((2,)), ParamSpec((3,))))()
        >>> loss(model, step=0, rank=1).backward()
        >>> model.p1.grad is None
        True
    """

    used: tuple[tuple[bool, ...], ...] = ()

    def __call__(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """Return the mean square of the output."""
        assert isinstance(model, Tree)
        used = None
        if self.used:
            params = enumerate(_params_with_specs(model))
            first = next((place for place, (param, _) in params if param.requires_grad), 0)
            own = enumerate(self.used[(step + rank) % len(self.used)])
            used = [is_used or place == first for place, is_used in own]
        return model(torch.randn(BATCH, WIDTH), used).float().square().mean()


# The steps of a training loop as words; a list of them is a training program ----------------------

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
- `backward`: run backward from the kept losses, or from a new loss, and reduce the gradients;
- `accumulate`: the same without reduction (`no_sync`);
- `sync`: reduce the accumulated gradients, without another backward (`synchronize_gradients`);
- `zero_grad`: clear the gradients, by the module or by the optimizer in turn;
- `step`: reduce accumulated gradients, and take an optimizer step; kept losses are dropped, and
  gradients stay until `zero_grad`;
- `evaluate`: run a forward in evaluation mode and under `no_grad`;
- `reshard`: free the unsharded parameters of all groups;
- `checkpoint`: save the states of model and optimizer, build both anew with other values, load;
- `fail_forward`: an exception ends a forward on all ranks, and is caught; kept losses are dropped;
- `fail_backward`: an exception ends a backward on all ranks, is caught, and gradients are cleared.
"""

STEPS: tuple[Step, ...] = get_args(Step)
"""All steps, the plainest first."""


def check_program(program: Sequence[Step]) -> tuple[Step, ...]:
    """Return the program as a tuple.

    Raises:
        ValueError: If a word is no step, or the program is empty.

    Example:
        >>> check_program(["backward", "step"])
        ('backward', 'step')
    """
    for place, word in enumerate(program):
        check_value(f"step {place}", word, word in STEPS, f"to be one of {STEPS}")
    if not program:
        raise ValueError("Expected a program of at least one step, got none")
    return tuple(program)
