"""Dtypes by parameter: of the reduction, of the gradients that users get, and of compute."""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from heard import from_all_ranks
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed import fsdp
from torch_versions import needs_new_reduce_dtype

from composable_shard import MixedPrecisionPolicy, RankMismatchError, fully_shard
from composable_shard.core.transport.channel import Channel
from composable_shard.testing import fake_ranks, run_ranks

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def train(layer: nn.Module, dtype: torch.dtype = FP32) -> list[torch.dtype | None]:
    layer(torch.ones(2, 4, dtype=dtype)).sum().backward()
    return [None if param.grad is None else param.grad.dtype for param in layer.parameters()]


def test_what_parameters_ask_for_holds() -> None:
    """Also if it asks for another dtype later, and differs from others of its group."""
    with fake_ranks(2):
        layer = fully_shard(nn.Linear(4, 4))
        for dtype in (FP64, BF16, FP64):
            layer.bias.grad_dtype = dtype
            assert train(layer) == [FP32, dtype]
            layer.zero_grad()


# In which dtype gradients are reduced ----------------------------------------------------------


class Scaled(nn.Module):
    """Weights whose gradients have many bits in any dtype."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (FP32, FP32)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Parameter(torch.randn(5, 4, generator=generator).to(dtypes[0]))
        self.second = nn.Parameter(torch.randn(5, 4, generator=generator).to(dtypes[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x.to(self.first.dtype) * self.first
        return first.float().square().sum() + (x.to(self.second.dtype) * self.second).float().sum()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


@contextlib.contextmanager
def reduction_dtypes() -> Iterator[list[torch.dtype]]:
    """Note in which dtypes reductions are launched, one for each launch."""
    reduce, dtypes = Channel.reduce, list[torch.dtype]()

    def note(self: Channel, outputs: Any, inputs: Any, dtype: torch.dtype, *rest: Any) -> Any:
        dtypes.append(dtype)
        return reduce(self, outputs, inputs, dtype, *rest)

    with mock.patch.object(Channel, "reduce", note):
        yield dtypes


UNSET = "unset"
Dtypes = tuple[Any, Any]
CASES: dict[str, tuple[dict[str, Any], Dtypes, Dtypes, torch.dtype]] = {
    # policy, dtypes of the parameters, their grad_dtype, dtype of the reduction
    "follows the parameter": ({"param_dtype": BF16}, (FP32, FP32), (UNSET, UNSET), FP32),
    "follows a bf16 parameter": ({}, (BF16, BF16), (UNSET, UNSET), BF16),
    "follows the grad_dtype": ({}, (BF16, BF16), (FP32, FP32), FP32),
    "one grad_dtype widens the other": ({}, (BF16, BF16), (FP32, UNSET), FP32),
    "one parameter widens the other": ({"param_dtype": BF16}, (BF16, FP32), (UNSET, UNSET), FP32),
    "bf16 and fp16 promote to fp32": ({}, (BF16, FP16), (UNSET, UNSET), FP32),
    "a grad_dtype may be narrower": ({}, (FP32, FP32), (BF16, BF16), BF16),
    "any gradient is reduced as it is": ({"param_dtype": BF16}, (FP32, FP32), (None, None), BF16),
    "any gradient beside another": ({"param_dtype": BF16}, (FP32, FP32), (None, UNSET), FP32),
    "reduce_dtype comes first": (
        {"param_dtype": BF16, "reduce_dtype": FP64},
        (FP32, FP32),
        (BF16, UNSET),
        FP64,
    ),
    "reduce_dtype and grad_dtype": ({"reduce_dtype": FP32}, (BF16, BF16), (FP32, UNSET), FP32),
    "the policy's grad_dtype comes last": ({"grad_dtype": FP64}, (FP32, FP32), (UNSET, BF16), FP64),
}


def ask(model: Scaled, asked: tuple[Any, Any]) -> None:
    for param, dtype in zip(model.parameters(), asked, strict=True):
        if dtype != UNSET:
            param.grad_dtype = dtype


def own_dtype(case: str, index: int, param: torch.Tensor) -> torch.dtype:
    """Return the dtype in which the gradient of one parameter is accumulated."""
    policy, _, asked, _ = CASES[case]
    if policy.get("reduce_dtype"):
        return policy["reduce_dtype"]
    if asked[index] is None:
        return policy.get("param_dtype") or param.dtype
    return policy.get("grad_dtype") or param.dtype if asked[index] == UNSET else asked[index]


def reduced_by_hand(case: str, model: Scaled, num_microbatches: int) -> dict[str, torch.Tensor]:
    """Accumulate in the dtype of each parameter, average in that of the reduction, round once."""
    policy, _, asked, launched = CASES[case]
    compute = copy.deepcopy(model)
    for name, param in model.named_parameters():
        low = param.detach().to(policy.get("param_dtype") or param.dtype)
        setattr(compute, name, nn.Parameter(low))
    totals: dict[str, torch.Tensor] = {}
    for step in range(num_microbatches):
        compute(batch(step, dist.get_rank())).backward()
        for index, (name, param) in enumerate(compute.named_parameters()):
            grad, param.grad = param.grad, None
            assert grad is not None
            own = own_dtype(case, index, model.get_parameter(name))
            if own.itemsize < grad.dtype.itemsize:
                grad = grad.to(own)
            if num_microbatches == 1:
                totals[name] = grad.to(launched)
            elif name in totals:
                totals[name].add_(grad)
            else:
                totals[name] = grad.to(own)
    heard = from_all_ranks(totals)
    means = {}
    for index, (name, param) in enumerate(model.named_parameters()):
        mean = sum(said[name].to(launched).double() for said in heard) / len(heard)
        wanted = policy.get("grad_dtype") or param.dtype
        if asked[index] != UNSET:
            wanted = asked[index] or launched
        means[name] = mean.to(launched).to(wanted)
    return means


@pytest.mark.parametrize("unsynced", [0, 2])
@pytest.mark.parametrize("case", list(CASES))
@on_ranks(2)
def test_a_reduction_follows_the_parameters_where_the_policy_names_no_dtype(
    case: str, unsynced: int
) -> None:
    policy, dtypes, asked, launched = CASES[case]
    model = Scaled(dtypes)
    ask(model, asked)
    wanted = reduced_by_hand(case, model, unsynced + 1)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False, **policy))
    with reduction_dtypes() as launches:
        for step in range(unsynced + 1):
            model.set_requires_gradient_sync(step == unsynced)
            model(batch(step, dist.get_rank())).backward()
    assert launches == [launched]
    for name, param in model.named_parameters():
        got = param.grad.full_tensor()
        assert got.dtype == wanted[name].dtype and torch.equal(got, wanted[name]), name


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_the_grad_dtype_of_a_parameter_is_kept() -> None:
    """Microbatches whose sum loses bits in bfloat16 are summed exactly."""
    model: Any = nn.Linear(1, 1, bias=False, dtype=BF16)
    model.weight.grad_dtype = FP32
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32))
    for sync, value in ((False, 256.0), (True, 1.0)):
        model.set_requires_gradient_sync(sync)
        model(torch.full((1, 1), value, dtype=BF16)).sum().backward()
    model.reshard()
    assert model.weight.grad.full_tensor() == 257 and model.weight.grad.dtype == FP32


# Compute, by parameter -------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.inner = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.norm = nn.LayerNorm(4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: param.dtype for name, param in self.named_parameters()}
        self.seen["x"] = x.dtype
        return self.norm((x @ self.inner).to(self.norm.weight.dtype))


def keep_norms(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.ndim == 1 else None


def train_normed(model: Normed, num_microbatches: int = 1) -> list[float]:
    losses = []
    for step in range(3):
        for microbatch in range(num_microbatches):
            if isinstance(model, fsdp.FSDPModule):
                model.set_requires_gradient_sync(microbatch == num_microbatches - 1)
            x = batch(num_microbatches * step + microbatch, dist.get_rank())
            loss = model(x).float().square().mul(x).sum()
            loss.backward()
            losses.append(loss.item())
        if not isinstance(model, fsdp.FSDPModule):
            for param in model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        with torch.no_grad():  # optimizers take no gradients of another dtype
            for param in model.parameters():
                param.sub_(0.1 * param.grad.to(param.dtype))
                param.grad = None
    return losses


class NormedByHand(Normed):
    """Casts the weight in forward, hence its gradient to fp32 in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm((x.to(BF16) @ self.inner.to(BF16)).float())


