"""Whatever a model computes, and however its loss comes about, it trains as the unsharded one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from nets import Checkpointed, Net, Reentrant, shard_net
from torch import nn
from torch.func import grad, vmap
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from composable_shard import MixedPrecisionPolicy, fully_shard
from training.models import (
    PLACES,
    Case,
    Cases,
    Parts,
    W,
    check,
    linear,
    shard_all,
    shard_energy,
    sq,
    stored_loss,
    storing,
    weight,
    with_forces,
)

NET = {"shard": shard_net}
SUMMED = {"tolerance": 5e-6}
"""For gradients that are sums of what several backwards of a step leave, which round otherwise."""

RESHARD = pytest.mark.parametrize(
    ("ranks", "reshard"), [(2, True), (2, False), (3, None), (2, None), (1, True)]
)


# Forwards and backwards in unusual numbers and orders ---------------------------------------------


def in_order(model: Any, x: torch.Tensor, _: int, first: int = 1) -> torch.Tensor:
    losses = sq(model(x)), sq(model(2 * x))
    losses[1 - first].backward()
    return losses[first]


def with_graph_kept(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    loss = sq(model(x))
    loss.backward(retain_graph=True)
    return loss


def parts_of_a_kept_graph(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    output = model(x)
    sq(output[:1]).backward(retain_graph=True)
    return sq(output[1:])


def with_another_between(context: Any, model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    with context():
        before = sq(model(3 * x)).item()
    loss = sq(model(x))
    with context():
        between = sq(model(2 * x)).item()
    return loss + before - between


def after_a_gradient_of_the_input(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    loss = sq(model(x.requires_grad_()))
    (of_input,) = torch.autograd.grad(loss, [x], retain_graph=True)
    return loss + of_input.sum()


def several(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    return sum((sq(model(x * scale)) for scale in (2, 3)), sq(model(x)))


def by_parts(model: Any, x: torch.Tensor, part: str = "all") -> torch.Tensor:
    if part == "head":
        return model.head(x)
    x = model.encoder(x)
    return x if part == "encoder" else model.head(x)


def head_by_chunks(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    encoded = model(x, "encoder")
    features = encoded.detach().requires_grad_()
    for chunk in features.split(1):
        sq(model(chunk, "head")).backward()
    assert features.grad is not None
    return (encoded * features.grad).sum()


def repeated() -> nn.Module:
    return Parts(lambda m, x: m.a(torch.tanh(m.b(m.a(x)))), a=linear(), b=linear())


def two_parts() -> nn.Module:
    return Parts(by_parts, encoder=Parts(lambda m, x: m.a(x) * m.w, a=linear(), w=weight(W)),
                 head=linear(W, 3))  # fmt: skip


TWO_PARTS = {"shard": shard_all}
CALLS: Cases = {
    "several forwards": Case(Net, several, NET),
    "backwards in order": Case(Net, in_order, {**NET, **SUMMED}),
    "backwards in reverse": Case(Net, partial(in_order, first=0), {**NET, **SUMMED}),
    "a dropped forward": Case(Net, lambda m, x, _: (m(5 * x), sq(m(x)))[1], NET),
    "a graph kept": Case(Net, with_graph_kept, {**NET, **SUMMED}),
    "parts of a graph kept": Case(Net, parts_of_a_kept_graph, {**NET, **SUMMED}),
    "evaluation between": Case(Net, partial(with_another_between, torch.no_grad), NET),
    "inference between": Case(Net, partial(with_another_between, torch.inference_mode), NET),
    "a gradient of the input": Case(Net, after_a_gradient_of_the_input, NET),
    "no zero_grad": Case(
        Net, several, {**NET, **SUMMED, "program": ["backward", "backward", "accumulate", "sync"]}
    ),
    "a module twice": Case(repeated),
    "a module twice, several forwards": Case(repeated, several, SUMMED),
    "a module twice, a graph kept": Case(repeated, with_graph_kept, SUMMED),
    "an encoder alone first": Case(
        two_parts, lambda m, x, _: sq(m(x, "encoder")) + sq(m(2 * x)), TWO_PARTS
    ),
    "an encoder alone": Case(two_parts, lambda m, x, _: sq(m(x, "encoder")), TWO_PARTS),
    "a head alone": Case(two_parts, lambda m, x, _: sq(m(m(x, "encoder"), "head")), TWO_PARTS),
    "a head by chunks": Case(two_parts, head_by_chunks, {**TWO_PARTS, **SUMMED}),
}


@RESHARD
@pytest.mark.parametrize("name", CALLS)
def test_calls_in_unusual_numbers_and_orders(name: str, ranks: int, reshard: bool | None) -> None:
    check(__name__, "CALLS", name, world_size=ranks, reshard_after_forward=reshard)


# Losses that do not come from the output ----------------------------------------------------------


CACHED: Cases = {
    f"{place}{', output' * adds}": Case(
        partial(storing, place), partial(stored_loss, with_output=bool(adds))
    )
    for place in PLACES
    for adds in (0, 1)
}


def with_outputs(reshard: bool | None) -> list[tuple[str, bool | None]]:
    return [(f"{place}, output", reshard) for place in PLACES if place != "elsewhere"]


KEPT = [(place, False) for place in PLACES if place != "elsewhere"]
ALONE = [(place, reshard) for place in ("attribute", "list", "dict") for reshard in (True, None)]


@pytest.mark.brief(10)
@pytest.mark.parametrize(
    ("name", "reshard"),
    [*KEPT, *with_outputs(True), *ALONE, *with_outputs(None), *with_outputs(False)],
)
def test_loss_on_a_cached_intermediate(name: str, reshard: bool | None) -> None:
    check(__name__, "CACHED", name, reshard_after_forward=reshard)


@pytest.mark.parametrize("reshard", [True, None])
@pytest.mark.parametrize("place", ["object", "elsewhere"])
def test_autograd_refuses_a_loss_on_intermediates_outside_of_containers(
    place: str, reshard: bool | None
) -> None:
    """Nobody hears of that backward, which needs parameters that are freed."""
    with pytest.raises(AssertionError, match="has been modified by an inplace operation"):
        check(__name__, "CACHED", place, reshard_after_forward=reshard)


@pytest.mark.parametrize(("ranks", "reshard"), [(2, False), (1, True), (1, None)])
@pytest.mark.parametrize("name", ["elsewhere", "elsewhere, output"])
def test_loss_on_an_intermediate_kept_elsewhere_while_parameters_stay(
    name: str, ranks: int, reshard: bool | None
) -> None:
    check(__name__, "CACHED", name, world_size=ranks, reshard_after_forward=reshard)


# Gradients of gradients, and transforms -----------------------------------------------------------


def slope_of(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, [x], create_graph=True)[0]


def penalty(model: Any, x: torch.Tensor, _: int = 0) -> torch.Tensor:
    """A gradient penalty, as of a critic: the norm of the gradient of the input."""
    output = model(x.requires_grad_())
    return output.sum() + (slope_of(sq(output), x).norm(dim=1) - 1).square().sum()


def penalty_alone(model: Any, x: torch.Tensor, _: int = 0) -> torch.Tensor:
    return sq(slope_of(model(x.requires_grad_()).tanh().sum(), x))


def penalty_by_part(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    """The gradient with respect to part of the input, changed in place before it is used."""
    part = slope_of(model(x.requires_grad_()).tanh().sum(), x)[:, 1:]
    part.mul_(2)
    return (part**3).sum()


def third_order(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    first = slope_of(model(x.requires_grad_()).tanh().sum(), x)
    return sq(slope_of(sq(first), x))


def two_forwards(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    return penalty(model, x) + penalty_alone(model, x.detach() * 2)


def energy_loss(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    energy, forces = model(x)
    return energy + sq(forces)


def sensitive(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Add how the output changes with its input, by a transform inside forward."""
    return x + vmap(grad(lambda row: (torch.tanh(model.inner(row)) * model.scale).sum()))(x)


