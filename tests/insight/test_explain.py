"""What explain says in words: why, what is worth a look, and in which forms."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable_shard import MixedPrecisionPolicy, explain, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks
from tests.insight.models import BF16, Stack, shard

TEXT = """\
Groups: the bytes of one group on this rank
  group                           modules  placements     parameters  elements  sharded  gathered
  (root)                          Stack    Shard(0) of 2           3    67.6 k  132 KiB   264 KiB
  layers.0 to layers.1 (2 alike)  Layer    Shard(0) of 2           4     197 k  385 KiB   385 KiB

One step on this rank: launches x messages per launch, bytes sent, bytes copied
  group                           forward gathers  backward gathers      reductions  all-reduces      sent    copied
  (root)                           1 x 2, 132 KiB                 -  1 x 2, 132 KiB            -   264 KiB  16.1 KiB
  layers.0 to layers.1 (2 alike)   1 x 3, 193 KiB    1 x 3, 193 KiB  1 x 3, 385 KiB            -   771 KiB  1.13 MiB
  all groups                                                                                      1.76 MiB  2.28 MiB

(root)
  - backward needs the parameters of the root first, so they are kept
  - packed (after.weight, after.bias), 8.03 KiB: parameters too small for messages of their own share one, and are copied out of it
  - packed (after.weight, after.bias), 8.05 KiB: gradients too small for messages of their own share one, and one flag for each gradient tells whether any rank computed it

