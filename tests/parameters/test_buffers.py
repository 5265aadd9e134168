"""Buffers under a policy of low precision without ``buffer_dtype``: they keep their own."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from nets import assert_same, average_gradients, own_input
from on_ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import fake_ranks

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Normed(nn.Module):
    """Batch norms with and without weights and statistics, an instance norm, a cache."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.middle = nn.Linear(6, 6)
        self.plain = nn.BatchNorm1d(6, affine=False)
        self.momentary = nn.BatchNorm1d(6, track_running_stats=False)
        self.cumulative = nn.BatchNorm1d(6, momentum=None)
        self.instance = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.head = nn.Linear(6, 3)
        self.register_buffer("cache", torch.randn(6) / 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.momentary(self.plain(self.middle(self.norm(self.inner(x)).relu())))
        x = self.instance(self.cumulative(x).unsqueeze(2).expand(-1, -1, 3)).mean(2)
        # A cache as of rotary embeddings: its precision is the model's own business.
        self.seen = [x.dtype, self.cache.dtype, (x * self.cache).dtype]
        self.count += 1
        return self.head((x * self.cache).to(x.dtype))


class Casting(nn.Module):
    """The oracle: parameters rounded to the compute dtype, those of batch norms cast back."""

    def __init__(self, model: Normed, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lent: dict[str, torch.Tensor] = {}
        for name, param in self.model.named_parameters():
            rounded = param.to(self.dtype)
            owner = self.model.get_submodule(name.rpartition(".")[0])
            precise = isinstance(owner, nn.BatchNorm1d) and owner.running_mean is not None
            lent[name] = rounded.float() if precise else rounded
        return torch.func.functional_call(self.model, lent, (x.to(self.dtype),))


@pytest.mark.parametrize("reshard", [True, None, False])
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_batch_norm_and_other_buffers_under_low_precision(
    low: str, nested: bool, reshard: bool | None
) -> None:
    torch.manual_seed(0)
    model = Normed()
    oracle = Casting(copy.deepcopy(model), LOW[low])
    policy = MixedPrecisionPolicy(LOW[low], torch.float32)
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard}
    if nested:
        fully_shard(model.norm, **options)
        fully_shard([model.middle, model.cumulative], **options)
    fully_shard(model, **options)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, oracle))
    for step in range(3):
        losses = [one(own_input(step, rows=5)).float().square().mean() for one in (model, oracle)]
        assert_same(*losses, f"loss {step}")
        for loss in losses:
            loss.backward()
        average_gradients(oracle.parameters())
        pairs = zip(model.named_parameters(), oracle.model.parameters(), strict=True)
        for (name, param), expected in pairs:
            assert_same(param.grad, expected.grad, f"gradient of {name}")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for buffer, expected in zip(model.buffers(), oracle.model.buffers(), strict=True):
            assert buffer.dtype == expected.dtype and torch.equal(buffer, expected)
    model.eval()
    oracle.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same(model(own_input(9)), oracle(own_input(9)))
    model.reshard()
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    assert model.seen == [LOW[low], torch.float32, torch.float32]
    assert model.norm.running_mean.dtype == torch.float32


class Shared(nn.Module):
    """One module of a group calls the other: what is lent stays so until the outer one ends."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]  # hidden from the tree
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner[0](x))


@on_ranks(2)
def test_modules_of_one_group_that_call_each_other_keep_what_is_lent() -> None:
    inner = nn.BatchNorm1d(4)
    outer = Shared(inner)
    fully_shard([inner, outer], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    x = own_input()
    output = outer(x)
    output.sum().backward()
    norm = partial(F.batch_norm, running_mean=None, running_var=None, training=True)
    ones, zeros = torch.ones(4), torch.zeros(4)
    expected = norm(norm(x.bfloat16(), weight=ones, bias=zeros), weight=ones, bias=zeros)
    assert torch.equal(output, expected)
    assert inner.weight.grad.dtype == outer.norm.weight.grad.dtype == torch.float32


class Interrupt(BaseException):
    """No hook of a module is called when this passes through it."""


@pytest.mark.parametrize("reset", [True, False])
@on_ranks(2)
def test_an_interrupt_leaves_nothing_lent(reset: bool) -> None:
    model = fully_shard(Normed(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))

    def interrupt(*_: object) -> None:
        raise Interrupt

    handle = model.head.register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupt):
        model(own_input())
    handle.remove()
    if reset:
        model.reset_iter_state()
        with torch.no_grad():
            model.norm.weight.fill_(2)
    model(own_input()).sum().backward()
    model.reshard()
    assert model.norm.weight.grad.placements == model.norm.weight.placements
    assert torch.equal(model.norm.weight.full_tensor(), torch.full((6,), 2.0 if reset else 1.0))


class Grows(nn.Module):
    """Replaces a buffer by a longer one, takes one out, and sets one to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("cache", torch.zeros(0, 3))
        self.register_buffer("dropped", torch.zeros(3))
        self.register_buffer("emptied", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, x.detach().to(self.cache.dtype)])
        self.emptied = None
        if hasattr(self, "dropped"):
            del self.dropped
        return self.layer(x)


class Shares(nn.Module):
    """Writes a buffer at one place and reads it at another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.writer, self.reader = nn.Module(), nn.Module()
        mean = torch.zeros(3)
        self.writer.register_buffer("mean", mean)
        self.reader.register_buffer("mean", mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.writer.mean.add_(1)
        return self.layer(x) * 0 + self.reader.mean


def test_what_forward_does_to_cast_buffers_stays_done() -> None:
    """One of two modules stays one."""
    policy = MixedPrecisionPolicy(buffer_dtype=torch.bfloat16)
    with fake_ranks(2):
        model = fully_shard(Grows(), mp_policy=policy)
        for _ in range(2):
            model(torch.ones(2, 3))
        assert (model.cache.dtype, model.cache.tolist()) == (torch.float32, [[1.0] * 3] * 4)
        assert model.emptied is None and "dropped" not in model._buffers
        model = fully_shard(Shares(), mp_policy=policy)
        shown = [model(torch.ones(1, 3)).tolist() for _ in range(2)]
        assert shown == [[[1.0] * 3], [[2.0] * 3]]
        assert model.writer.mean is model.reader.mean
        assert model.writer.mean.tolist() == [2.0] * 3
