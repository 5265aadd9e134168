"""Buffers under a policy of low precision without ``buffer_dtype``: they keep their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nets import assert_same, average_gradients, own_input
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard

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
