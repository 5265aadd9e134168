"""Training programs on a simulated device: numbers as without, and nothing in a wrong order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from support.simulated_device import on_simulated_device
from training.cases import Case, cases, reproducible

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy
from composable_shard.testing import run_ranks
from composable_shard.testing.strategies import policies
from streams.models import PROGRAMS


@reproducible(12)
@given(cases(), policies(any_inputs=True))
def test_any_tree_follows_any_program_under_any_policy(
    case: Case, policy: MixedPrecisionPolicy
) -> None:
    case.check(within=on_simulated_device, policy=policy, timeout=60)


@reproducible(8)
@given(cases(differs=True))
def test_any_tree_of_which_ranks_use_different_parameters_follows_any_program(case: Case) -> None:
    case.check(within=on_simulated_device, timeout=60)


@reproducible(8)
@given(cases())
def test_any_offloaded_tree_follows_any_program(case: Case) -> None:
    case.check(within=on_simulated_device, offload_policy=CPUOffloadPolicy(), timeout=60)


def train_twice(program: str) -> tuple[list[str], list[bool]]:
    faults, there = PROGRAMS[program].run()
    _, here = PROGRAMS[program].run(simulated=False)
    pairs = zip(there, here, strict=True)
    return faults, [torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs]


# Those that give work to streams cannot be trained without a device.
@pytest.mark.brief(11)
@pytest.mark.parametrize("program", [n for n, one in PROGRAMS.items() if one.is_for_any_device])
def test_training_is_that_of_the_cpu(program: str) -> None:
    num_ranks = PROGRAMS[program].replicas * PROGRAMS[program].shards
    for faults, are_same in run_ranks(train_twice, num_ranks, program, timeout=60):
        assert faults == []
        assert all(are_same) and len(are_same) >= 6
