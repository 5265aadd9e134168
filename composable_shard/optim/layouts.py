"""One optimizer made of stock optimizers that step whole matrices, rows of them, or shards.

Optimizers such as Muon need whole matrices. Here each matrix has one owner among the ranks. The
shards of its values and of its gradient travel to the owner in an all-to-all, a stock optimizer
steps it there as a plain tensor, and the updated rows travel back. No rank gathers everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.arguments import check_int, check_module, check_type, check_value
from composable_shard.core.storage import as_sharded
from composable_shard.errors import ShardError
from composable_shard.mesh import places_of
from composable_shard.optim import stepping
from composable_shard.optim.blocks import Block, Box, GroupSteps, blocks_of, owned_buckets, schedule
from composable_shard.optim.exchange import Ranks
from composable_shard.optim.flat import ELEMENTWISE, FlatSteps, flat
from composable_shard.optim.stepping import Factory, OwnedBucket, Param, Saved, States

# Layouts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharded:
    """Step the local shards with an elementwise optimizer. Collective: none.

    Args:
        optimizer: Makes the optimizer from parameter groups, such as ``partial(torch.optim.AdamW,
            lr=3e-4)``.
        is_elementwise: ``True`` declares that an optimizer not in torch is elementwise.

    Example:
        >>> Sharded(torch.optim.AdamW).is_elementwise
        False
    """

    optimizer: Factory
    is_elementwise: bool = False


@dataclass(frozen=True)
class Owned:
    """Step whole tensors, each on one rank: its owner.

    A parameter of more than two dims is a stack of matrices, and each has its own owner. A
    matrix that lies whole on a rank, such as an expert, stays there.

    Args:
        optimizer: Makes the optimizer from parameter groups, such as ``partial(torch.optim.Muon,
            lr=0.02)``; it must step each tensor independently. Called for each bucket with the
            tensors that this rank owns, possibly none.

    Example:
        >>> Owned(torch.optim.Muon).blocks((3, 8, 4))[2].starts
        (2, 0, 0)
    """

    optimizer: Factory

    def blocks(self, shape: Sequence[int]) -> list[Box]:
        """Return the matrices of a parameter."""
        return blocks_of(shape)

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Return why a parameter of this shape cannot be stepped: any can."""
        return None


