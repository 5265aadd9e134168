"""What a training loop may do to gradients, followed by a sharded model and the oracle."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from composable_shard import FSDPModule, MixedPrecisionPolicy
from composable_shard.testing import ParamSpec, Tree, TreeSpec, run_ranks
from composable_shard.testing.strategies import num_ranks, uses
from training.compare import Comparison
from training.oracle import Unsharded
from training.trees import build, group_names, inputs_for, shard

TREE = TreeSpec(
    (ParamSpec((3,)),),
    (
        TreeSpec((ParamSpec((5, 2)), ParamSpec((257, 193)))),
        TreeSpec((ParamSpec((3, 5), dim=1), ParamSpec((4,), trainable=False), ParamSpec((6,)))),
    ),
)
NUM_PARAMS = TREE.num_params
STEPS = ("sync", "no_sync", "zero_grad", "step", "reset", "eval")
Used = tuple[bool, ...]


@dataclass(frozen=True)
class Program:
    """What to do, and which parameters each forward uses.

    Attributes:
        steps: What to do.
        used: For each step, for each rank, which parameters are used (the first one always is).
        reshard_after_forward: As for ``fully_shard``.
        reshard_after_backward: As for ``set_reshard_after_backward``.
        skips_unused: Whether groups of which nothing is used do not run at all.
        policy: As for ``fully_shard``.
    """

    steps: tuple[str, ...]
    used: tuple[tuple[Used, ...], ...] = ()
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    skips_unused: bool = False
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)

    def used_at(self, step: int, rank: int) -> Used | None:
        return (True, *self.used[step][rank][1:]) if self.used else None


Policies = st.SearchStrategy[MixedPrecisionPolicy]
PLAIN: Policies = st.just(MixedPrecisionPolicy())


@st.composite
def programs(draw: st.DrawFn, max_steps: int, policies: Policies = PLAIN) -> tuple[Program, int]:
    """Programs in which all ranks use the same parameters, and how many ranks."""
    ranks = draw(num_ranks())
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=max_steps))
    used = tuple((of_step,) * ranks for of_step in draw(uses(len(steps), NUM_PARAMS)))
    reshards, flag = draw(st.sampled_from([None, True, False])), st.booleans()
    return Program(tuple(steps), used, reshards, draw(flag), draw(flag), draw(policies)), ranks


@st.composite
def programs_of_differing_ranks(
    draw: st.DrawFn, max_steps: int, policies: Policies = PLAIN
) -> tuple[Program, int]:
    """Programs in which each rank uses parameters of its own choice, and how many ranks."""
    ranks = draw(st.integers(2, 4))
    # Unreduced gradients are a matter of each rank, so neither a step nor a reset is theirs alone.
    alike = st.sampled_from([step for step in STEPS if step not in ("step", "reset")])
    steps = draw(st.lists(alike, min_size=1, max_size=max_steps))
    used = tuple(draw(uses(ranks, NUM_PARAMS)) for _ in steps)
    reshards = draw(st.sampled_from([None, True, False]))
    return Program(tuple(steps), used, reshards, policy=draw(policies)), ranks


def follow(program: Program) -> list[str]:
    """Follow the program with both models on this rank; return what differs."""
    model = build(TREE)
    for module in model.modules():
        if isinstance(module, Tree):
            module.skips_unused = program.skips_unused
    policy = program.policy
    oracle = Unsharded(model, policy, group_names(TREE))
    shard(model, TREE, reshard_after_forward=program.reshard_after_forward, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(program.reshard_after_backward)
    # Sums in float16 are divided in two parts, which rounds otherwise than one division.
    exact = dist.get_world_size() <= 2 and policy.reduction_dtype(torch.float32) != torch.float16
    comparison = Comparison(model, oracle, exact)
    # A gradient that would lose bits in the next reduction is accumulated on all ranks alike.
    placements = policy.reduction_dtype(torch.float32) == (policy.grad_dtype or torch.float32)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    for place, step in enumerate(program.steps):
        x = inputs_for(place, dist.get_rank())
        used = program.used_at(place, dist.get_rank())
        if step in ("sync", "no_sync"):
            with contextlib.nullcontext() if step == "sync" else model.no_sync():
                losses = [m(x, used).square().mean() for m in (model, oracle)]
                for loss in losses:
                    loss.backward()
            oracle.after_backward(sync=step == "sync")
            comparison.tensor(f"step {place}: loss", *losses)
        elif step == "zero_grad":
            (model if place % 2 else optimizers[0]).zero_grad()
            oracle.clear()
        elif step == "step" and oracle.waits_somewhere and dist.get_world_size() == 4:
            continue  # DTensor does not reduce a sum of 3 rows to 4 ranks' shards
        elif step == "step":
            comparison.exact &= not oracle.has_folded
            optimizers[0].step()
            oracle.step(optimizers[1])
        elif step == "reset" and oracle.waits_somewhere and not placements:
            continue  # drops what was reduced, of all parameters, whether or not they were used
        elif step == "reset":
            model.reset_iter_state()
            oracle.drop_unreduced()
        elif step == "eval":
            with torch.no_grad():
                comparison.tensor(f"step {place}: output", model(x, used), oracle(x, used))
        comparison.grads(f"step {place} ({step})", placements)
        comparison.params(f"step {place} ({step})")
    return comparison.differences


def assert_same(program: Program, ranks: int) -> None:
    differences = run_ranks(follow, ranks, program, timeout=20)
    assert differences == [[]] * ranks, differences
