"""What formats lose: no more than their scales say, nothing of zeros, no infinity, and no mean."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard import BlockFormat, MixedPrecisionPolicy

BLOCK_DTYPES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
SMALLEST = torch.finfo(torch.float32).smallest_normal


@st.composite
def formats(draw: st.DrawFn) -> BlockFormat:
    dtype, block = draw(st.sampled_from(BLOCK_DTYPES)), draw(st.sampled_from([1, 7, 128, 256]))
    return BlockFormat(dtype, block, draw(st.booleans()))


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """Rows of any length, with small elements beside large ones, and zeros."""
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 600))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    exponents = torch.randint(0, draw(st.integers(1, 12)), shape, generator=generator)
    values = torch.randn(shape, generator=generator) / 8**exponents
    values *= torch.rand(shape, generator=generator) > draw(st.sampled_from([0, 0.5, 1]))
    return values * 10.0 ** draw(st.integers(-44, 37))


def steps_of(format: BlockFormat, x: torch.Tensor) -> torch.Tensor:
    """Return the distance of two codes at each element, by blocks."""
    is_float = format.dtype.is_floating_point
    finfo: Any = torch.finfo(format.dtype) if is_float else torch.iinfo(format.dtype)
    steps = []
    for block in x.double().split(format.block, 1):
        scale = (block.abs().amax(1, keepdim=True) / finfo.max).clamp_min(SMALLEST)
        least = scale * (finfo.smallest_normal * finfo.eps if is_float else 1)
        steps.append(torch.maximum(block.abs() * (finfo.eps if is_float else 0), least))
    return torch.cat(steps, 1)


@settings(deadline=None)
@given(formats(), st.lists(rows(), min_size=1, max_size=4), st.integers(0, 2**32))
def test_an_element_moves_by_half_a_step_or_at_random_by_less_than_one(
    format: BlockFormat, params: list[torch.Tensor], seed: int
) -> None:
    num_rows = min(map(len, params))
    params = [param[:num_rows] for param in params]
    before, kept = torch.get_rng_state(), [param.clone() for param in params]
    numels = [param.shape[1] for param in params]
    encoded = format.encode(params, seed)
    assert encoded.dtype == torch.uint8 and encoded.shape == (num_rows, format.nbytes(numels))
    assert format.nbytes(numels) == sum(n + 4 * math.ceil(n / format.block) for n in numels)
    assert torch.equal(format.encode(params, seed), encoded)
    for x, decoded in zip(params, format.decode(encoded, numels), strict=True):
        step = steps_of(format, x) * (1.0001 if format.stochastic else 0.5001)
        assert ((decoded.double() - x.double()).abs() <= step).all()
        assert not decoded[x == 0].any()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, params, kept))


@settings(deadline=None)
@given(formats(), st.lists(rows(), min_size=1, max_size=4))
def test_a_parameter_is_encoded_as_if_it_were_alone(
    format: BlockFormat, params: list[torch.Tensor]
) -> None:
    format, params = replace(format, stochastic=False), [param[:1] for param in params]
    numels = [param.shape[1] for param in params]
    together = format.decode(format.encode(params), numels)
    for x, numel, decoded in zip(params, numels, together, strict=True):
        assert torch.equal(format.decode(format.encode([x]), [numel])[0], decoded)


class Counted(TorchDispatchMode):
    """Counts the operations, except those that only make views."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


def test_many_parameters_take_no_more_operations_than_one() -> None:
    nums, format = [], BlockFormat(torch.int8)
    for num_params in (1, 12):
        params = [torch.randn(2, 512)] * num_params
        with Counted() as counted:
            format.decode(format.encode(params), [512] * num_params)
        nums.append(counted.num)
    assert nums[0] == nums[1] <= 20


@given(formats(), st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0, 299))
def test_a_block_with_an_infinity_is_not_finite_and_the_others_are(
    format: BlockFormat, value: float, place: int
) -> None:
    x = torch.linspace(-1, 1, 300).repeat(2, 1)
    x[1, place] = value
    neighbour, decoded = format.decode(format.encode([x.clone().fill_(1), x], 1), [300, 300])
    first = place // format.block * format.block
    assert not decoded[1, first : first + format.block].isfinite().any()
    decoded[1, first : first + format.block] = 0
    assert decoded.isfinite().all() and neighbour.isfinite().all()


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_the_mean_of_random_roundings_is_exact(dtype: torch.dtype) -> None:
    format, num = BlockFormat(dtype, 128, stochastic=True), 4000
    x = torch.randn(1, 256) / 10 ** torch.randint(0, 7, (1, 256))  # subnormal codes, too
    x[0, :2] = torch.tensor([1.0, -1.0])
    many = [format.decode(format.encode([x], seed), [256])[0].double() for seed in range(num)]
    limit = 5 * steps_of(format, x) / 2 / math.sqrt(num) + x.abs() * 1e-6
    assert ((sum(many) / num - x).abs() <= limit).all()
    other = BlockFormat(dtype, 128, stochastic=True, seed=1)
    assert not torch.equal(other.encode([x], 0), format.encode([x], 0))


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: MixedPrecisionPolicy(gather_wire=torch.float32),  # type: ignore[arg-type]
        ValueError,
        "Expected gather_wire to be one of torch.bfloat16, torch.float16, torch.float8_e4m3fn, "
        "torch.float8_e5m2, torch.int8, got torch.float32",
    ),
    (
        lambda: MixedPrecisionPolicy(reduce_wire="int8"),  # type: ignore[arg-type]
        TypeError,
        "Expected reduce_wire to be a torch.dtype, an object with nbytes, encode and decode, or "
        "None, got str: 'int8'",
    ),
    (
        lambda: MixedPrecisionPolicy(reduce_wire=BlockFormat),  # type: ignore[arg-type]
        TypeError,
        "Expected reduce_wire to be a torch.dtype, an object with nbytes, encode and decode, or "
        "None, got type: <class 'composable_shard.wire.BlockFormat'>",
    ),
    (
        lambda: MixedPrecisionPolicy(gather_wire=BlockFormat(torch.int8, stochastic=True)),
        ValueError,
        "Expected gather_wire not to be stochastic: forward and backward must gather the same "
        "values, got BlockFormat(dtype=torch.int8, block=256, stochastic=True, seed=0)",
    ),
    (
        lambda: BlockFormat(torch.bfloat16),
        ValueError,
        "Expected dtype to be one of torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, got "
        "torch.bfloat16",
    ),
    (lambda: BlockFormat(torch.int8, 0), ValueError, "Expected block of at least 1, got 0"),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED)
def test_what_is_no_format_is_refused(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
