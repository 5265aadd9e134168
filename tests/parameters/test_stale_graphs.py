"""Backward through a graph whose weights have changed, whatever ran in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from faults.breaking import failures
from nets import Net, shard_net
from on_ranks import on_ranks
from torch import nn
from training.trees import inputs_for

from composable_shard import fully_shard

REFUSED = "modified by an inplace operation"  # by autograd


class Trained:
    """A model with an optimizer, sharded or not, that has gradients."""

    def __init__(self, *, is_sharded: bool, reshard: bool | int | None = None) -> None:
        torch.manual_seed(5)
        self.model = Net(3)
        if is_sharded:
            shard_net(self.model, reshard_after_forward=reshard)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.loss(0).backward()

    def loss(self, place: int, rank: int | None = None) -> torch.Tensor:
        x = inputs_for(place, dist.get_rank() if rank is None else rank)
        return self.model(x[:, :4]).square().mean()


def by_a_kept_graph(one: Trained) -> None:
    loss = one.loss(1)
    loss.backward(retain_graph=True)
    one.optimizer.step()
    loss.backward()


def after_another_backward(one: Trained) -> None:
    loss = one.loss(1)
    one.loss(2).backward()
    one.optimizer.step()
    loss.backward()


def after_another_forward(one: Trained) -> None:
    loss = one.loss(1)
    one.optimizer.step()
    one.loss(2)
    loss.backward()


def together_with_a_newer_one(one: Trained) -> None:
    loss = one.loss(1)
    one.optimizer.step()
    (loss + one.loss(2)).backward()


def after_a_failed_forward(one: Trained) -> None:
    loss = one.loss(1)
    one.optimizer.step()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = one.model.out.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        one.loss(2)
    handle.remove()
    loss.backward()


def a_step_late(one: Trained) -> None:
    loss = one.loss(1)
    for place in (2, 3):
        new = one.loss(place)
        loss.backward()
        one.optimizer.step()
        loss = new
    loss.backward()


WAYS = [
    by_a_kept_graph,
    after_another_backward,
    after_another_forward,
    together_with_a_newer_one,
    after_a_failed_forward,
    a_step_late,
]


@pytest.mark.parametrize(
    ("ranks", "reshard"), [(1, None), (2, None), (2, False), (3, True), (4, 2)]
)
@pytest.mark.parametrize("way", WAYS)
@on_ranks("ranks", timeout=30)
def test_a_stale_graph_is_refused_on_all_ranks(
    way: Callable[[Trained], None], reshard: bool | int | None
) -> None:
    """And training goes on as without it."""
    one = Trained(is_sharded=True, reshard=reshard)
    with pytest.raises(RuntimeError, match=REFUSED) as caught:
        way(one)
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1
    plain = Trained(is_sharded=False)
    with pytest.raises(RuntimeError, match=REFUSED):
        way(plain)
    full = {key: value.full_tensor() for key, value in one.model.state_dict().items()}
    plain.model.load_state_dict(full)
    one.optimizer.zero_grad()
    one.loss(4).backward()
    grads = [param.grad.full_tensor() for param in one.model.parameters()]
    means = []
    for rank in range(dist.get_world_size()):
        plain.optimizer.zero_grad()
        plain.loss(4, rank).backward()
        means.append([param.grad for param in plain.model.parameters()])
    for grad, *theirs in zip(grads, *means, strict=True):
        torch.testing.assert_close(grad, torch.stack(theirs).mean(0))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def reaching_less() -> None:
    """The loss of rank 0 reaches a stale branch; that of rank 1 does not."""
    model = Branches()
    for module in (model.left, model.right, model):
        fully_shard(module)
    weight = model.right.weight
    left, right = model(torch.ones(2, 4, requires_grad=True))
    with torch.no_grad():
        weight.add_(1)
    (left + right if dist.get_rank() == 0 else left).sum().backward()


def reaching_newer() -> None:
    """The loss of rank 0 is made of a stale graph, too; that of rank 1 of a fresh one alone."""
    one = Trained(is_sharded=True)
    stale = one.loss(1)
    one.optimizer.step()
    fresh = one.loss(2)
    (stale + fresh if dist.get_rank() == 0 else fresh).backward()


@pytest.mark.parametrize("reach", [reaching_less, reaching_newer])
def test_a_rank_whose_loss_reaches_less_hears_of_a_stale_graph(reach: Callable[[], None]) -> None:
    said = failures(reach, 2, apart=False)
    assert said[0].startswith("RuntimeError: ")
    assert REFUSED in said[0]
    assert said[1].startswith("CommunicationError: Rank 1 failed while ")
    assert "rank 0 failed while running backward of the root group" in said[1]