@pytest.mark.parametrize(("reshard", "ranks"), [(None, 2), (True, 2), (None, 1)])
@on_ranks("ranks")
def test_parameters_may_compute_in_their_own_dtype(reshard: bool | None) -> None:
    calls: list[tuple[int, ...]] = []

    def override(param: nn.Parameter) -> torch.dtype | None:
        calls.append(tuple(param.shape))
        return keep_norms(param)

    model = Normed()
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=override)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    assert train_normed(model) == train_normed(NormedByHand())
    copied = copy.deepcopy(model)
    copied(batch(0, 0))
    seen = {"inner": BF16, "norm.weight": FP32, "norm.bias": FP32, "x": BF16}
    assert copied.seen == model.seen == seen and calls == [(4, 4), (4,), (4,)]


@pytest.mark.parametrize(
    ("answer", "got"),
    [(FP16, "torch.float16"), (torch.int64, "torch.int64"), ("fp32", "str: 'fp32'")],
)
@on_ranks(2)
def test_what_may_not_be_returned_is_refused_by_name_on_all_ranks(answer: object, got: str) -> None:
    model = Normed()
    before = dict(model.named_parameters())

    def override(param: nn.Parameter) -> Any:
        return answer if param.ndim == 1 else None

    with pytest.raises(ValueError) as caught:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=override))
    assert str(caught.value) == (
        "Expected param_dtype_override_fn to return None, param_dtype (torch.bfloat16) or the "
        f"parameter's own dtype (torch.float32) for parameter 'norm.weight', got {got}"
    )
    after = dict(model.named_parameters())
    assert type(model) is Normed and all(after[name] is before[name] for name in before)


