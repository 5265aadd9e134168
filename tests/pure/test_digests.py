"""Digests of tensors: whatever changes in one, they tell; on the CPU and on other devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from composable_shard.train.full import _digest_of_plain, _sum_of_products

Digest = Callable[[torch.Tensor], int]

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("digest", [_digest_of_plain, _sum_of_products])
def test_any_bit_counts(digest: Digest, dtype: torch.dtype) -> None:
    numel = 300_000  # more than one piece
    held = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8)
    tensor = held.view(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    bits = [1] if dtype is torch.bool else [1, 8, 128]
    for place in (0, 1, dtype.itemsize - 1, len(held) // 2, len(held) - 1):
        for bit in bits:
            held[place] ^= bit
            assert digest(tensor) != before, (place, bit)
            held[place] ^= bit
    assert digest(tensor) == before


@pytest.mark.parametrize("digest", [_digest_of_plain, _sum_of_products])
def test_the_order_counts(digest: Digest) -> None:
    tensor = torch.arange(600_000.0)
    assert digest(tensor.flip(0)) != digest(tensor)
    assert digest(tensor.view(2, -1).flip(0).reshape(-1)) != digest(tensor)
    assert digest(-tensor) != digest(tensor)
    assert digest(torch.empty(0)) == digest(torch.empty(0))
