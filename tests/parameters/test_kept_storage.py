"""Unsharded parameters whose memory stays: every gather fills the same, with the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from gathered import nbytes_of, note_gathered
from nets import Net, assert_parity, average_gradients, own_input, shard_net, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from two_tensors import inner_models, two_tensor_hooks, two_tensor_mlp

from composable_shard import MixedPrecisionPolicy, explain, fully_shard
from composable_shard.testing import fake_ranks

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


@pytest.mark.parametrize(
    ("ranks", "reshard", "dtypes"),
    [
        *((2, reshard, ()) for reshard in (None, True, False)),
        *((4, reshard, ()) for reshard in (None, True, 2)),
        *((ranks, True, DTYPES) for ranks in (1, 2)),
    ],
)
@on_ranks("ranks")
def test_pointers_stay_and_numbers_are_those_of_the_unsharded_model(
    reshard: bool | int | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    policy = MixedPrecisionPolicy(*dtypes)
    reference, model = two_nets(2, reshard_after_forward=reshard, mp_policy=policy)
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


@on_ranks(2)
def test_memory_that_stays_is_not_read_while_sharded() -> None:
    """Memory that stays is not read: autograd refuses parameters that are sharded."""
    model = fully_shard(nn.Linear(4, 4))
    model.set_keep_unsharded_storage(True)
    model.unshard()
    product = torch.ones(2, 4, requires_grad=True) @ model.weight
    model.reshard()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_of_one_shard_only_what_is_no_copy_of_it_may_be_read_while_sharded() -> None:
    """The bias is not cast: the shard itself is the unsharded parameter, and is always there."""
    with fake_ranks(1):
        model = nn.Linear(4, 4)
        model.bias = nn.Parameter(model.bias.detach().bfloat16())
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model.unshard()
        first, second = (torch.ones(4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        products = first @ model.weight, second * model.bias
        model.reshard()
        products[1].sum().backward()
        assert torch.equal(second.grad, model.bias.to_local())  # type: ignore[arg-type, operator]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            products[0].sum().backward()


@on_ranks(2)
def test_tensor_subclasses_keep_their_memory() -> None:
    with two_tensor_hooks():
        torch.manual_seed(2)
        model = two_tensor_mlp()
        references = inner_models(model)
        for module in (*model, model):
            fully_shard(module)
        model.set_keep_unsharded_storage(True)
        seen = []
        for _ in range(3):
            for mlp in model:
                mlp.unshard()
                weights = (mlp.in_proj.weight, mlp.out_proj.weight)
                seen.append([w.data_ptr() for weight in weights for w in (weight.a, weight.b)])
                mlp.reshard()
            with torch.no_grad():
                x = torch.ones(3, 8)
                assert torch.equal(model(x).a, references[0](x))
    assert seen[:3] == seen[3:6] == seen[6:]


def test_explain_says_that_memory_is_kept() -> None:
    with fake_ranks(2):
        model = shard_net(Net(2))
        before = str(explain(model))
        model.set_keep_unsharded_storage(True)
        after = str(explain(model))
    said = "the parameters are gathered again for backward, into memory that is kept"
    assert said not in before and said in after


@on_ranks(4)
def test_a_copy_keeps_memory_of_its_own_on_a_hybrid_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_net(Net(1), mesh=mesh)
    model.set_keep_unsharded_storage(True)
    first = gather(model)
    copied = copy.deepcopy(model)
    model(own_input()).sum().backward()
    own = gather(copied)
    assert gather(model) == first and gather(copied) == own and not set(own) & set(first)