def around_sensitive() -> nn.Module:
    block = Parts(sensitive, inner=linear(), scale=weight(W))
    return Parts(lambda m, x: m.block(m.first(x)), first=linear(), block=block)


EXACT = {"tolerance": 4e-6}
DIFFERENTIATED: Cases = {
    loss.__name__: Case(Net, loss, {**NET, **EXACT})
    for loss in (penalty, penalty_alone, penalty_by_part, third_order, two_forwards)
} | {
    "forces inside forward": Case(
        with_forces, energy_loss,
        {"shard": shard_energy, **EXACT, "program": ["evaluate", "backward", "step", "backward"]},
    ),
    "vmap": Case(Net, lambda m, x, _: sq(vmap(m)(x.unsqueeze(1))), {**NET, **EXACT}),
    "a transform inside forward": Case(around_sensitive, options=EXACT),
    "a transform of a group": Case(around_sensitive, options={"shard": shard_all, **EXACT}),
}  # fmt: skip


@RESHARD
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradient_penalties_are_exact(name: str, ranks: int, reshard: bool | None) -> None:
    check(__name__, "DIFFERENTIATED", name, world_size=ranks, reshard_after_forward=reshard)


# What goes in -------------------------------------------------------------------------------------


class Record(NamedTuple):
    value: torch.Tensor
    rest: Any = None