@dataclass(frozen=True)
class Rows(Owned):
    """Step blocks of rows, each as a matrix of its own, such as q, k and v of a fused weight.

    Args:
        optimizer: See :class:`Owned`.
        split_sizes: The number of rows of each block of a matrix.

    Example:
        >>> [box.sizes for box in Rows(torch.optim.Muon, (4, 2, 2)).blocks((8, 4))]
        [(4, 4), (2, 4), (2, 4)]
    """

    split_sizes: tuple[int, ...] = ()

    def blocks(self, shape: Sequence[int]) -> list[Box]:
        """Return the blocks of a parameter."""
        return blocks_of(shape, self.split_sizes)

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Return why a parameter of this shape cannot be stepped; ``None`` if it can."""
        if len(shape) >= 2 and sum(self.split_sizes) == shape[-2] and min(self.split_sizes) > 0:
            return None
        return f"a matrix of {sum(self.split_sizes)} rows for split_sizes {self.split_sizes}"


BUCKET_NBYTES = 64 * 2**20
"""The default of ``bucket_nbytes``."""

Layout = Owned | Sharded
Fits = str | Callable[[str, torch.Tensor], bool]


def with_layout(
    model: nn.Module, layouts: Mapping[Fits, Layout], *, bucket_nbytes: int = BUCKET_NBYTES
) -> Optimizer:
    """Combine stock optimizers that step whole matrices, rows of them, or shards.

    A step equals steps of the stock optimizers on the unsharded parameters bit by bit. Each layout
    that fits any parameter has one parameter group, in order; the stock optimizers follow changes
    of its values, such as those of learning-rate schedulers. The owners hold the states;
    ``state_dict`` returns them sharded like the parameters, so a checkpoint can be loaded on any
    number of ranks.

    Args:
        model: A model with sharded parameters; plain ones are taken as whole.
        layouts: The layouts by key; the first key that fits a parameter decides. A key is a
            shell-style pattern of names, or a function of name and parameter.
        bucket_nbytes: Bytes of the parameters in one bucket, at most; a larger matrix has its own.

    Raises:
        TypeError: On all ranks, if an argument has the wrong type.
        ValueError: On all ranks, if a parameter has no layout or does not fit its layout, or
            ``bucket_nbytes`` is not positive.

    Collective: makes a process group for a mesh of several axes, and for one on gloo, once. A step
        sends the values and the gradient of each matrix to its owner, and the values back, in two
        all-to-alls for a bucket.
    Memory: a rank's part of at most two buckets in flight.
    Source: Muon is Scalable for LLM Training (arXiv 2502.16982), which gathers on owners, too.

    Example:
        >>> from functools import partial
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        >>> optimizer = with_layout(
        ...     model,
        ...     {
        ...         "*.weight": Owned(partial(torch.optim.Muon, lr=0.02)),
        ...         "*": Sharded(partial(torch.optim.AdamW, lr=3e-4)),
        ...     },
        ... )
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.0003]
    """
    check_module("model", model)
    what = "a mapping from names to layouts"
    check_type("layouts", layouts, isinstance(layouts, Mapping), what)
    check_int("bucket_nbytes", bucket_nbytes, 1)
    return LayoutOptimizer(sort_by_layout(model, layouts), bucket_nbytes)


def sort_by_layout(
    model: nn.Module, layouts: Mapping[Fits, Layout]
) -> list[tuple[Layout, list[Param]]]:
    """Return the layouts that fit any parameter, each with its parameters; see with_layout."""
    for fits, layout in layouts.items():
        is_layout = isinstance(layout, Layout)
        check_type(f"the layout of {fits!r}", layout, is_layout, "Owned, Rows or Sharded")
    names: dict[torch.Tensor, list[str]] = {}
    for name, registered in model.named_parameters(remove_duplicate=False):
        names.setdefault(as_sharded(registered), []).append(name)
    keys = {p: [fits for fits in layouts if does_fit(fits, names[p], p)] for p in names}
    for fits in layouts:
        if isinstance(fits, str) and fits not in chain.from_iterable(keys.values()):
            raise ValueError(f"Expected pattern '{fits}' to match a parameter name, got no match")
    chosen: dict[Fits, list[Param]] = {fits: [] for fits in layouts}
    for param, (name, *_) in names.items():
        if not keys[param]:
            raise ValueError(
                f"Expected a layout for parameter '{name}', got none that fits; add one for '*'"
            )
        chosen[keys[param][0]].append(Param(name, param))
    return [(layouts[fits], params) for fits, params in chosen.items() if params]


def does_fit(fits: Fits, names: Sequence[str], param: torch.Tensor) -> bool:
    """Return whether a pattern, or a function, fits a parameter of these names."""
    matches = fits if callable(fits) else lambda name, _: fnmatchcase(name, fits)
    return any(matches(name, param) for name in names)


# Checks, the same on all ranks ---------------------------------------------------------


def check(layout: Layout, params: Sequence[Param]) -> dict[str, Any]:
    """Raise if a parameter does not fit its layout; return the values of the optimizer's group."""
    known: dict[tuple[object, ...], dict[str, Any]] = {}
    for param in params:
        shapes = [tuple(param.tensor.shape)]
        if isinstance(layout, Owned):
            name, misfit = f"parameter '{param.name}'", layout.misfit(shapes[0])
            check_value(name, list(shapes[0]), misfit is None, f"to be {misfit}")
            what = "to have one range of rows and columns on each rank, unless Sharded steps it"
            check_value(name, param.placements, param.is_in_boxes, what)
            shapes = [box.sizes[-2:] for box in layout.blocks(shapes[0])]
        for shape in dict.fromkeys(shapes):
            key = (shape, param.tensor.dtype)
            known[key] = known.get(key) or _values_for(layout, param, shape)
    return next(iter(known.values()))


