"""Parameters that change while gathered ones are kept are gathered again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gathered import nbytes_of, note_gathered
from nets import Net, assert_parity, average_gradients, own_input, shard_net, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from training.cases import OPTIMIZERS

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard._torch.memory import poisoned_memory


def as_it_is(model: Net) -> None:
    pass


def assigned(model: Net) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def converted_twice(model: Net) -> None:
    model.double().float()


def used_before(model: Net) -> None:
    model(own_input()).sum().backward()
    model.reset_iter_state()
    model.zero_grad()
    assigned(model)


Change = Callable[[Net], None]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("change", [as_it_is, assigned, converted_twice, used_before])
@on_ranks("num_ranks")
def test_optimizer_steps_are_noticed(change: Change, foreach: bool) -> None:
    """Keep parameters gathered over steps of an optimizer that moves no version counter."""
    reference, model = two_nets(2)
    change(model)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for one in (model, reference):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        for step in range(3):
            one(own_input(step)).square().sum().backward()
            if one is reference:
                average_gradients(one.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for module in (model, *model.blocks):
        module.reshard()
    assert_parity(model, reference)


# Arrays that share memory ---------------------------------------------------------------------


class Recording(nn.Module):
    """Keeps its weight of each call as an array that shares memory, and a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.arrays: list[Any] = []
        self.copies: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.arrays.append(self.layer.weight.detach().numpy())
        self.copies.append(self.layer.weight.detach().clone())
        return self.layer(x).tanh()


@pytest.mark.parametrize(("reshard", "poison"), [(True, True), (False, True), (True, False)])
@on_ranks(2)
def test_memory_that_an_array_shares_is_kept(reshard: bool, poison: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Recording(), Recording())
    reference = copy.deepcopy(model)
    for part in model:
        fully_shard(part, reshard_after_forward=reshard)
    fully_shard(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    with warnings.catch_warnings(record=True) as caught, poisoned_memory(poison):
        warnings.simplefilter("always")
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            for one, optimizer in zip((model, reference), optimizers, strict=True):
                one(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            for ours, theirs in zip(model, reference, strict=True):
                assert torch.allclose(ours.copies[-1], theirs.copies[-1])
                assert torch.equal(torch.from_numpy(ours.arrays[-1]), ours.copies[-1])
    assert_parity(model, reference)
    assert {str(one.message) for one in caught} == {
        "Expected to free memory of unsharded parameters, got some that an array shares, such "
        "as weight.detach().numpy(), and the next gather overwrites it; keep a copy instead"
    }


Edit = Callable[[nn.Module, list[nn.Parameter]], None]


# Fresh weights ------------------------------------------------------------------------------


def add_in_place(model: nn.Module, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.add_(1)


def write_the_local_tensor(model: nn.Module, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            assert isinstance(param, DTensor)
            param.to_local().fill_(0.5)


def load_a_state_dict(model: nn.Module, params: list[nn.Parameter]) -> None:
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})


def load_by_assignment(model: nn.Module, params: list[nn.Parameter]) -> None:
    state = {key: (value + 1).detach() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def stepped_by(name: str) -> Edit:
    def take_a_step(model: nn.Module, params: list[nn.Parameter]) -> None:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = OPTIMIZERS[name](params)
        optimizer.step()
        optimizer.zero_grad()

    return take_a_step


CHANGES: dict[str, Edit] = {
    **{name: stepped_by(name) for name in ("sgd_foreach", "adamw_fused", "sgd")},
    "in place": add_in_place,
    "local tensor": write_the_local_tensor,
    "load": load_a_state_dict,
    "assign": load_by_assignment,
}


@pytest.mark.parametrize(("reshard", "has_grad"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks("ranks")
def test_the_forward_after_a_change_sees_it(change: str, reshard: bool, has_grad: bool) -> None:
    model = shard_net(Net(3), reshard_after_forward=reshard)
    params = list(model.parameters())
    model.set_reshard_after_backward(False)
    x = own_input()
    with torch.set_grad_enabled(has_grad):  # with a graph, nothing is freed until a backward
        before = model(x).detach()
    CHANGES[change](model, params)
    fresh = Net(3)
    fresh.load_state_dict({key: t.full_tensor() for key, t in model.state_dict().items()})
    with torch.no_grad():
        after = model(x)
        assert torch.equal(after, fresh(x)) and not torch.equal(after, before)


# Memory that stays, which every gather fills again ------------------------------------------------


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