def take(block: Any, x: Any = None, *, ids: Any = None, nested: Any = None) -> torch.Tensor:
    total = block.scale.square()
    x = x.value if isinstance(x, Record) else x
    total = total if x is None else total * x
    total = total if ids is None else total + block.rows[ids]
    return total if nested is None else total + sum(nested["terms"]) * block.scale


def taking() -> nn.Module:
    block = Parts(take, rows=weight(4, W), scale=weight(W))
    return Parts(lambda m, *args, **kw: m.block(*args, **kw) * m.scale, block=block,
                 scale=weight(W))  # fmt: skip


def nested_leaves(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    y = x.clone().requires_grad_()
    loss = sq(model(Record(x.requires_grad_()), nested={"terms": [y, x, y]}))
    return loss + sum(grad.sum() for grad in torch.autograd.grad(loss, [x, y], retain_graph=True))


def one_input_twice(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    doubled = x.requires_grad_() * 2
    return sq(model(doubled, nested={"terms": [doubled]}) + doubled)


def generate(block: Any, rows: int = 5, *, factor: float = 1.0) -> torch.Tensor:
    return torch.tanh(block.table[:rows]) * block.scale * factor


def generated() -> nn.Module:
    source, twice = (Parts(generate, table=weight(5, W), scale=weight(W)) for _ in range(2))

    def run(model: Any, rows: int) -> torch.Tensor:
        prompt = model.source(rows) + model.twice(factor=2.0)[:rows] * model.twice()[:rows]
        return model.head(prompt)

    return Parts(run, source=source, twice=twice, head=linear(W, 3))


def given_elsewhere() -> nn.Module:
    """Read a frozen weight behind the last gradient of a block, on the way to its input."""
    frozen = weight(W, W).requires_grad_(False)
    block = Parts(lambda m: m.given[0] @ m.frozen + m.bias, frozen=frozen, bias=weight(W), given=[])

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.block.given[:] = [model.first(x)]
        return model.head(model.block())

    return Parts(run, first=linear(), block=block, head=linear(W, 3))


INPUTS: Cases = {
    "not as arguments": Case(given_elsewhere),
    "none": Case(taking, lambda m, *_: sq(m())),
    "by name": Case(taking, lambda m, x, _: sq(m(x=x, nested={"terms": [x, x * 2]}))),
    "integers alone": Case(taking, lambda m, *_: sq(m(ids=torch.arange(3)))),
    "a leaf": Case(taking, after_a_gradient_of_the_input),
    "nested leaves": Case(taking, nested_leaves, SUMMED),
    "one twice": Case(taking, one_input_twice, {"tolerance": 2e-6}),
    "no tensors": Case(generated, lambda m, _, rank: sq(m(2 + rank))),
}


@RESHARD
@pytest.mark.parametrize("name", INPUTS)
def test_any_inputs_give_the_gradients_of_the_oracle(
    name: str, ranks: int, reshard: bool | None
) -> None:
    check(__name__, "INPUTS", name, world_size=ranks, reshard_after_forward=reshard)


# What comes out -----------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "part": lambda x: x[:, 1:5],
    "view of view": lambda x: x.view(-1)[2:].view(-1, 2)[1:],
    "transposed": lambda x: x.t().unsqueeze(0),
}


def multiply_part(x: torch.Tensor) -> torch.Tensor:
    x[..., :1].mul_(3)
    return x


def set_item(x: torch.Tensor) -> torch.Tensor:
    x[0] = 2.0
    return x


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x.add_(1),
    "multiply part": multiply_part,
    "negate twice": lambda x: x.neg_().add_(1).neg_(),
    "set item": set_item,
}


