"""Gradients of gradients into parameters are refused; `test_models.py` has those of inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import Net, assert_parity, own_input, shard_net, train_step
from on_ranks import on_ranks

from composable_shard import ShardError
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks, run_ranks
from training.models import W, shard_energy, sq, with_forces

CREATE_GRAPH = (
    "Expected a backward into the parameters of the root group without create_graph=True, "
    "got one with it, whose graph ends where gradients are reduced; take gradients of inputs by "
    "torch.autograd.grad(loss, inputs, create_graph=True)"
)


def refused(reshard: bool | None) -> list[str]:
    reference = Net(2)
    model = shard_net(copy.deepcopy(reference), reshard_after_forward=reshard)
    texts = []
    for step in range(4):
        if step in (0, 2):
            loss = model(own_input(step)).square().sum()
            with pytest.raises(ShardError) as caught:
                loss.backward(create_graph=True)
            texts.append(str(caught.value))
            del loss
        else:
            train_step(model, step, None)
            train_step(reference, step, None)
            assert_parity(model, reference)
            model.zero_grad()
            reference.zero_grad()
    return texts


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("reshard", [True, False, None])
def test_create_graph_into_parameters_is_refused(reshard: bool | None) -> None:
    assert run_ranks(refused, 2, reshard) == [[CREATE_GRAPH] * 2] * 2


@on_ranks(2)
def test_create_graph_of_a_frozen_model_works() -> None:
    model = shard_net(Net(2).requires_grad_(False))
    x = own_input().requires_grad_()
    model(x).square().sum().backward(create_graph=True)
    assert x.grad is not None and x.grad.requires_grad
    x.grad.sum().backward()


def test_gradients_taken_inside_forward_are_reduced_in_backward() -> None:
    with fake_ranks(2):
        model = shard_energy(with_forces())
        for _ in range(3):
            with record_events(model, "reduce_scatter") as events:
                energy, forces = model(torch.ones(3, W))
                assert events == []
                (energy + sq(forces)).backward()
            assert len(events) == 3
