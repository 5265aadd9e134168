"""Blocks that are compiled and sharded: the graphs and the numbers of compiled unsharded ones.

The compiled region starts at the block's own forward, so blocks of a kind share one graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Block, Net, assert_same, average_gradients, full, own_input
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

NUM_BLOCKS = 2


class Recorder:
    """A backend that notes each graph it compiles and each run of one."""

    def __init__(self, name: str) -> None:
        from torch._dynamo.backends.registry import lookup_backend  # takes seconds, as all of it

        self.backend = lookup_backend(name)
        self.graphs: list[int] = []
        self.num_runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        compiled = self.backend(graph, inputs)

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return compiled(*args)

        return run


def cleared_counters() -> Any:
    import torch._dynamo.utils

    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


def compile_blocks(model: Net, form: str, fullgraph: bool, backend: Recorder) -> None:
    for index, block in enumerate(model.blocks):
        if form == "function":
            wrapped = torch.compile(block, backend=backend, fullgraph=fullgraph)
            model.blocks[index] = wrapped  # type: ignore[assignment]
        else:
            block.compile(backend=backend, fullgraph=fullgraph)


def shard(model: Net, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}


def compile_first_on_one_rank(form: str, backend: str) -> None:
    """Let the others find on disk what one rank has compiled: inductor compiles for long."""
    if dist.get_rank() == 0:
        with torch.random.fork_rng():  # ranks draw the same weights afterwards
            model = Net(1)
        compile_blocks(model, form, True, Recorder(backend))
        model(own_input(0)).square().sum().backward()
        with torch.no_grad():
            model.eval()(own_input(0))
    dist.barrier()


def train(
    form: str, backend: str, fullgraph: bool, options: dict[str, Any], compiled_last: bool = False
) -> dict[str, Any]:
    """Train a sharded and an unsharded model, both compiled; compare, and return the counts."""
    if backend == "inductor":
        compile_first_on_one_rank(form, backend)
    counters = cleared_counters()
    reference = Net(NUM_BLOCKS)
    model = copy.deepcopy(reference)
    ours, theirs = Recorder(backend), Recorder(backend)
    compile_blocks(reference, form, fullgraph, theirs)
    if compiled_last:
        shard(model, **options)
    compile_blocks(model, form, fullgraph, ours)
    if not compiled_last:
        shard(model, **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    num_graphs, events = [], []
    for step in range(3):
        with record_events(model, "all_gather", "reduce_scatter") as recorded:
            loss = model(own_input(step)).square().sum()
            loss.backward()
        expected = reference(own_input(step)).square().sum()
        expected.backward()
        average_gradients(reference.parameters())
        assert_same(loss, expected.detach())
        wanted = by_name(reference)
        for name, param in by_name(model).items():
            assert_same(param.grad, wanted[name].grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        num_graphs.append(len(ours.graphs))
        events.append([event for event, _ in recorded])
    runs = (ours.num_runs, theirs.num_runs)
    for one in (model, reference):
        one.eval()
    with torch.no_grad():
        assert_same(model(own_input(8)), reference(own_input(8)))
    return {
        "graphs": num_graphs,
        "nodes": (sorted(ours.graphs), sorted(theirs.graphs)),
        "runs": runs,
        "compiled": {one.co_name for one in torch._dynamo.utils.get_compilation_metrics()},
        "breaks": dict(counters["graph_break"]),
        "recompiles": dict(counters["recompiles"]),
        "gathers": [of_step.count("all_gather") for of_step in events],
        "reductions": [of_step.count("reduce_scatter") for of_step in events],
    }


def assert_counts(seen: dict[str, Any], gathers: list[int]) -> None:
    assert seen["compiled"] <= {"forward", None}, seen  # no function that the hooks call
    ours, theirs = seen["nodes"]
    assert ours == theirs and len(ours) == 2, seen  # for all blocks: with gradients and without
    assert seen["graphs"] == [1] * 3, seen  # nothing is compiled again
    assert seen["runs"] == (3 * NUM_BLOCKS,) * 2, seen
    assert seen["breaks"] == {} and seen["recompiles"] == {}, seen
    assert seen["gathers"] == gathers and seen["reductions"] == [1 + NUM_BLOCKS] * 3, seen


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("form", ["function", "method"])
def test_compiled_blocks_train_as_unsharded(
    form: str, fullgraph: bool, reshard: bool | None
) -> None:
    options = {"reshard_after_forward": reshard}
    for seen in run_ranks(train, 2, form, "aot_eager", fullgraph, options, timeout=120):
        assert_counts(seen, [3] * 3 if reshard is False else [5] * 3)


def test_blocks_that_are_sharded_and_then_compiled() -> None:
    for seen in run_ranks(train, 2, "method", "aot_eager", True, {}, True, timeout=120):
        assert_counts(seen, [5] * 3)


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["method", pytest.param("function", marks=pytest.mark.matrix)])
def test_blocks_compiled_by_inductor(form: str) -> None:
    for seen in run_ranks(train, 2, form, "inductor", True, {}, timeout=280):
        assert_counts(seen, [5] * 3)


class CastNet(Net):
    """The oracle: blocks compute in bf16, cast by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.inp.weight, self.inp.bias)
        for block in self.blocks:
            lent = {name: param.bfloat16() for name, param in block.named_parameters()}
            x = torch.func.functional_call(block, lent, (x.bfloat16(),)).float()
        return nn.functional.linear(x, self.out.weight, self.out.bias)


@on_ranks(2, timeout=120)
def test_compiled_blocks_under_mixed_precision() -> None:
    counters = cleared_counters()
    reference = CastNet(NUM_BLOCKS)
    model = Net(NUM_BLOCKS)
    model.load_state_dict(reference.state_dict())
    backend = Recorder("aot_eager")
    compile_blocks(model, "method", True, backend)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model)
    for step in range(3):
        loss = model(own_input(step)).square().sum()
        loss.backward()
        expected = reference(own_input(step)).square().sum()
        expected.backward()
        average_gradients(reference.parameters())
        torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-3)
        for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), wanted.grad, rtol=5e-2, atol=2e-2)
        model.zero_grad()
        reference.zero_grad()
    seen = {"graphs": 1, "breaks": {}}
    assert ({"graphs": len(backend.graphs), "breaks": dict(counters["graph_break"])}) == (seen)


@on_ranks(2)
def test_a_compiled_module_keeps_the_names_of_its_parameters() -> None:
    model = nn.Sequential(torch.compile(Block(), backend="eager"))
    fully_shard(model[0])
    fully_shard(model)
    assert ([name for name, _ in model.named_parameters()][:2]) == (
        ["0._orig_mod.norm.weight", "0._orig_mod.norm.bias"]
    )