def _values_for(layout: Layout, param: Param, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the hyperparameters of the layout's optimizer for a tensor of some shape.

    Every rank makes such an optimizer, so that an optimizer that refuses the tensor does so on all
    ranks.
    """
    tensor = stepping.stand_in(shape, param.tensor.dtype, torch.device("cpu"))
    name = type(layout).__name__
    try:
        optimizer = layout.optimizer([{"params": [tensor]}])
    except Exception as error:
        raise ValueError(
            f"Expected an optimizer that steps parameter '{param.name}' as {name} tensors of shape "
            f"{list(shape)}, got {type(error).__name__}: {error}"
        ) from error
    if not isinstance(optimizer, Optimizer) or len(optimizer.param_groups) != 1:
        raise TypeError(
            f"Expected the optimizer of {name} to be made of parameter groups, as by "
            f"partial(torch.optim.AdamW, lr=3e-4), got {type(optimizer).__name__}"
        )
    is_apart = isinstance(layout, Sharded) and not layout.is_elementwise
    if is_apart and type(optimizer) not in ELEMENTWISE and not isinstance(optimizer, FlatSteps):
        raise ValueError(
            f"Expected an elementwise optimizer for parameter '{param.name}', got "
            f"{type(optimizer).__name__}, which may need whole tensors; use Owned, or pass "
            "is_elementwise=True"
        )
    return _values(optimizer.param_groups[0])


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


# The optimizer ------------------------------------------------------------------------------------


class LayoutOptimizer(Optimizer):
    """Stock optimizers as one, each on plain tensors; see :func:`with_layout`."""

    def __init__(self, rules: Sequence[tuple[Layout, list[Param]]], bucket_nbytes: int) -> None:
        self._rules, self._bucket_nbytes = rules, bucket_nbytes
        groups = [
            {"params": [param.tensor for param in params], **check(layout, params)}
            for layout, params in rules
        ]
        super().__init__(groups, {})
        self.choose_owners()

    def choose_owners(self) -> None:
        """Make the stock optimizers, without states, for the current placements of parameters.

        Collective: see :func:`with_layout`.
        """
        self.forget_owners()
        self._loads: dict[Ranks, list[int]] = {}
        ranks_on = cache(ranks_of)  # makes a process group, once
        for place, (layout, params) in enumerate(self._rules):
            if isinstance(layout, Sharded):
                stock = layout.optimizer([{"params": [param.tensor for param in params]}])
                self._shards[place] = cast(FlatSteps, flat(stock, elementwise=True))
                continue
            of_ranks: dict[Ranks, list[Block]] = {}
            for index, param in enumerate(params):
                tensor, spread = param.tensor, param.spread()
                ranks = ranks_on(param.mesh or tensor.device)
                of_ranks.setdefault(ranks, []).extend(
                    Block(index, number, box, spread, tensor.itemsize)
                    for number, box in enumerate(layout.blocks(tensor.shape))
                )
            for ranks, blocks in of_ranks.items():
                load = self._loads.setdefault(ranks, [0] * len(ranks.places))
                for bucket in owned_buckets(blocks, load, self._bucket_nbytes):
                    owned = OwnedBucket(params, bucket, ranks, layout.optimizer)
                    self._buckets.append((place, owned))

    def forget_owners(self) -> None:
        """Drop all stock optimizers and their states. Collective: none."""
        self.state = defaultdict(dict)
        self._shards: dict[int, FlatSteps] = {}
        self._buckets: list[tuple[int, OwnedBucket]] = []
        self._made: stepping.Counts | None = None

    def __reduce__(self) -> Any:
        """Refuse copies and pickles, which would lack the states of the owners."""
        raise ShardError(
            "Expected state_dict() to transfer an optimizer of with_layout, since the owners hold "
            "its states, got a copy or a pickle of it; make a new optimizer by with_layout, and "
            "load the state dict"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse more parameters than those of the model; see :func:`with_layout`."""
        if len(self.param_groups) == len(self._rules):
            raise ShardError(
                "Expected all parameters to have their layout from with_layout, got another group; "
                "make a new optimizer"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: Computes the loss again.

        Collective: two all-to-alls for each bucket in which anything moves.
        """
        loss = stepping.loss_of(closure)
        self._made = stepping.Counts() if stepping.only_makes_states(self) else None
        for place, stock in self._stock():
            stock.param_groups[0].update(_values(self.param_groups[place]))
        steps = [bucket.step() for _, bucket in self._buckets]
        for first in steps[:1]:
            next(first)
        for shards in self._shards.values():  # while the first bucket travels
            shards.step()
        for index in schedule(len(steps))[1:]:
            next(steps[index], None)
        for place, stock in self._stock():
            self.param_groups[place].update(_values(stock.param_groups[0]))
        # Functions of torch look at the keys of states: all ranks have the same, whatever they own.
        for param in self._stepped():
            if param.grad is not None:
                self.state[param]  # a defaultdict
        return loss

    def plan(self) -> list[GroupSteps]:
        """Return the work of a step on this rank if every trained parameter has a gradient."""
        groups = []
        for place, (layout, params) in enumerate(self._rules):
            plans = [bucket.plan() for group, bucket in self._buckets if group == place]
            nums = [num for num, _ in plans]
            if place in self._shards:
                nums = self._shards[place].num_tensors()
            trained = [param.tensor for param in params if param.tensor.requires_grad]
            counts = len(trained), sum(map(torch.numel, trained)), sum(nums)
            sent = [sent for _, both in plans for sent in both]
            groups.append(GroupSteps(type(layout).__name__, *counts, sent))
        return groups

    def imbalance(self) -> float:
        """Return the largest work of a rank, divided by the mean of its mesh; 1 is best."""
        loads = filter(any, self._loads.values())
        return max((max(load) * len(load) / sum(load) for load in loads), default=1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the states, sharded like the parameters.

        Collective: for the owners' states, an all-gather of their descriptions for each mesh, and
        an all-to-all for each bucket.
        """
        live, self.state = self.state, self.sharded_states()
        if self._made is not None:
            self._made = stepping.counts_of(self.state)
        try:
            return super().state_dict()
        finally:
            self.state = live

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states that :meth:`state_dict` returned, here or on another number of ranks.

        Collective: an all-to-all for each bucket.
        """
        states = state_dict["state"]
        if states and not any(states.values()) and self._has_states():
            raise ShardError(
                "Expected states of parameters, got a state dict that has none; torch cannot "
                "read a flattened one (flatten_optimizer_state_dict=True) into an optimizer of "
                "with_layout, so save it without that option"
            )
        stepping.load_states(super().load_state_dict, state_dict, self._made or {})
        self._made = None
        self.take_states(self.state)

    def _has_states(self) -> bool:
        """Return whether any rank's stock optimizers have states. Collective: see state_dict."""
        told = stepping.described_by_owners([bucket for _, bucket in self._buckets])
        states = chain.from_iterable(shards.state.values() for shards in self._shards.values())
        return any(told.values()) or any(states)

    def take_states(self, loaded: Mapping[torch.Tensor, States]) -> None:
        """Load the result of :meth:`sharded_states`. Collective: see load_state_dict."""
        for place, shards in self._shards.items():
            params = enumerate(self.param_groups[place]["params"])
            states = {index: loaded[param] for index, param in params if loaded.get(param)}
            shards.load_state_dict({**shards.state_dict(), "state": states})
        for _, bucket in self._buckets:
            bucket.load(loaded)
        self.state = defaultdict(dict, {p: {} for p in self._stepped() if p in loaded})

    def stock_optimizers(self) -> list[Optimizer]:
        """Return the stock optimizers of this rank, which hold the states."""
        return [stock for _, stock in self._stock()]

    def _stock(self) -> list[tuple[int, Optimizer]]:
        """Return the stock optimizers of this rank, each with the place of its group."""
        of_buckets = ((place, bucket.optimizer) for place, bucket in self._buckets)
        return [*self._shards.items(), *of_buckets]

    def _stepped(self) -> list[torch.Tensor]:
        return [param.tensor for _, params in self._rules for param in params]

    def sharded_states(self) -> Saved:
        """Return the states of each parameter, sharded like it. Collective: see state_dict."""
        saved = Saved(dict)
        for place, shards in self._shards.items():
            params = self.param_groups[place]["params"]
            saved.update((params[i], s) for i, s in shards.state_dict()["state"].items())
        stepping.save_states([bucket for _, bucket in self._buckets], saved)
        return Saved(dict, {p: saved[p] for p in self._stepped() if p in self.state})


def ranks_of(mesh: DeviceMesh | torch.device) -> Ranks:
    """Return the ranks that hold a parameter: those of its mesh, or one with a device.

    Collective: makes their process group, for a mesh of several axes.
    """
    device = mesh if isinstance(mesh, torch.device) else torch.device(mesh.device_type)
    if isinstance(mesh, torch.device) or mesh.size() == 1:
        return Ranks(None, 0, (0,), device)
    group = mesh.get_group(0)
    if mesh.ndim > 1:
        assert mesh.mesh_dim_names is not None  # see resolve_mesh
        axes = zip(mesh.mesh_dim_names, mesh.shape, strict=True)
        names = tuple(name for name, extent in axes if extent > 1)
        group = _torch.flat_axis(mesh, names).get_group()
    place_of = places_of(mesh)
    places = tuple(place_of[rank] for rank in dist.get_process_group_ranks(group))
    return Ranks(group, places[group.rank()], places, device)