layers.0 to layers.1 (2 alike)
  - the parameters are freed after forward and gathered again for backward
  - cast (layers.0.up.weight, layers.0.up.bias, layers.0.down.weight and 1 more), 193 KiB, 2 times a step: shards of float32 are cast to bfloat16 before each gather, so fewer bytes travel
  - packed (layers.0.up.bias, layers.0.down.bias), 1.25 KiB, 2 times a step: parameters too small for messages of their own share one, and are copied out of it
  - cast (layers.0.up.weight, layers.0.down.weight), 768 KiB: gradients are cast to float32, in which they are summed
  - packed (layers.0.up.bias, layers.0.down.bias), 2.53 KiB: gradients too small for messages of their own share one, and one flag for each gradient tells whether any rank computed it"""  # noqa: E501


def model_of_text() -> nn.Module:
    model = Stack()
    for layer in model.layers:
        fully_shard(layer, mp_policy=BF16)
    return fully_shard(model)


def test_the_text() -> None:
    with fake_ranks(2):
        assert str(explain(model_of_text())) == TEXT


def test_the_other_forms() -> None:
    from rich.console import Console

    with fake_ranks(2):
        explanation = explain(model_of_text())
    plain = json.loads(json.dumps(explanation.to_dict()))
    assert [group["name"] for group in plain["groups"]] == ["(root)", "layers.0", "layers.1"]
    assert plain["groups"][1]["parameters"][0] == {
        "name": "layers.0.up.weight",
        "shape": [384, 256],
        "dtype": "float32",
        "placements": ["Shard(0)"],
        "num_shards": 2,
        "num_replicas": 1,
        "is_trained": True,
        "sharded_nbytes": 192 * 256 * 4,
        "gathered_nbytes": 384 * 256 * 2,
        "travels": "in place",
    }
    assert plain["groups"][1]["traffic"]["forward_gathers"] == {
        "launches": 1,
        "messages": 3,
        "nbytes": (384 * 256 * 2 + 384 + 256) * 2 // 2,
    }
    assert explanation._repr_html_().startswith("<pre>Groups: the bytes of one group")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(explanation)
    assert "layers.0 to layers.1 (2 alike)" in console.export_text()


def test_nothing_is_gathered_or_changed() -> None:
    with fake_ranks(4):
        model = shard(Stack())
        before = {name: (id(param), param._version) for name, param in model.named_parameters()}
        with record_events(model) as events:
            assert explain(model) == explain(model)
        assert events == []
        assert {n: (id(p), p._version) for n, p in model.named_parameters()} == before


def test_what_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        explain(nn.Linear(2, 2))
    assert str(caught.value) == (
        "Expected sharded modules in Linear, got none; apply fully_shard to it"
    )


def reasons(model: Any, group: int = 1) -> tuple[str, ...]:
    return explain(model).groups[group].reasons


def test_reasons() -> None:
    with fake_ranks(4):
        assert reasons(shard(Stack(), reshard_after_forward=False)) == (
            "reshard_after_forward=False keeps the parameters until backward",
        )
        assert reasons(shard(Stack(), reshard_after_forward=2)) == (
            "each of 2 neighbours keeps a part, which backward gathers",
        )
        model = shard(Stack())
        model.set_requires_gradient_sync(False)
        assert reasons(model)[1:] == (
            "gradient sync is off: gradients stay unsharded on this rank until you turn it on",
        )
        assert explain(model).groups[1].traffic.reductions.launches == 0
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        assert reasons(model, 0) == ("the group has no parameters of its own, so it sends nothing",)
        assert reasons(model, 2) == (
            "the last group in forward is first in backward, so it stays from step 2 on",
        )
    with fake_ranks(1):
        assert reasons(shard(Stack()))[1:] == (
            "one rank holds each parameter whole, so nothing is gathered",
        )


def advice(model: nn.Module) -> dict[str, tuple[tuple[str, ...], str, str]]:
    return {one.kind: (one.about, one.problem, one.remedy) for one in explain(model).advice}


def test_a_model_without_flaws() -> None:
    with fake_ranks(2):
        assert explain(shard(Stack())).advice == ()


def with_a_small_group() -> nn.Module:
    model = Stack()
    model.small = fully_shard(nn.Linear(16, 16))
    return shard(model)


def summed_in_bf16() -> nn.Module:
    return fully_shard(Stack(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))


ADVICE: dict[str, tuple[int, Callable[[], nn.Module], tuple[str, ...], str, str]] = {
    "giant root": (
        *(2, lambda: fully_shard(Stack(layers=6)), ("(root)",)),
        "the root group gathers 4.77 MiB, 100% of the parameters, at once, and nothing overlaps "
        "with it",
        "shard each Layer (6 of them) first: apply_fully_shard(model, Layer)",
    ),
    "small group": (
        *(2, with_a_small_group, ("small",)),
        "1 group of at most 1.06 KiB: gathers are mostly latency",
        "shard the module around instead, or several in one list: fully_shard([a, b])",
    ),
    "uneven rows": (
        *(2, lambda: fully_shard(nn.Linear(512, 257, bias=False)), ("weight",)),
        "257 rows over 2 ranks are padded by 2 KiB, which copies the gradient",
        "make it 258 rows, or shard another dim by shard_placement_fn",
    ),
    "narrow sums": (
        *(8, summed_in_bf16, ("(root)",)),
        "8 ranks sum gradients in bfloat16, and every sum is rounded",
        "MixedPrecisionPolicy(reduce_dtype=torch.float32), for twice the bytes of reductions",
    ),
}


@pytest.mark.parametrize("kind", ADVICE)
def test_advice(kind: str) -> None:
    num_ranks, build, *said = ADVICE[kind]
    with fake_ranks(num_ranks):
        assert advice(build())[kind] == tuple(said)


def test_what_is_whole_on_every_rank() -> None:
    with fake_ranks(2):
        model = Stack()
        model.register_buffer("table", torch.zeros(1000, 1000))
        left = {model.before.weight, model.after.bias}
        model.after.bias.requires_grad_(False)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model, ignored_params=left)
        found = [
            (one.about, one.problem, one.remedy)
            for one in explain(model).advice
            if one.kind.startswith("unsharded")
        ]
    assert found == [
        (
            ("before.weight",),
            "not sharded: 1 parameter of 256 KiB; gradients are not averaged across ranks",
            "apply fully_shard to a module around them, or reduce their gradients yourself",
        ),
        (
            ("after.bias",),
            "not sharded: 1 parameter of 32 B",
            "apply fully_shard to a module around them",
        ),
        (
            ("table",),
            "ranks hold 1 buffer of 3.81 MiB whole",
            "compute them when they are needed, share one among modules, or narrow their dtype",
        ),
    ]
