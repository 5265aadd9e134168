"""What a rank holds, where it belongs, and what of it has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint.meshes import CASES, Net
from torch import nn

from composable_shard import (
    CPUOffloadPolicy,
    changed_since,
    fully_shard,
    load_sharded,
    local_shards,
    save_full,
    unsharded,
)
from composable_shard.optim import flat
from composable_shard.testing import run_ranks, run_threads
from loading.kinds import Tied, differences


def assert_put_together(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    """Let each rank write what it holds; assert that all is whole then."""
    written = {name: torch.zeros_like(full) for name, full in wanted.items()}
    times = {name: torch.zeros(full.shape) for name, full in wanted.items()}
    with mock.patch.object(dist, "all_gather_object", None):  # none of those
        shards = list(local_shards(model))
    for shard in shards:
        assert shard.tensor.untyped_storage().nbytes(), shard.name
        written[shard.name][shard.box] = shard.tensor
        times[shard.name][shard.box] += 1
    for name, full in wanted.items():
        assert times[name].max() <= 1, name  # what a rank yields does not overlap
        held = torch.where(times[name] > 0, written[name], torch.zeros_like(full))
        for tensor in (times[name], held):
            dist.all_reduce(tensor)
        assert (times[name] > 0).all(), name
        torch.testing.assert_close(held / times[name].clamp(min=1), full, msg=name)


def check_placement(name: str) -> None:
    torch.manual_seed(1)
    whole = Net(10)
    assert_put_together(CASES[name](copy.deepcopy(whole)), dict(whole.state_dict()))


@pytest.mark.brief(3)
@pytest.mark.parametrize("name", CASES)
def test_the_shards_of_all_ranks_are_the_model(name: str) -> None:
    run_ranks(check_placement, CASES[name].num_ranks, name)


def test_shards_lie_in_the_memory_of_the_model_and_what_is_tied_comes_once() -> None:
    def check() -> bool:
        model = fully_shard(nn.Linear(4, 4))
        for shard in local_shards(model):
            shard.tensor.fill_(3)
        return all(bool((p.full_tensor() == 3).all()) for p in model.parameters())

    assert run_threads(check, 2) == [True, True]
    names = [shard.name for shard in local_shards(Tied())]
    assert names == ["scale", "embed.weight", "block.weight", "block.bias"]


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running"]
Act = Callable[[nn.Module, Path], object]


def build(**options: Any) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[1].register_buffer("running", torch.zeros(2))
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def step(kind: type[torch.optim.Optimizer], is_flat: bool, **options: Any) -> Act:
    def act(model: nn.Module, _: Path) -> None:
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = kind(params, lr=0.1, **options)
        optimizer = flat(optimizer) if is_flat else optimizer
        backward(model)
        optimizer.step()

    return act


def backward(model: nn.Module, _: Path | None = None) -> None:
    model(torch.ones(1, 4)).sum().backward()


def edit(model: nn.Module, _: Path) -> None:
    with unsharded(model), torch.no_grad():
        model[1].weight.add_(1)


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assign(model: nn.Module, _: Path) -> None:
    for _ in range(2):
        model.load_state_dict(copied(model), assign=True)


def load_file(model: nn.Module, folder: Path) -> None:
    save_full(model, folder / "x.safetensors")
    dist.barrier()
    load_sharded(model, folder / "x.safetensors")


def make_empty(model: nn.Module, _: Path) -> None:
    state = copied(model)
    model.to_empty(device="cpu").load_state_dict(state)


TRAINED = ["1.weight", "1.bias"]
CHANGES: dict[str, tuple[Act, list[str]]] = {
    "backward": (backward, []),
    "saving": (lambda model, folder: save_full(model, folder / "y.safetensors"), []),
    "in place": (lambda model, _: model[0].weight.mul_(2), ["0.weight"]),
    "local": (lambda model, _: model[0].weight.to_local().mul_(2), ["0.weight"]),
    "buffer": (lambda model, _: model[1].running.add_(1), ["1.running"]),
    "unsharded": (edit, ["1.weight"]),
    "foreach": (step(torch.optim.AdamW, False, foreach=True), TRAINED),
    "fused": (step(torch.optim.AdamW, False, fused=True), TRAINED),
    "flat": (step(torch.optim.AdamW, True), TRAINED),
    "load_state_dict": (lambda model, _: model.load_state_dict(copied(model)), NAMES),
    # Torch swaps tensors then, which it cannot if anything refers to them weakly.
    "conversion": (lambda model, _: model.double(), NAMES),
    "to_empty": (make_empty, NAMES),
    "assign": (assign, NAMES),
    "load_sharded": (load_file, NAMES),
}


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(tmp_path: Path, change: str, offloads: bool) -> None:
    act, expected = CHANGES[change]
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloads else {}

    def check() -> list[list[str]]:
        model = build(**options)
        values = {shard.name: shard.tensor.clone() for shard in local_shards(model)}
        before = {shard.name: shard.version for shard in local_shards(model)}
        assert changed_since(model, {}) == NAMES
        act(model, tmp_path)
        after = {shard.name: shard.version for shard in local_shards(model)}
        now = {shard.name: shard.tensor for shard in local_shards(model)}
        unseen = set(differences(now, values)) - set(changed_since(model, before))
        return [changed_since(model, before), changed_since(model, after), sorted(unseen)]

    assert run_threads(check, 2) == [[expected, [], []]] * 2