def changed_view(view: str, change: str) -> nn.Module:
    block = Parts(
        lambda m, x: VIEWS[view](torch.tanh(m.inner(x)) * m.scale), inner=linear(4, 6),
        scale=weight(6),
    )  # fmt: skip
    return Parts(lambda m, x: CHANGES[change](m.block(x)), block=block)


IN_PLACE: Cases = {
    f"{change} of {view}": Case(
        partial(changed_view, view, change),
        lambda m, x, _, change=change: sq(CHANGES[change](m(x))),  # and on the output of the root
    )
    for view in VIEWS
    for change in CHANGES
}


@pytest.mark.brief(5)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("view", VIEWS)
def test_in_place_on_a_view_output(view: str, change: str, reshard: bool) -> None:
    check(__name__, "IN_PLACE", f"{change} of {view}", reshard_after_forward=reshard)


def prompts() -> nn.Module:
    """Give out a parameter, a view of one, and what is computed."""

    def give(block: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": block.layer(x), "first": block.prompt[:2], "scale": block.scale}

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        found = model.prompts(x)
        out = model.head(found["out"]) + found["first"].sum() * found["scale"]
        return sq(out) * found["scale"]

    scale = nn.Parameter(torch.tensor(2.5))
    block = Parts(give, layer=linear(), prompt=weight(3, W), scale=scale)
    return Parts(run, prompts=block, head=linear())


def probe(model: Any, x: torch.Tensor) -> torch.Tensor:
    probed = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model.layer(probed).sum(), probed)
    return model.head(model.layer(model.layer(x)) * slope)


