"""A forward that writes unsharded parameters in place is refused: what it writes would be lost."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.breaking import mesh_over
from nets import full
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_shard import CommunicationError, MixedPrecisionPolicy, ShardError, fully_shard
from composable_shard.testing import fake_ranks, run_ranks

TOKENS = torch.arange(8)
SOON = 40  # seconds of the call, in which all must have raised; a few as a rule


class Model(nn.Module):
    """An embedding that renormalizes what is looked up, in the group of the model or in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, max_norm=0.5)
        self.out = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.embed(tokens))
        return result


def made(is_apart: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    if is_apart:
        fully_shard(model.embed, **options)
    return fully_shard(model, **options)


def text(label: str, name: str) -> str:
    return (
        f"Expected a forward that does not write the parameters of {label}, got '{name}' written "
        "in place, which is lost when they are freed; write the sharded parameters under "
        "torch.no_grad(), before forward or after the optimizer's step (for nn.Embedding, instead "
        "of max_norm)"
    )


APART = pytest.mark.parametrize(
    ("is_apart", "label", "name"),
    [(True, "group 'embed'", "weight"), (False, "the root group", "embed.weight")],
    ids=["own-group", "root"],
)


def raised_twice(is_apart: bool, options: dict[str, Any], grad: bool) -> tuple[list[str], bool]:
    model = made(is_apart, **options)
    found = []
    for _ in range(2):
        with pytest.raises(ShardError) as caught, torch.set_grad_enabled(grad):
            model(TOKENS)
        found.append(str(caught.value))
    model.embed.max_norm = None  # what has failed leaves nothing behind
    model(TOKENS).sum().backward()
    torch.manual_seed(0)
    plain = Model()
    plain.embed.max_norm = None
    plain(TOKENS).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    is_same = all(torch.allclose(full(a.grad), b.grad) for a, b in pairs)
    return found, is_same and bool(torch.equal(full(model.embed.weight), plain.embed.weight))


@APART
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["freed", "kept"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_an_embedding_with_max_norm_is_refused_on_all_ranks(
    is_apart: bool, label: str, name: str, options: dict[str, Any], grad: bool
) -> None:
    expected = [text(label, name)] * 2, True
    assert run_ranks(raised_twice, 2, is_apart, options, grad) == [expected] * 2


@APART
def test_on_one_rank_with_a_cast_it_is_refused(is_apart: bool, label: str, name: str) -> None:
    with fake_ranks(1):
        model = made(is_apart, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        with pytest.raises(ShardError) as caught:
            model(TOKENS)
        assert str(caught.value) == text(label, name)


@pytest.mark.parametrize("is_apart", [True, False])
def test_on_one_rank_without_a_cast_it_is_kept(is_apart: bool) -> None:
    with fake_ranks(1):
        model = made(is_apart)
        torch.manual_seed(0)
        plain = Model()
        for either in (model, plain):
            either(TOKENS).square().sum().backward()
        assert torch.equal(model.embed.weight.to_local(), plain.embed.weight)
        assert float(plain.embed.weight.detach().norm(dim=1).max()) < 0.51
        assert torch.equal(model.embed.weight.grad.to_local(), plain.embed.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_within_an_activation_checkpoint(use_reentrant: bool) -> None:
    with fake_ranks(2):
        model = made(True)
        with pytest.raises(ShardError, match="written in place"):
            checkpoint(model.embed, TOKENS, use_reentrant=use_reentrant)


def test_writes_between_forwards_of_what_was_unsharded_by_hand_are_left_alone() -> None:
    with fake_ranks(2):
        model = made(True)
        model.embed.max_norm = None
        for _ in range(2):
            model.embed.unshard()
            with torch.no_grad():
                model.embed.weight.fill_(2)
            assert model.embed(TOKENS).eq(2).all()
            model.embed.reshard()


class Clamps(nn.Linear):
    """Clamps its weight in a forward, if its input is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.max()) > 5:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def on_one_rank() -> str:
    """Only the second rank's batch makes it write, in the third step."""
    mesh = mesh_over(dist.new_group(timeout=datetime.timedelta(seconds=100)))
    model = nn.Sequential(nn.Linear(4, 4), Clamps(4, 4), nn.Linear(4, 4))
    nn.init.eye_(model[0].weight)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        for step in range(4):
            x = torch.zeros(2, 4)
            if step == 2 and dist.get_rank() == 1:
                x += 9
            model(x).sum().backward()
    except CommunicationError as error:
        return f"told: {error}"
    except ShardError as error:
        return str(error)
    return "nothing was raised"


def test_where_one_rank_writes_the_others_are_told() -> None:
    told, own = run_ranks(on_one_rank, 2, timeout=SOON)
    assert own == text("group '1'", "weight")
    assert told.startswith("told: Rank 0 failed while ")
    assert "rank 1 failed while running forward of group '1': ShardError: Expected a" in told
