"""What replaces a sharded parameter and is no shard of it is refused by name, on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from near import sharing
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from composable_shard import ShardError, fully_shard

__all__ = ["sharing"]

WHERE = "Expected the parameters of group '0' as fully_shard made them, got "
REMEDY = "; change values by load_state_dict or in place"


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))


def shard_layers(model: nn.Sequential) -> nn.Sequential:
    fully_shard(model[0])
    return fully_shard(model)


def run(model: nn.Module) -> torch.Tensor:
    return model(torch.tensor([0, 4, 1 + dist.get_rank()])).square().sum()


def like(model: nn.Sequential, shape: tuple[int, ...], *placements: Placement) -> nn.Parameter:
    mesh = model[0].weight.device_mesh
    return nn.Parameter(distribute_tensor(torch.ones(shape), mesh, placements or [Shard(0)]))


def of_another_mesh(model: nn.Sequential) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("others",))
    return nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)]))


@pytest.mark.parametrize(("used", "reshard"), [(False, None), (True, True), (True, False)])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_new_data_of_a_sharded_parameter_is_refused(used: bool, reshard: bool | None) -> None:
    """Set ``.data`` of a sharded parameter, as SAM and averages of weights are often written."""
    model = fully_shard(make()[1], reshard_after_forward=reshard)
    x = torch.ones(2, 4)
    if used:
        model(x).sum().backward()
    model.weight.data = model.weight.data
    model(x).sum().backward()
    model.weight.data = model.weight.data + 1
    assert message(lambda: model(x)) == (
        "Expected the parameters of the root group as fully_shard made them, got a new .data, "
        f"which DTensor ignores, for 'weight'{REMEDY}"
    )


OF_SHAPE = "shape [{}, 4] for 'weight', which has shape [5, 4]"
PLACED = "placements ({},) for 'weight', which has placements (Shard(dim=0),)"
MISFITS: dict[str, tuple[Callable[[nn.Sequential], nn.Parameter], str]] = {
    "fewer rows": (lambda model: like(model, (2, 4)), OF_SHAPE.format(2)),
    "one more row": (lambda model: like(model, (6, 4)), OF_SHAPE.format(6)),
    "columns": (lambda model: like(model, (5, 4), Shard(1)), PLACED.format("Shard(dim=1)")),
    "replicated": (lambda model: like(model, (5, 4), Replicate()), PLACED.format("Replicate()")),
    "mesh": (of_another_mesh, "mesh "),
}


def message(call: Callable[[], object]) -> str:
    with pytest.raises(ShardError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("call", ["forward", "unshard", "functional_call"])
@on_ranks("num_ranks")
def test_a_dtensor_of_another_kind(name: str, is_warm: bool, call: str) -> None:
    model, oracle = shard_layers(make()), make()
    if is_warm:
        run(model).backward()
        model.zero_grad()
    own, other = model[0].weight, MISFITS[name][0](model)
    if call == "functional_call":
        with torch.no_grad():
            params = {"0.weight": other}
            text = message(lambda: functional_call(model, params, (torch.tensor([0]),)))
    else:
        model[0].weight = other
        text = message(model[0].unshard if call == "unshard" else lambda: run(model))
        model[0].weight = own
    expected = WHERE + MISFITS[name][1]
    is_mesh = name == "mesh" and text.startswith(expected) and text.endswith(REMEDY)
    assert is_mesh or text == expected + REMEDY
    trains_on(model, oracle)


def trains_on(model: nn.Sequential, oracle: nn.Sequential) -> None:
    """Check that one that has its own parameters again computes what it did."""
    run(model).backward()
    run(oracle).backward()
    model.reshard()
    for got, want in zip(model.parameters(), oracle.parameters(), strict=True):
        assert want.grad is not None and got.grad is not None
        dist.all_reduce(want.grad)
        mean = want.grad / dist.get_world_size()
        torch.testing.assert_close(full(got.grad), mean)


# Parameters that are gone -------------------------------------------------------------------------

GONE = (
    "Expected the parameters of group '1' as fully_shard made them, got no tensor for 'bias'; "
    "change values by load_state_dict or in place"
)


TAKE: dict[str, Callable[[nn.Linear], object]] = {
    "set to None": lambda layer: setattr(layer, "bias", None),
    "deleted": lambda layer: delattr(layer, "bias"),
    "registered None": lambda layer: layer.register_parameter("bias", None),
}


@pytest.mark.parametrize("take", TAKE)
@pytest.mark.parametrize(
    "when", ["at first", "later", "while it is kept", "while it is held", "by hand"]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_a_parameter_that_was_taken_out(take: str, when: str) -> None:
    model, oracle = make(), make()
    fully_shard(model[1], reshard_after_forward=when != "while it is kept")
    shard_layers(model)
    if when != "at first":
        run(model).backward()
        model.zero_grad()
    if when == "while it is kept":
        run(model)
    elif when == "while it is held":
        model[1].unshard()
    own = model[1].bias
    TAKE[take](model[1])
    assert message(model[1].unshard if when == "by hand" else lambda: run(model)) == GONE
    model[1].bias = own
    model[1].reshard()
    trains_on(model, oracle)
