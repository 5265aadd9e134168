"""Trainable parameters that stay plain: ignored ones silently, others with a warning."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from composable_shard import fully_shard
from composable_shard.testing import fake_ranks, run_ranks


def late(model: nn.Module) -> list[str]:
    """Run forward twice; return the warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4))
    return [str(one.message) for one in seen]


def sharded(**options: object) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], **options)  # type: ignore[call-overload]
    return fully_shard(model, **options)  # type: ignore[call-overload, no-any-return]


def test_a_parameter_that_is_added_later_is_warned_of_once() -> None:
    with fake_ranks(2):
        model = sharded()
        model[0].scale = nn.Parameter(torch.ones(4))
        model.append(nn.Linear(4, 4, bias=False))
        assert late(model) == [
            "Expected all trainable parameters to be sharded or ignored, got ['0.scale', "
            "'2.weight'], added after fully_shard, which each rank trains by itself; add them "
            "before it, shard new adapters of a sharded base alone, or pass them as ignored_params "
            "if their gradients are averaged elsewhere"
        ]


def test_no_warning_where_nothing_is_wrong() -> None:
    with fake_ranks(2):
        assert late(sharded()) == []
        frozen = sharded()
        frozen[0].scale = nn.Parameter(torch.ones(4), requires_grad=False)
        assert late(frozen) == []
        gathered = sharded()
        gathered[0].unshard()
        assert late(gathered) == []


def test_no_warning_of_what_stands_where_something_was_ignored() -> None:
    with fake_ranks(2):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, ignored_params={model[0].bias})
        model.to_empty(device="cpu")
        assert late(copy.deepcopy(model)) == []
        model[0].load_state_dict({"bias": torch.ones(4)}, strict=False, assign=True)
        assert late(model) == []


def test_no_warning_of_what_was_ignored() -> None:
    with fake_ranks(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], ignored_params={model[0].bias})
        fully_shard(model, ignored_params={model[0].bias})
        assert weakref.getweakrefcount(model[0].bias) == 0  # or torch cannot load into it
        assert late(model) == []


def test_no_warning_on_one_rank() -> None:
    with fake_ranks(1):
        model = sharded()
        model[0].scale = nn.Parameter(torch.ones(4))
        assert late(model) == []


# Only children are sharded ----------------------------------------------------------------------


class Model(nn.Module):
    """Two layers and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale  # type: ignore[no-any-return]


def without_root() -> Model:
    model = Model()
    fully_shard(model.body[0])
    fully_shard(model.body)
    return model


def steps(
    model: nn.Module, *params: Iterable[nn.Parameter], forward: Callable[..., torch.Tensor] = Model
) -> list[str]:
    """Train two steps by an optimizer of each of ``params``; return the warnings."""
    optimizers = [torch.optim.SGD(list(some), lr=0.1) for some in params or [model.parameters()]]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            (model if forward is Model else forward)(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [str(one.message) for one in seen]


def drifting(*names: str) -> str:
    return (
        f"Expected all trainable parameters to be sharded or ignored, got {list(names)}, outside "
        "of all sharded modules, which each rank trains by itself: they drift apart; call "
        "fully_shard on the outermost module after its children, with them as ignored_params if "
        "their gradients are averaged elsewhere"
    )


def test_parameters_of_a_root_that_was_never_sharded_are_warned_of_once() -> None:
    with fake_ranks(2):
        model = without_root()
        assert steps(model) == [drifting("scale", "head.weight", "head.bias")]
        assert steps(fully_shard(without_root())) == []


def test_they_are_named_within_the_outermost_module() -> None:
    with fake_ranks(2):
        outer = nn.Sequential(without_root())
        assert steps(outer) == [drifting("0.scale", "0.head.weight", "0.head.bias")]


def test_an_optimizer_that_has_none_but_them_is_warned_of() -> None:
    with fake_ranks(2):
        model = without_root()
        plain = [*model.head.parameters(), model.scale]
        assert steps(model, model.body.parameters(), plain) == [
            drifting("head.weight", "head.bias", "scale")
        ]


def test_they_are_warned_of_when_they_first_have_a_gradient() -> None:
    with fake_ranks(2):
        model = without_root()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.body(torch.ones(2, 4)).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        model(torch.ones(2, 4)).sum().backward()
        with pytest.warns(UserWarning) as seen:
            optimizer.step()
        assert [str(one.message) for one in seen] == [drifting("scale", "head.weight", "head.bias")]


def test_parts_that_no_module_holds_together_are_warned_of_where_one_optimizer_does() -> None:
    with fake_ranks(2):
        body, head = fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)
        both = [*body.parameters(), *head.parameters(), free := nn.Parameter(torch.ones(4))]
        assert steps(body, both, forward=lambda x: head(body(x)) * free) == [
            drifting("weight", "bias", "one of shape [4]")
        ]


@pytest.mark.matrix
def test_other_threads_may_make_tuples_meanwhile() -> None:
    """A tuple of unknown length is cut to its length by who makes it, if nobody else holds it."""
    made, failed, is_over = [0] * 3, [], threading.Event()

    def make(place: int) -> None:
        try:
            while not is_over.is_set():
                made[place] += len(tuple(one for one in range(60)))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=make, args=(place,)) for place in range(len(made))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        with fake_ranks(2):
            for _ in range(3):
                assert steps(without_root()) == [drifting("scale", "head.weight", "head.bias")]
    finally:
        is_over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert failed == [] and all(made)


def test_no_warning_of_what_has_nothing_to_do_with_sharded_modules() -> None:
    with fake_ranks(2):
        assert steps(fully_shard(nn.Linear(4, 4))) == []
        assert steps(nn.Linear(4, 4)) == []


def test_no_warning_of_what_is_ignored_hooked_or_not_trained() -> None:
    with fake_ranks(2):
        frozen = without_root()
        for param in (*frozen.head.parameters(), frozen.scale):
            param.requires_grad_(False)
        assert steps(frozen) == []
        ignored = without_root()
        assert steps(fully_shard(ignored, ignored_params={ignored.scale})) == []
        hooked = without_root()
        for param in (*hooked.head.parameters(), hooked.scale):
            param.register_hook(lambda grad: grad)
        assert steps(hooked) == []


def averaged_by_torch() -> tuple[list[str], list[str]]:
    wrapped = without_root()
    wrapped.scale.requires_grad_(False)
    wrapped.head = DistributedDataParallel(wrapped.head)
    replicated = without_root()
    replicated.scale.requires_grad_(False)
    replicate(replicated.head)
    return steps(wrapped), steps(replicated)


def test_no_warning_of_what_torch_averages() -> None:
    assert run_ranks(averaged_by_torch, 2) == [([], [])] * 2


def test_no_warning_of_roots_that_are_several_on_purpose() -> None:
    with fake_ranks(2):
        model = Model()
        fully_shard([model.body, model.head])
        model.scale.requires_grad_(False)
        assert steps(model) == []


def test_no_warning_of_a_plain_root_on_one_rank() -> None:
    with fake_ranks(1):
        assert steps(without_root()) == []
