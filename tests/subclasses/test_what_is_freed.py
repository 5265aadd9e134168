"""What hooks may rely on of memory: what is freed, what is filled again, what they get."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from composable_shard import fully_shard
from composable_shard.testing import RankError, run_ranks

STEPS = 4
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class Wrapped(torch.Tensor):
    """Travels in bf16, with both hooks and nothing else: nobody knows what it is made of."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device
        )
        made.values_ = values
        return made

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        assert mesh.ndim == 1
        return (self.values_.bfloat16(),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (values,) = outputs
        if out is not None:
            out.values_.copy_(values)
            return None
        unsharded = type(self)(values.float())
        return unsharded, (unsharded.values_,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain = tree_map_only(cls, lambda one: one.values_, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return tree_map_only(torch.Tensor, cls, out)


class Foreign(Wrapped):
    """Is rebuilt by other arguments than torch's compiler passes; so is that of torch's tests."""

    def __tensor_flatten__(self) -> Any:
        return ["values_"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, shape: Any, stride: Any) -> Any:
        raise AssertionError("called")


class Aliased(Wrapped):
    """Unsharded it is what arrived, and returns nothing to free."""

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (values,) = outputs
        if out is None:
            return type(self)(values), ()
        assert out.values_.data_ptr() == values.data_ptr()
        return None


class Released(Wrapped):
    """Says that it needs no more of what arrived."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Product(torch.autograd.Function):
    """Multiplies with what a weight holds, and saves that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        values = weight.values_ if isinstance(weight, Wrapped) else weight
        ctx.save_for_backward(x, values)
        return x @ values.bfloat16().float().T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, values = ctx.saved_tensors
        return grad @ values.bfloat16().float(), grad.T @ x


class Layer(nn.Module):
    """Multiplies with a weight of a class."""

    def __init__(self, kind: type[Wrapped] | None, rows: int, columns: int) -> None:
        super().__init__()
        values = torch.randn(rows, columns) / columns**0.5
        self.weight = nn.Parameter(values if kind is None else kind(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight).tanh()


def model_of(kind: type[Wrapped] | None, rows: int) -> nn.Sequential:
    torch.manual_seed(0)
    shapes = [(rows, 6), (6, rows)] * 2
    return nn.Sequential(*[Layer(kind, *shape) for shape in shapes])


def train(kind: type[Wrapped], rows: int, reshards: bool | int, mesh_shape: Any = None) -> None:
    """Train; compare losses with the unsharded model of plain weights that are rounded to bf16."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh_shape = mesh_shape or (num_ranks,)
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :]
    )
    model, whole = model_of(kind, rows), model_of(None, rows)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, whole)]
    for step in range(STEPS):
        batches = [
            torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + place))
            for place in range(num_ranks)
        ]
        loss = (model(batches[rank]) - 1).square().mean()
        loss.backward()
        losses = [(whole(batch) - 1).square().mean() for batch in batches]
        (sum(losses) / num_ranks).backward()
        # Three ranks round gradients otherwise, which moves a few weights to the next bf16.
        torch.testing.assert_close(loss, losses[rank], rtol=1e-3, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


KINDS = [Wrapped, Foreign, Aliased, Released]


@pytest.mark.parametrize(
    ("num_ranks", "reshards", "mesh_shape"),
    [
        *((4, True, (2, 2)), (4, 2, None), (3, True, None), (3, False, None)),
        *((2, True, None), (1, True, None)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_classes_with_the_two_hooks_alone_train(
    kind: type[Wrapped], num_ranks: int, reshards: bool | int, mesh_shape: Any
) -> None:
    """Five rows are not the same number on all ranks, and one of four ranks has none.

    On a hybrid mesh hooks get the axis of the shards.
    """
    run_ranks(train, num_ranks, kind, 5, reshards, mesh_shape)


@on_ranks(2)
def test_memory_is_there_while_it_is_used_and_gone_afterwards() -> None:
    torch.manual_seed(0)
    for kind, itemsize in ((Wrapped, 4), (Aliased, 2), (Released, 4)):
        layer: Any = fully_shard(Layer(kind, 8, 6), reshard_after_forward=True)
        model = fully_shard(nn.Sequential(layer))
        post = mock.Mock(side_effect=kind.fsdp_post_all_gather)
        hook = mock.patch.object(kind, "fsdp_post_all_gather", lambda *a, p=post, **k: p(*a, **k))
        with torch.no_grad(), hook:
            model(torch.ones(1, 6))
            layer.unshard()
            unsharded = layer.weight.values_
            assert unsharded.untyped_storage().size() == 8 * 6 * itemsize
            (arrived,) = post.call_args.args[1]
            assert (arrived.untyped_storage().size() == 0) is (kind is Released)
            layer.reshard()
        assert unsharded.untyped_storage().size() == 0


@on_ranks(2)
def test_autograd_refuses_what_it_saved_of_a_freed_subclass() -> None:
    """No gather is started by such a loss, and the memory that autograd saved is gone."""
    kept: list[torch.Tensor] = []

    class Keeping(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(super().forward(x))
            return kept[-1].detach()

    torch.manual_seed(0)
    model = nn.Sequential(fully_shard(Keeping(Wrapped, 5, 6)), Layer(None, 2, 5))
    fully_shard(model)
    model(torch.ones(1, 6, requires_grad=True))
    with pytest.raises(RuntimeError, match="is at version 1000000000; expected version"):
        kept[0].sum().backward()


# What is refused ------------------------------------------------------------------------------


class OneInner(Wrapped):
    """Returns one inner tensor where several may be."""

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return outputs[0].float(), outputs[0]


class Undecided(Wrapped):
    """Neither wants what arrived to be released nor does not."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return "perhaps"


class Halves(Wrapped):
    """Can be cut in two alone, and takes other numbers for two."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split.Tensor:
            rows = len(args[0]) // 2
            args = (args[0], rows, *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)


class NotOnOne(Wrapped):
    """Cannot be copied on one rank."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.new_zeros.default and dist.get_rank() == 1:
            raise ValueError("no")
        return super().__torch_dispatch__(func, types, args, kwargs)


CUT = (
    "Expected parameter 'weight', a {} of shape [6, 6], to be cut into 3 shards along dim 0, got: "
    "{}; shard it over another number of ranks, or pass it in ignored_params"
)
HALVES = "Expected split of Halves to return shapes [[2, 6], [2, 6], [2, 6]], got [[3, 6], [3, 6]]"


@pytest.mark.parametrize(
    ("kind", "num_ranks", "text"),
    [
        (
            OneInner,
            2,
            "Expected fsdp_post_all_gather of weight to return (tensor, inner tensors) when out is "
            "None, got (Tensor, Tensor)",
        ),
        (Undecided, 2, f"Expected {RELEASE} of weight to return a bool, got str"),
        (Halves, 3, CUT.format("Halves", HALVES)),
        (NotOnOne, 3, "rank 1: " + CUT.format("NotOnOne", "ValueError: no")),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    kind: type[Wrapped], num_ranks: int, text: str
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(train, num_ranks, kind, 6, True, timeout=20)
    failure = caught.value.agreed()
    assert (failure.type_name, failure.message) == ("ExtensionError", text)