def test_an_override_that_fails_says_for_which_parameter() -> None:
    def override(param: nn.Parameter) -> torch.dtype | None:
        raise KeyError("no dtype for it")

    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=override)
    with fake_ranks(2), pytest.raises(KeyError) as caught:
        fully_shard(Normed(), mp_policy=policy)
    said = ["raised by param_dtype_override_fn for parameter 'inner'"]
    assert caught.value.__notes__ == said


FACT = "parameter '{0}' of the root group: shape {1}, torch.float32, Shard(0), trainable, on cpu"
MISMATCH = f"Expected the same model on all ranks, got on rank 0: {FACT}; on rank 1: {FACT}, {{2}}"


@pytest.mark.parametrize("differs", ["override", "grad_dtype"])
@on_ranks(2, timeout=30)
def test_ranks_that_ask_for_different_dtypes_all_raise(differs: str) -> None:
    model: Any = Normed() if differs == "override" else Scaled()
    keeps, policy = dist.get_rank() == 1, MixedPrecisionPolicy()
    if differs == "override":
        policy = MixedPrecisionPolicy(
            BF16, param_dtype_override_fn=lambda p: FP32 if keeps and p.ndim == 1 else None
        )
    elif keeps:
        model.second.grad_dtype = BF16
    fully_shard(model, mp_policy=policy)
    with pytest.raises(RankMismatchError) as caught:
        model(batch(0, 0))
    assert str(caught.value) == (
        MISMATCH.format("norm.weight", [4], "computed in torch.float32")
        if differs == "override"
        else MISMATCH.format("second", [5, 4], "gradients in torch.bfloat16")
    )


# As torch's own ------------------------------------------------------------------------------


OF_TORCH: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = {
    "no policy": ((), {}, ()),
    "reduce_dtype omitted": ((BF16,), {}, ()),
    "reduce_dtype omitted, grad_dtype of one": ((BF16,), {}, (BF16,)),
    "gradients of any dtype": ((BF16,), {}, (None, None, None)),
    "reduced in bf16": ((BF16, BF16), {}, ()),
    "norms kept": ((BF16,), {"param_dtype_override_fn": keep_norms}, ()),
    "norms kept, reduced in fp32": ((BF16, FP32), {"param_dtype_override_fn": keep_norms}, ()),
}


@needs_new_reduce_dtype
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("case", list(OF_TORCH))
@on_ranks(2)
def test_losses_are_those_of_torch_bit_by_bit(case: str, num_microbatches: int) -> None:
    dtypes, options, asked = OF_TORCH[case]
    losses = []
    for shard, policy in (
        (fsdp.fully_shard, fsdp.MixedPrecisionPolicy),
        (fully_shard, MixedPrecisionPolicy),
    ):
        model: Any = Normed()
        for param, dtype in zip(model.parameters(), asked, strict=False):
            param.grad_dtype = dtype
        shard(model, mp_policy=policy(*dtypes, **options))
        losses.append(train_normed(model, num_microbatches))
    assert losses[0][0] != losses[0][-1]
    assert losses[0] == losses[1]


# The grad_dtype of a parameter stays when that is converted ---------------------------------------


VALUES = torch.arange(16.0).view(4, 4) / 7


def make(asked: torch.dtype = BF16) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].weight.grad_dtype = asked
    return model


def fill(model: nn.Sequential) -> nn.Sequential:
    model.load_state_dict({"0.weight": VALUES})
    return model


def assigned(model: nn.Sequential) -> nn.Sequential:
    model.load_state_dict({"0.weight": VALUES.clone()}, assign=True)
    return model


def swapped(change: Callable[[nn.Sequential], nn.Sequential]) -> Any:
    def changed(model: nn.Sequential) -> nn.Sequential:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return change(model)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return changed


def part(model: nn.Sequential) -> nn.Sequential:
    """Convert a module whose parameters belong to the group of the one around it."""
    model[0].double()
    return model


def twice(model: nn.Sequential) -> nn.Sequential:
    return model.double().float()