def equilibrium(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A fixed point of a layer, whose gradient a hook solves for by other gradients of it."""
    with torch.no_grad():
        fixed = x
        for _ in range(3):
            fixed = 0.3 * model.layer(fixed) + x
    fixed = 0.3 * model.layer(fixed) + x
    start = fixed.detach().requires_grad_()
    again = 0.3 * model.layer(start)

    def solve(grad: torch.Tensor) -> torch.Tensor:
        solved = grad
        for _ in range(3):
            (through,) = torch.autograd.grad(again, start, solved, retain_graph=True)
            solved = through + grad
        return solved

    fixed.register_hook(solve)
    return model.head(fixed)


def layered(run: Callable[..., torch.Tensor], is_frozen: bool) -> nn.Module:
    layer = nn.Sequential(linear(), nn.Tanh(), linear()).requires_grad_(not is_frozen)
    return Parts(run, layer=layer, head=linear(W, 2))


def with_input_gradient(model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    return sq(model(x.requires_grad_()))


OUTPUTS: Cases = {
    "parameters": Case(
        prompts, lambda m, x, _: m(x), {"program": ["evaluate", "backward", "step", "evaluate"]}
    ),
    "a view of the only parameter": Case(
        lambda: Parts(lambda m, length: m.table[:length], table=weight(8, W)),
        lambda m, *_: sq(m(5)),
    ),
} | {
    f"{run.__name__}{', frozen' * is_frozen}": Case(
        partial(layered, run, bool(is_frozen)), loss, EXACT
    )
    for run, loss in ((probe, after_a_gradient_of_the_input), (equilibrium, with_input_gradient))
    for is_frozen in (0, 1)
}


@RESHARD
@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "equilibrium"])
def test_any_outputs_give_the_gradients_of_the_oracle(
    name: str, ranks: int, reshard: bool | None
) -> None:
    check(__name__, "OUTPUTS", name, world_size=ranks, reshard_after_forward=reshard)


@RESHARD
def test_gradients_of_another_graph_of_a_complete_group_are_refused(
    ranks: int, reshard: bool | None
) -> None:
    text = (
        "Expected all gradients of group 'layer' before its reduction, got a later gradient from "
        "a backward inside this one; run one backward after the other"
    )
    with pytest.raises(AssertionError, match=text):
        check(__name__, "OUTPUTS", "equilibrium", world_size=ranks, reshard_after_forward=reshard)


# Activation checkpoints ---------------------------------------------------------------------------


def saves_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def saves_what_is_costly(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_cheap = torch.Tag.pointwise in op.tags
    return CheckpointPolicy.PREFER_RECOMPUTE if is_cheap else CheckpointPolicy.MUST_SAVE


def selective(policy: Any) -> nn.Module:
    contexts = partial(create_selective_checkpoint_contexts, policy)

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x

    layers = [
        nn.Sequential(linear(W, 5), nn.LayerNorm(5), nn.GELU(), linear(5, W)) for _ in range(2)
    ]
    return Parts(run, layers=nn.ModuleList(layers))


def recomputed(use_reentrant: bool, is_nested: bool) -> nn.Module:
    """Blocks that recompute what is between their own parameters, recomputed once more if asked."""

    def inner(block: Any, x: torch.Tensor) -> torch.Tensor:
        def compute(x: torch.Tensor) -> torch.Tensor:
            return x + block.down(torch.tanh(block.up(x))) * block.scale

        return checkpoint(compute, x, use_reentrant=use_reentrant)

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * model.first
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant) if is_nested else block(x)
        return model.head(x)

    blocks = [Parts(inner, up=linear(W, 7), down=linear(7, W), scale=weight(W)) for _ in range(3)]
    return Parts(run, first=weight(W), blocks=nn.ModuleList(blocks), head=linear())


def computed_twice(outer: bool, inner: bool) -> nn.Module:
    """Layers that are computed twice in checkpoints within a checkpoint, and that twice."""

    def layers(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in [*model.layers, *model.layers]:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=inner))
        return x

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(layers, model, x * model.first, use_reentrant=outer)
        return checkpoint(layers, model, x, use_reentrant=outer)

    return Parts(run, first=weight(W), layers=nn.ModuleList([linear(), linear()]))


def shard_some(model: Any, **options: Any) -> nn.Module:
    layers = model.blocks[0].up, model.blocks[0].down, model.blocks[1], model.blocks[2].up
    for module in layers:
        fully_shard(module, **options)
    return fully_shard(model, **options)


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CHECKPOINTS: Cases = {
    f"{name}{', several' * (loss is several)}": Case(build, loss, {**SUMMED, **options})
    for loss in (with_input_gradient, several)
    for name, build, options in [
        ("around", Checkpointed, NET),
        ("around, reentrant", Reentrant, NET),
        ("inside", partial(recomputed, False, False), {}),
        ("inside, reentrant", partial(recomputed, True, False), {}),
        ("nested", partial(recomputed, False, True), {"shard": shard_some}),
        ("nested, reentrant", partial(recomputed, True, True), {"shard": shard_some}),
        ("of the root alone", partial(recomputed, True, True), {"shard": fully_shard}),
        *(
            (f"twice, {kinds}", partial(computed_twice, *kinds), {"shard": shard_all})
            for kinds in product([False, True], repeat=2)
        ),
        ("saving all", partial(selective, saves_all), {}),
        ("saving what is costly", partial(selective, saves_what_is_costly), {}),
    ]
} | {
    "around, bf16": Case(Checkpointed, options={**NET, "policy": LOW}),
    "around, reentrant, bf16": Case(Reentrant, options={**NET, "policy": LOW}),
}


@RESHARD
@pytest.mark.brief(12)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_changes_no_number(name: str, ranks: int, reshard: bool | None) -> None:
    check(__name__, "CHECKPOINTS", name, world_size=ranks, reshard_after_forward=reshard)
