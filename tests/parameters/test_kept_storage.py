"""Unsharded parameters whose memory stays: every gather fills the same, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from gathered import nbytes_of, note_gathered
from nets import Net, assert_parity, average_gradients, own_input, shard_net, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed import fsdp

from composable_shard import MixedPrecisionPolicy
from composable_shard._torch.memory import poisoned_memory

Pointers = list[int]


def pointers(model: nn.Module) -> Pointers:
    """Return where the unsharded parameters lie, which must be registered."""
    params = list(model.parameters())
    assert not any(hasattr(param, "placements") for param in params)
    return [param.data_ptr() for param in params]


def gather(model: nn.Module) -> Pointers:
    """Gather everything, note where it lies, and free it."""
    sharded = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    for module in sharded:
        module.unshard()
    found = pointers(model)
    for module in sharded:
        module.reshard()
    return found


class Noting:
    """Notes where a model's parameters lie when they compute."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[Pointers] = []
        for module in (model, *model.blocks):
            module.register_forward_pre_hook(self._note, prepend=False)

    def _note(self, module: nn.Module, args: object) -> None:
        self.seen.append([param.data_ptr() for param in module.parameters(recurse=False)])


DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.brief(5)
@pytest.mark.parametrize(
    ("ranks", "reshard", "dtypes"),
    [
        *((2, reshard, ()) for reshard in (None, True, False)),
        *((4, reshard, ()) for reshard in (None, True, 2)),
        *((ranks, True, DTYPES) for ranks in (1, 2)),
    ],
)
@on_ranks("ranks")
@poisoned_memory(False)  # which looks after all memory, not only after what stays
def test_pointers_stay_and_numbers_are_those_of_the_unsharded_model(
    reshard: bool | int | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    policy = MixedPrecisionPolicy(*dtypes)
    reference, model = two_nets(2, reshard_after_forward=reshard, mp_policy=policy)
    model.set_keep_unsharded_storage(False)  # before the first gather
    model.set_keep_unsharded_storage(True)
    gathered = note_gathered(model)
    first = gather(model)
    noting = Noting(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, model)]
    for step in range(4):
        with torch.no_grad():
            model(own_input(step))  # also after a step, when shards have new values
        for one in (reference, model):
            one(own_input(step)).square().sum().backward()
        average_gradients(reference.parameters())
        if not dtypes:
            assert_parity(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own = [seen for seen in noting.seen if len(seen) == len(noting.seen[0])]
    assert len(set(map(tuple, own))) == 1 and gather(model) == first
    assert min(nbytes_of(gathered)) > 0
    model.set_keep_unsharded_storage(False)
    assert max(nbytes_of(gathered)) == 0 and len(gather(model)) == len(first)


@on_ranks(2)
def test_one_module_may_keep_its_memory() -> None:
    model = shard_net(Net(2))
    first, second, root = map(note_gathered, (*model.blocks, model.out))
    model.blocks[0].set_keep_unsharded_storage(True)
    model(own_input()).sum().backward()
    assert min(nbytes_of(first)) > 0 and max(nbytes_of(second)) == 0
    model.set_keep_unsharded_storage(True, recurse=False)
    model(own_input()).sum().backward()
    assert min(nbytes_of(root)) > 0 and max(nbytes_of(second)) == 0