CHANGES: dict[str, Callable[[nn.Sequential], nn.Sequential]] = {
    "double": nn.Module.double,
    "double, swapped": swapped(nn.Module.double),
    "double, a part": part,
    "double and back": twice,
    "to_empty": lambda model: fill(model.to_empty(device="cpu")),
    "load": fill,
    "load, swapped": swapped(fill),
    "assign": assigned,
    "deepcopy": copy.deepcopy,
    "deepcopy and double": lambda model: copy.deepcopy(model).double(),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle and double": lambda model: pickle.loads(pickle.dumps(model)).double(),
}


def gradient(model: nn.Sequential) -> tuple[torch.dtype | None, torch.dtype, list[float]]:
    """Return what is asked, the dtype of the gradient and its first row, which bf16 rounds."""
    x = torch.full((1, 4), 1 / 3, dtype=model[0].weight.dtype)
    model(x).sum().backward()
    model.reshard()
    weight = model[0].weight
    assert weight.grad is not None
    return weight.grad_dtype, weight.grad.dtype, full(weight.grad)[0].double().tolist()


def change(name: str, when: str) -> object:
    model = make(FP32 if when == "asked later" else BF16)
    fill(fully_shard(model))
    if when == "after a step":
        gradient(model)
        model.zero_grad()
    elif when == "asked later":
        model[0].weight.grad_dtype = BF16
    model = CHANGES[name](model)
    first = gradient(model)
    model.zero_grad()
    assert gradient(model) == first
    return first


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("when", ["before a step", "after a step", "asked later"])
@pytest.mark.parametrize("num_ranks", [2, 1])
def test_what_was_asked_is_kept(name: str, when: str, num_ranks: int) -> None:
    if (name, when) != ("double, a part", "asked later"):
        third = float(torch.tensor(1 / 3).to(BF16))
        found = run_ranks(change, num_ranks, name, when)
        assert found == [(BF16, BF16, [third] * 4)] * num_ranks


# Gradients that are there when a model is converted -----------------------------------------------

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cpu": lambda model: model.cpu(),
    "to": lambda model: model.to("cpu", BF16),
    "double": nn.Module.double,
    "half": nn.Module.half,
    "own": lambda model: model._apply(lambda tensor: tensor.clone()),
}


def two_layers(asked: torch.dtype | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False)).to(BF16)
    for param in model.parameters():
        param.grad_dtype = asked
    return model


def sharded_layers(asked: torch.dtype | None, *, syncs: bool) -> Any:
    model = two_layers(asked)
    for module in (model[0], model):
        fully_shard(module)  # type: ignore[arg-type]
    model.set_requires_gradient_sync(syncs)  # type: ignore[operator]
    return model


def backward(model: nn.Sequential, value: float) -> None:
    model(torch.full((1, 4), value, dtype=model[0].weight.dtype)).sum().backward()


def state_of(model: nn.Sequential) -> list[Any]:
    state = []
    for param in model.parameters():
        grad = None if param.grad is None else full(param.grad)
        state.append((param.dtype, param.grad_dtype, full(param).detach().clone(), grad))
    return state


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("syncs", [True, False])
@on_ranks(2)
def test_a_conversion_keeps_gradients_and_their_dtype(name: str, syncs: bool) -> None:
    for asked in (FP32, None):
        model, plain = sharded_layers(asked, syncs=syncs), two_layers(asked)
        for one in (model, plain):
            backward(one, 1 / 3)
        kept = [param.grad.float().clone() for param in plain.parameters()]
        for one in (model, plain):
            CONVERSIONS[name](one)
        grads = [full(param.grad) for param in model.parameters()]
        torch.testing.assert_close([grad.float() for grad in grads], kept, rtol=0.0, atol=0.0)
        assert [p.grad_dtype for p in model.parameters()] == [
            p.grad_dtype for p in plain.parameters()
        ]
        model.set_requires_gradient_sync(True)
        for one in (model, plain):
            backward(one, 1.0)
        model.reshard()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.dtype == other.dtype and param.grad.dtype == (asked or param.grad.dtype)
            torch.testing.assert_close(
                full(param.grad), other.grad, check_dtype=False, rtol=1e-2, atol=1e-2
            )


@pytest.mark.parametrize("fails", ["function", "exchange"])
@on_ranks(2)
def test_a_conversion_that_fails_changes_nothing(fails: str) -> None:
    model, count = sharded_layers(FP32, syncs=True), 0
    backward(model, 1 / 3)
    model.reshard()
    before = state_of(model)
    last = weakref.ref(model[1].weight) if fails == "exchange" else None  # torch refuses it

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if fails == "function" and count == 2:
            raise RuntimeError("Couldn't swap")
        return tensor.double()

    with pytest.raises(RuntimeError, match="Couldn't swap"):
        model._apply(convert)
    after = state_of(model)
    for old, new in zip(before, after, strict=True):
        assert old[:2] == new[:2]
        assert torch.equal(old[2], new[2]) and torch.equal(old[3], new[3])
    del last
    backward(model.double(), 1 / 3)
