"""When ``fully_shard`` raises, the module is as it was and may be sharded rightly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composable_shard import FSDPModule, fully_shard
from composable_shard.testing import fake_ranks

HOOKS = [
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
]


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Describe everything about a module that sharding might change."""
    described: dict[str, Any] = {}
    for name, child in module.named_modules():
        described[name] = {
            "class": type(child),
            "attributes": {
                key: value for key, value in child.__dict__.items() if not key.startswith("_")
            },
            "keys": list(child.__dict__),
            "parameters": {key: id(param) for key, param in child._parameters.items()},
            "buffers": {key: id(buffer) for key, buffer in child._buffers.items()},
            "hooks": {key: list(getattr(child, key)) for key in HOOKS},
            "values": [param.detach().clone() for param in child._parameters.values()],
        }
        for key, param in child._parameters.items():
            described[name][key] = dict(param.__dict__), param.requires_grad, param.grad
    return described


def assert_unchanged(module: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(module)
    for name, described in before.items():
        values = zip(described.pop("values"), after[name].pop("values"), strict=True)
        assert all(a.is_meta or torch.equal(a, b) for a, b in values), name
    assert after == before


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def make_dtensor(model: Model) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()])
    model.second.weight = nn.Parameter(weight)


def tie_to_a_group_that_has_run(model: Model) -> None:
    other = nn.Linear(4, 4)
    other.weight = model.second.weight
    model.others = [fully_shard(other)]
    other(torch.ones(2, 4))
    other.reshard()  # type: ignore[operator]


def half_a_protocol(model: Model) -> None:
    class Half(torch.Tensor):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...

    model.second.weight = nn.Parameter(torch.zeros(4, 4).as_subclass(Half))


def nothing(model: Model) -> None:
    pass


def fail_on_second_weight(param: nn.Parameter) -> Any:
    if param.shape == (4,):
        raise KeyError("placement")
    return Shard(0)


CASES: list[tuple[Callable[[Model], None], dict[str, Any], type[Exception]]] = [
    (nothing, {"mesh": "cpu"}, TypeError),
    (nothing, {"reshard_after_forward": "yes"}, ValueError),
    (nothing, {"mp_policy": torch.bfloat16}, TypeError),
    (nothing, {"offload_policy": object()}, TypeError),
    (nothing, {"ignored_params": []}, TypeError),
    (nothing, {"shard_placement_fn": lambda param: 0}, ValueError),
    (nothing, {"shard_placement_fn": lambda param: Shard(1)}, ValueError),
    (nothing, {"shard_placement_fn": fail_on_second_weight}, KeyError),
    (make_dtensor, {}, ValueError),
    (tie_to_a_group_that_has_run, {}, ValueError),
    (half_a_protocol, {}, TypeError),
]


@pytest.mark.parametrize("with_sharded_child", [False, True])
@pytest.mark.parametrize(("prepare", "kwargs", "error"), CASES)
def test_a_refused_module_is_as_it_was(
    prepare: Callable[[Model], None],
    kwargs: dict[str, Any],
    error: type[Exception],
    with_sharded_child: bool,
) -> None:
    with fake_ranks(2):
        model = Model()
        kept: list[object] = []
        prepare(model)
        if with_sharded_child:
            fully_shard(model.first)
            kept.append(model.first.weight)
        before = snapshot(model)
        with pytest.raises(error):
            fully_shard(model, **kwargs)
        assert_unchanged(model, before)
        assert type(model) is Model
        assert isinstance(model.first, FSDPModule) == with_sharded_child


def refuse(model: nn.Module, text: str, *args: Any, **kwargs: Any) -> None:
    before = snapshot(model)
    with pytest.raises(ValueError, match=text):
        fully_shard(*args, **kwargs)
    assert_unchanged(model, before)


def test_a_refused_mesh_and_a_second_call_leave_the_module() -> None:
    with fake_ranks(4):
        model = Model()
        refuse(model, "or of 2 named axes", model, mesh=init_device_mesh("cpu", (2, 2)))
        fully_shard(model)
        refuse(model, "not sharded", model)
        refuse(model, "not sharded", [nn.Linear(2, 2), model])
        refuse(model, "'weight' to be sharded once", model.first)
        assert type(model.first) is nn.Linear


def test_a_refused_list_leaves_every_member() -> None:
    with fake_ranks(2):
        good, bad = nn.Linear(4, 4), Model()
        make_dtensor(bad)
        before = snapshot(good), snapshot(bad)
        with pytest.raises(ValueError, match="parts of one mesh"):
            fully_shard([good, bad])
        with pytest.raises(TypeError, match="index 2"):
            fully_shard([good, bad, None])
        assert_unchanged(good, before[0])
        assert_unchanged(bad, before[1])
