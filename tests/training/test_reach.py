"""Ranks whose losses reach other parts of a model, and parts that are frozen or recomputed.

The cases are those of the fuzzer, by hand: the oracle has the batches of all ranks, and a rank that
does not reach a parameter counts as zeros.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fuzz.compare import run
from fuzz.model import Block, Call
from fuzz.program import Case, Op, shown
from nets import average_gradients, full, own_input
from on_ranks import on_ranks

from composable_shard import fully_shard
from training.models import Parts, linear, sq

WORDS = {"o": Op("step"), "s": Op("sync")}


def check(
    blocks: tuple[Block, ...],
    program: str,
    off: tuple[str, ...] = ("",),
    *,
    mesh: tuple[int, ...] = (2,),
    unused: tuple[str, ...] = ("",),
    orders: tuple[str, ...] = ("",),
    is_bare: bool = False,
    **options: Any,
) -> None:
    """Train with a loss that goes past parts of a model, those between a first layer and a last.

    In the program, ``t`` trains and reduces, ``a`` trains, ``s`` reduces, ``o`` steps. A rank
    detaches the outputs of the blocks that are ``off`` for it, and leaves out parameters that are
    ``unused``; in the next step it takes what the next rank took. In each step the first blocks run
    in one of the orders. Without the layers around them, their input needs no gradient.
    """
    num_ranks = torch.Size(mesh).numel()

    def by_rank(names: tuple[str, ...], place: int) -> tuple[frozenset[str], ...]:
        return tuple(
            frozenset(names[(place + rank) % len(names)].split()) for rank in range(num_ranks)
        )

    ops = [Op("optimize")]
    for place, word in enumerate(program):
        order = tuple(orders[place % len(orders)])
        call = Call(order, by_rank(off, place), by_rank(unused, place))
        ops.append(WORDS[word] if word in WORDS else Op("train", (call,), flag=word == "t"))
    if not is_bare:
        blocks = Block("first", join="next"), *blocks, Block("last", join="next")
    case = Case(1, blocks, tuple(ops), mesh=mesh, checks_registered=True, **options)
    find = run(case, 30.0)
    assert find is None, f"{shown(case)}\n{find.text}"


def nest(name: str, *children: Block, own: str = "", **options: Any) -> Block:
    return Block(name, "nest" + own, children=children, **options)


B = Block
APART, SAVED = {"group": "parent"}, {"recompute": "saved"}
REENTRANT = {"recompute": "reentrant"}
MODELS: dict[str, tuple[Block, ...]] = {
    "plain": (B("p"), B("q"), B("r")),
    "frozen": (B("p", frozen=True), B("q"), B("r", frozen=True)),
    "scalars": (B("p", "scalar"), B("q", "scalar"), B("r")),
    "nested": (
        nest("p", B("p1"), B("p2"), own="after"),
        B("q"),
        nest("r", nest("r1", B("r2"), own="after"), B("r3"), own="after"),
    ),
    "called twice": (B("p"), nest("q", B("q1"), B("q2"), calls=2, **APART), B("r", calls=2)),
    "recomputed": (
        nest("p", B("p1", "mlp", join="inplace"), **APART, **SAVED),
        nest("q", B("q1"), B("q2", frozen=True), B("q3"), **APART, **SAVED),
        B("r"),
    ),
    "one group around frozen": (
        nest("p", B("p1", frozen=True), own="after", group="g"),
        nest("q", B("q1"), B("q2", frozen=True), own="after", group="g"),
        B("r"),
    ),
    "one group of containers": (
        nest("p", B("p1"), group="g"),
        nest("q", B("q1"), own="after", group="g"),
        B("r"),
    ),
    "heads": (B("p", join="out"), B("q", join="out"), B("r", join="out")),
    "heads of one group": tuple(B(name, join="out", group="g") for name in "pqr"),
    "a frozen part whose input needs no gradient": (
        B("p", join="next"),
        B("q", frozen=True, join="next"),
        B("r"),
    ),
    "checkpoint in a group": (B("p", group="g", **REENTRANT), B("q", group="g"), B("r")),
    "frozen in a checkpoint": (nest("p", B("p1", frozen=True), **REENTRANT), B("q"), B("r")),
    "checkpoints twice": (
        B("p", calls=2, **REENTRANT),
        B("q", calls=2, **REENTRANT),
        B("r"),
    ),
}
PROGRAMS = ["toto", "asot", "tasaato"]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("model", MODELS)
def test_ranks_that_reach_other_parts_train_alike(model: str, program: str, ranks: int) -> None:
    check(MODELS[model], program, ("", "p q r", "q", "p r"), mesh=(ranks,))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "model",
    [
        *("one group of containers", "checkpoint in a group", "frozen in a checkpoint"),
        "checkpoints twice",
    ],
)
def test_ranks_that_go_past_one_of_two_parts_train_alike(
    model: str, program: str, ranks: int
) -> None:
    """Of the containers the input needs no gradient; reentrant checkpoints would have none then."""
    is_bare = model == "one group of containers"
    check(MODELS[model][:2], program, ("q", "", "p"), mesh=(ranks,), is_bare=is_bare)


def test_ranks_keep_parts_alike_for_a_checkpoint_whose_input_needs_no_gradient_on_some() -> None:
    blocks = B("p", group="g"), B("q", group="g", **REENTRANT)
    check(blocks, "tt", ("p", "", "", ""), mesh=(4,), reshard=2, is_bare=True, own="after")


def test_a_tensor_stored_in_a_module_that_ran_twice_reaches_both_runs() -> None:
    parts = Block("kept", "cached"), Block("detached", "detached", group="parent")
    inner = Block("inner", "nestbefore", children=parts)
    outer = Block("outer", "nestafter", join="drop", calls=2, children=(inner,))
    check((outer,), "atot", off=("", "outer kept"), is_bare=True)


def test_ranks_of_replicas_that_reach_other_scalars_train_alike() -> None:
    for program in ("tasaato", "taso"):
        check(MODELS["scalars"], program, ("", "p q r", "q", "p r"), mesh=(2, 2))


@pytest.mark.parametrize("model", ["heads", "called twice", "one group around frozen"])
def test_ranks_that_reach_other_parts_train_alike_in_low_precision(model: str) -> None:
    check(MODELS[model], "tat", ("", "p q r", "q", "p r"), precision="float32")


SEGMENTS = [
    ("3", ("p1 p2 p3", "")),
    ("3", ("p2 p3", "p1 p2", "p1 p3")),
    ("1 4 1", ("q1 q2 q3 q4", "p1 r1", "p1 q1 q2 q4 r1")),
    ("2 3", ("p1 p2", "q1 q2 q3", "p1 p2 q1 q2 q3")),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("recompute", ["saved", "reentrant"])
@pytest.mark.parametrize(("sizes", "off"), SEGMENTS)
def test_ranks_of_which_some_go_past_a_checkpoint_over_several_groups_train_alike(
    sizes: str, off: tuple[str, ...], recompute: str, ranks: int
) -> None:
    blocks = tuple(
        nest(
            name,
            *(B(f"{name}{number + 1}") for number in range(int(size))),
            recompute=recompute,
            group="parent",
        )
        for name, size in zip("pqr", sizes.split(), strict=False)
    )
    check(blocks, "totatot", off, mesh=(ranks,))


TOWERS = [
    ((*[""] * 2,), ("s", "s.1")),
    (("p q r s", "", ""), ("", "p.1 q.0 r.1 s.0", "q s r.0")),
    (("q", "r", "p q"), ("r.0 s.0 s.1", "p.0 p.1 q.0 s.1", "")),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("detached", ["s", "pqrs", "qs", ""])
@pytest.mark.parametrize(("off", "unused"), TOWERS)
def test_ranks_that_use_other_parameters_of_parts_without_an_input_gradient_train_alike(
    off: tuple[str, ...], unused: tuple[str, ...], detached: str, ranks: int
) -> None:
    """In other orders, too."""
    blocks = tuple(B(n, "many", source="detach" if n in detached else "x") for n in "pqrs")
    orders = ("pqrs", "pqrs", "srqp", "qsp", "rq")
    check(blocks, "tototatot", off, unused=unused, orders=orders, mesh=(ranks,))


# Frozen and thawed, and never used ----------------------------------------------------------------


def freeze(names: str, flag: bool = True) -> Op:
    return Op("freeze", names=tuple(names.split()), flag=not flag)


STEP = Op("train", (Call(),)), Op("step")
LATER = (
    *STEP,
    *[freeze("b", False), freeze("a"), *STEP, freeze("a b c", True)],
    *[freeze("c", False), *STEP, freeze("a b", False), *STEP, freeze("b"), *STEP],
)


@pytest.mark.parametrize("precision", ["", "bfloat16"])
@pytest.mark.parametrize("group", ["own", "parent"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_parameter_frozen_at_the_first_forward_is_thawed_later(
    ranks: int, group: str, precision: str
) -> None:
    blocks = B("a", "mlp", group=group), B("b", group=group, frozen=True), B("c", group=group)
    ops = (Op("optimize"), *LATER)
    case = Case(2, blocks, ops, own="both", mesh=(ranks,), precision=precision)
    find = run(case, 30.0)
    assert find is None, find.text


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_unused_parameters_decay_if_they_are_to_be_reduced(accumulates: bool) -> None:
    """A layer that only the first step uses, and one that none does, get gradients of zeros."""
    torch.manual_seed(0)
    plain = Parts(
        lambda m, x, step: m.used(m.once(x) if step == 0 else x), used=linear(), once=linear(),
        never=linear(),
    )  # fmt: skip
    model: Any = copy.deepcopy(plain)
    fully_shard(model.once)
    fully_shard(model).set_reduce_scatter_unused_params(True)
    optimizers = [
        torch.optim.AdamW(one.parameters(), 0.1, weight_decay=1.0) for one in (model, plain)
    ]
    for step in range(2):
        for is_last in (False, True) if accumulates else (True,):
            model.set_requires_gradient_sync(is_last)
            for one in (model, plain):
                sq(one(own_input(step), step)).backward()
        for param in plain.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        average_gradients(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name)), param, msg=name)
