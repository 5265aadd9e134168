"""A forward that writes unsharded parameters in place is refused: what it writes would be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import full
from on_ranks import on_ranks
from torch import nn

from composable_shard import ShardError, fully_shard

TOKENS = torch.arange(8)


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
        f"Expected a forward that does not write the parameters of {label}, got in-place "
        f"writes to '{name}', lost when the parameters are freed; write the sharded ones between "
        "iterations, in torch.no_grad(); nn.Embedding: leave out max_norm"
    )


APART = pytest.mark.parametrize(
    ("is_apart", "label", "name"),
    [(True, "group 'embed'", "weight"), (False, "the root group", "embed.weight")],
    ids=["own-group", "root"],
)


@APART
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["freed", "kept"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@on_ranks(2)
def test_an_embedding_with_max_norm_is_refused_on_all_ranks(
    is_apart: bool, label: str, name: str, options: dict[str, Any], grad: bool
) -> None:
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
    assert is_same and torch.equal(full(model.embed.weight), plain.embed.weight)
    assert found == [text(label, name)] * 2
