"""What replaces a sharded parameter and is no shard of it is refused by name, on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from faults.breaking import BAD, WIDTH, failures, layers, step
from near import sharing
from nets import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from composable_shard import ShardError, fully_shard
from composable_shard.testing import RankError, run_ranks

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


def set_data(used: bool, reshard: bool | None) -> None:
    """Set ``.data`` of a sharded parameter, as SAM and averages of weights are often written."""
    model = fully_shard(make()[1], reshard_after_forward=reshard)
    x = torch.ones(2, 4)
    if used:
        model(x).sum().backward()
    model.weight.data = model.weight.data
    model(x).sum().backward()
    model.weight.data = model.weight.data + 1
    model(x)


@pytest.mark.parametrize(("used", "reshard"), [(False, None), (True, True), (True, False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_new_data_of_a_sharded_parameter_is_refused(
    ranks: int, used: bool, reshard: bool | None
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(set_data, ranks, used, reshard)
    assert caught.value.agreed().message == (
        "Expected the parameters of the root group as fully_shard made them, got a new .data, "
        f"which DTensor ignores, for 'weight'{REMEDY}"
    )


MISFITS: dict[str, tuple[Callable[[nn.Sequential], nn.Parameter], str]] = {
    "fewer rows": (lambda m: like(m, (2, 4)), "one of shape [2, 4] for 'weight' of shape [5, 4]"),
    "one more row": (
        lambda m: like(m, (6, 4)),
        "one of shape [6, 4] for 'weight' of shape [5, 4]",
    ),
    "columns": (
        lambda m: like(m, (5, 4), Shard(1)),
        "one of placements (Shard(dim=1),) for 'weight' of placements (Shard(dim=0),)",
    ),
    "replicated": (
        lambda m: like(m, (5, 4), Replicate()),
        "one of placements (Replicate(),) for 'weight' of placements (Shard(dim=0),)",
    ),
    "mesh": (of_another_mesh, "one of mesh "),
}


def message(call: Callable[[], object]) -> str:
    with pytest.raises(ShardError) as caught:
        call()
    return str(caught.value)


def refused(name: str, is_warm: bool, call: str) -> str:
    model, oracle = shard_layers(make()), make()
    if is_warm:
        run(model).backward()
        model.zero_grad()
    own, other = model[0].weight, MISFITS[name][0](model)
    if call == "functional_call":
        with torch.no_grad():
            params = {"0.weight": other}
            x = torch.tensor([0])
            text = message(lambda: functional_call(model, params, (x,)))
    else:
        model[0].weight = other
        text = message(model[0].unshard if call == "unshard" else lambda: run(model))
        model[0].weight = own
    trains_on(model, oracle)
    return text


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


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("call", ["forward", "unshard", "functional_call"])
def test_a_dtensor_of_another_kind(name: str, is_warm: bool, num_ranks: int, call: str) -> None:
    texts = run_ranks(refused, num_ranks, name, is_warm, call, timeout=60)
    expected = WHERE + MISFITS[name][1]
    if name == "mesh":
        assert all(text.startswith(expected) and text.endswith(REMEDY) for text in texts)
    else:
        assert texts == [expected + REMEDY] * num_ranks


def refused_on_one() -> None:
    """A local shard of other rows than the rank should have, which no global shape tells."""
    model = layers(1)
    if dist.get_rank() == BAD:
        weight = model[0].weight
        model[0].weight = nn.Parameter(
            DTensor.from_local(
                torch.ones(1, WIDTH),
                weight.device_mesh,
                weight.placements,
                shape=weight.shape,
                stride=weight.stride(),
                run_check=False,
            )
        )
    step(model)


@pytest.mark.parametrize("apart", [False, True], ids=["reading", "sending"])
def test_a_shard_of_other_rows_on_one_rank(sharing: None, apart: bool) -> None:
    text = (
        f"{WHERE}one of local shape [1, {WIDTH}] for 'weight' of local shape "
        f"[{WIDTH // 2}, {WIDTH}]{REMEDY}"
    )
    said = failures(refused_on_one, 2, apart=apart)
    assert said[BAD] == f"ShardError: {text}"
    assert said[0].startswith("CommunicationError: Rank 0 failed while gathering group '0'")
    assert text in said[0]


def what_fits() -> list[float]:
    """A parameter that somebody has made of the one that it replaces."""
    model = shard_layers(make())
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0 + 2)
    before = float(model[0](torch.tensor([1])).sum())
    model[0].weight = like(model, (5, 4))
    return [before, float(model[0](torch.tensor([1])).sum())]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_of_the_same_kind_is_taken_over(num_ranks: int) -> None:
    assert run_ranks(what_fits, num_ranks, timeout=60) == [[8.0, 4.0]] * num_ranks


# Parameters that are gone -------------------------------------------------------------------------

GONE = (
    "Expected the parameters of group '1' as fully_shard made them, got none for 'bias'; change "
    "values by load_state_dict or in place"
)


def set_to_none(layer: nn.Linear) -> None:
    layer.bias = None  # type: ignore[assignment]


def deleted(layer: nn.Linear) -> None:
    del layer.bias


def registered_none(layer: nn.Linear) -> None:
    layer.register_parameter("bias", None)


def gone(take: Callable[[nn.Linear], None], when: str) -> str:
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
    take(model[1])
    text = message(model[1].unshard if when == "by hand" else lambda: run(model))
    model[1].bias = own
    model[1].reshard()
    trains_on(model, oracle)
    return text


@pytest.mark.parametrize("take", [set_to_none, deleted, registered_none])
@pytest.mark.parametrize(
    "when", ["at first", "later", "while it is kept", "while it is held", "by hand"]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_parameter_that_was_taken_out(
    take: Callable[[nn.Linear], None], when: str, num_ranks: int
) -> None:
    assert run_ranks(gone, num_ranks, take, when, timeout=60) == [GONE] * num_ranks


def plain_by_hand() -> str:
    model = shard_layers(make())
    model[0].weight = nn.Parameter(torch.ones(5, 4))
    return message(model[0].unshard)


def test_a_plain_tensor_is_refused_without_a_forward_too() -> None:
    expected = f"{WHERE}a plain tensor for 'weight'{REMEDY}"
    assert run_ranks(plain_by_hand, 2, timeout=60) == [expected] * 2


def normed() -> str:
    model = make()
    fully_shard(model[1])
    shard_layers(model)
    nn.utils.parametrizations.weight_norm(model[1])
    return message(lambda: run(model))


def test_a_parametrization_that_takes_the_weight() -> None:
    expected = GONE.replace("'bias'", "'weight'")
    assert run_ranks(normed, 1, timeout=60) == [expected]
