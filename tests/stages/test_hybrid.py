"""``sharding="hybrid"``: the optimizer states are sharded over both axes of a hybrid mesh."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import nets
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nets import Checkpointed, Gated, Net, average_gradients, both, full, shard_net
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from two_tensors import two_tensor_mlp

import composable_shard as library
from composable_shard.core.transport.channel import Channel
from composable_shard.insight.events import record_events
from composable_shard.optim import Owned, Sharded, flat, with_layout
from composable_shard.testing import fake_ranks, run_ranks

NUM_GROUPS, NUM_MICROBATCHES = 3, 3
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, foreach=True)
Pair = tuple[Any, Any]  # an unsharded model, and its sharded copy


def own_input(step: int = 0) -> torch.Tensor:
    return nets.own_input(step).double()


def mesh_of(*extents: int) -> DeviceMesh:
    return init_device_mesh("cpu", extents or (2, 2), mesh_dim_names=("replicate", "shard"))


def two_nets(*extents: int, make: Any = Net, **options: Any) -> Pair:
    reference = make().double()
    options = {"mesh": mesh_of(*extents), "sharding": "hybrid", **options}
    return reference, shard_net(copy.deepcopy(reference), **options)


def assert_parity(pair: Pair) -> None:
    """Assert that parameters and gradients are equal, but for rounding."""
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
    for param, expected in zip(pair[1].parameters(), pair[0].parameters(), strict=True):
        close(*both(param.detach(), expected.detach()))
        assert (param.grad is None) == (expected.grad is None)
        if param.grad is not None:
            assert param.grad.placements == param.placements
            close(*both(param.grad, expected.grad))


def assert_close_outputs(pair: Pair) -> None:
    torch.testing.assert_close(pair[1](own_input(7)), pair[0](own_input(7)))


def run(pair: Pair, step: int, *args: Any) -> None:
    """Run one microbatch of both models."""
    for network in pair:
        network(own_input(step), *args).square().sum().backward()


def backward(pair: Pair, step: int) -> None:
    for microbatch in range(NUM_MICROBATCHES):
        run(pair, 10 * step + microbatch)


def assert_synchronized_parity(pair: Pair) -> None:
    average_gradients(pair[0].parameters())
    pair[1].synchronize_gradients()
    assert_parity(pair)


def step_of(pair: Pair, optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
    assert_parity(pair)
    for optimizer in optimizers:
        optimizer.zero_grad()


def train(pair: Pair, optimizers: Any, steps: Any = range(3)) -> None:
    for step in steps:
        backward(pair, step)
        average_gradients(pair[0].parameters())
        step_of(pair, optimizers)


def optimizers_of(pair: Pair, make: Any = SGD) -> list[Any]:
    return [make(network.parameters()) for network in pair]


def tied() -> Net:
    net = Net()
    net.blocks[1].norm.weight = net.blocks[0].norm.weight
    return net


# Training -----------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 2), {}),
    "one replica": ((1, 2), {}),
    "one shard": ((2, 1), {}),
    "three replicas": ((3, 1), {}),
    "freed": ((2, 2), {"reshard_after_forward": True}),
    "kept": ((2, 2), {"reshard_after_forward": False}),
    "split": ((2, 2), {"reshard_after_forward": 2}),
    "gathered once": ((2, 2), {"sharding": library.Sharding(gather="step", replicas="shard")}),
    "reduced once": ((2, 2), {"sharding": library.Sharding(reduce="step", replicas="shard")}),
    "inner dim": ((2, 2), {"shard_placement_fn": lambda param: Shard(param.ndim - 1)}),
    "checkpointed": ((2, 2), {"make": Checkpointed}),
    "tied": ((2, 2), {"make": tied}),
}


@pytest.mark.parametrize(("name", "extents"), [(name, at) for name, (at, _) in OPTIONS.items()])
@on_ranks("extents")
def test_training(name: str, extents: tuple[int, ...]) -> None:
    pair = two_nets(*extents, **OPTIONS[name][1])
    pair[1].set_force_sum_reduction_for_comms(name == "three replicas")
    train(pair, optimizers_of(pair, ADAMW if name == "plain" else SGD))


@on_ranks(4)
def test_low_precision_equals_that_of_replicas_with_copies() -> None:
    options = {
        "mesh": mesh_of(),
        "mp_policy": library.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    net = Net()
    pair = tuple(shard_net(copy.deepcopy(net), sharding=s, **options) for s in ("hybrid", None))
    optimizers = optimizers_of(pair, ADAMW)
    for step in range(3):
        for network, optimizer in zip(pair, optimizers, strict=True):
            network.set_requires_all_reduce(False)
            for microbatch in range(2):
                network(nets.own_input(10 * step + microbatch)).square().sum().backward()
            network.synchronize_gradients()
            optimizer.step()
            optimizer.zero_grad()
        for param, expected in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            assert torch.equal(full(param), full(expected))


class Experts(nn.Module):
    """Experts with a group each; a rank runs some of them, and sits out the others."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for index, expert in enumerate(self.experts):
            if index in used:
                x = torch.tanh(expert(x))
            elif isinstance(expert.weight, DTensor):
                x = x + library.sit_out(expert)
        return x


@on_ranks(4)
def test_replicas_may_use_different_parameters() -> None:
    mesh, reference = mesh_of(), Experts().double()
    model = copy.deepcopy(reference)
    for expert in model.experts:
        library.fully_shard(expert, mesh=mesh, sharding="hybrid")
    pair = reference, library.fully_shard(model, mesh=mesh, sharding="hybrid")
    optimizers = optimizers_of(pair)
    for step in range(4):
        for microbatch in range(2):
            used = ((0, 1), (2,), (2, 3), (1,))[(step + microbatch + mesh.get_coordinate()[0]) % 4]
            run(pair, 10 * step + microbatch, used)
        for param in reference.parameters():  # a rank without a gradient counts as zeros
            has_grad = torch.tensor([param.grad is not None])
            dist.all_reduce(has_grad, dist.ReduceOp.MAX)
            if has_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        assert_synchronized_parity(pair)
        step_of(pair, optimizers)


@on_ranks(4)
def test_frozen_parameters_and_parameters_that_are_frozen_later() -> None:
    pair = two_nets()
    for network in pair:
        network.blocks[0].requires_grad_(False)
    train(pair, optimizers_of(pair), range(2))
    backward(pair, 5)
    for network in pair:
        network.blocks[1].requires_grad_(False)
    assert_synchronized_parity(pair)


@on_ranks(4)
def test_groups_choose_their_own_sharding() -> None:
    reference, mesh, flat_mesh = Net().double(), mesh_of(), init_device_mesh("cpu", (4,))
    model = copy.deepcopy(reference)
    place: Any = lambda param: flat_mesh if param.ndim == 1 else None  # noqa: E731
    library.fully_shard(model.blocks[0], mesh=mesh, sharding="hybrid", shard_placement_fn=place)
    library.fully_shard(model.blocks[1], mesh=mesh, sharding="zero1")
    pair = reference, library.fully_shard(model, mesh=flat_mesh)
    train(pair, optimizers_of(pair))


# Communication ------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_between_replicas(mesh: DeviceMesh) -> Iterator[Counter[str]]:
    """Count collectives over the replicas, the bytes of one rank, and collectives over shards."""
    counts, replicas = Counter[str](), mesh.get_group("replicate")

    def noted(name: str) -> Any:
        before = getattr(Channel, name)

        def call(channel: Channel, *args: Any) -> Any:
            if name == "all_reduce" or channel.mesh.shard_group is replicas:
                counts[name] += 1
                sent, part = args[name != "all_reduce"], replicas.size() if name == "reduce" else 1
                counts["nbytes"] += sum(t.nbytes for t in sent) * (replicas.size() - 1) // part
            else:
                counts[f"{name} over shards"] += 1
            return before(channel, *args)

        return mock.patch.object(Channel, name, call)

    with noted("gather"), noted("reduce"), noted("all_reduce"):
        yield counts


@on_ranks(4)
def test_replicas_communicate_once_in_a_step() -> None:
    _, model = two_nets()
    optimizer, mesh = SGD(model.parameters()), model.inp.weight.device_mesh
    for step in range(3):
        with counted_between_replicas(mesh) as counts:
            for microbatch in range(NUM_MICROBATCHES):
                model(own_input(10 * step + microbatch)).sum().backward()
            assert (counts["gather"], counts["reduce"]) == (NUM_GROUPS, 0)
            library.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert counts == {
            "gather over shards": 5 * NUM_MICROBATCHES,  # as with ZeRO-3
            "gather": NUM_GROUPS,
            "reduce": NUM_GROUPS,
            "reduce over shards": NUM_MICROBATCHES * NUM_GROUPS,
            "nbytes": sum(
                group.traffic.all_reduces.nbytes or 0 for group in library.explain(model).groups
            ),
        }
    with counted_between_replicas(mesh) as counts, torch.no_grad():
        model(own_input())
    assert counts["gather"] == NUM_GROUPS
    why = "2 replicas split each shard: they gather it, and reduce its gradients, once in a step"
    explanation = library.explain(model)
    assert why in str(explanation)
    assert {(p.num_shards, p.num_replicas) for p in explanation.groups[0].parameters} == {(4, 1)}


@on_ranks(4)
def test_parameters_that_are_unsharded_by_hand_are_gathered_once() -> None:
    pair = two_nets()
    modules = pair[1], *pair[1].blocks
    with torch.no_grad():
        for _ in range(2):
            for network in pair:
                torch._foreach_mul_(list(network.parameters()), 0.5)  # which bumps no version
            with counted_between_replicas(pair[1].inp.weight.device_mesh) as counts:
                for module in modules:
                    module.unshard(async_op=True)
                assert_close_outputs(pair)
            assert counts["gather"] == NUM_GROUPS
            for module in modules:
                module.reshard()


@on_ranks(4)
def test_all_kinds_of_unreduced_gradients_add_up() -> None:
    """Reduced gradients, those of the shards, and unreduced ones, in any order."""
    pair = two_nets()
    kinds = ["all", "shards", "none", "shards", "all", "none", "none", "shards", "all"]
    for place, kind in enumerate([*kinds, "none", "shards"]):
        if place == len(kinds):
            average_gradients(pair[0].parameters())
            with counted_between_replicas(pair[1].inp.weight.device_mesh) as counts:
                step_of(pair, optimizers_of(pair))  # the last backward has reduced them
            assert not counts
        pair[1].set_requires_all_reduce(kind == "all")
        pair[1].set_requires_gradient_sync(kind != "none")
        run(pair, place)
    assert_synchronized_parity(pair)


@on_ranks(4)
def test_replicas_without_new_gradients_keep_those_that_were_reduced() -> None:
    reference, mesh = Gated().double(), mesh_of()
    pair = reference, library.fully_shard(copy.deepcopy(reference), mesh=mesh, sharding="hybrid")
    for _ in range(2):
        for microbatch in range(2):
            pair[1].set_requires_all_reduce(microbatch == 0)
            run(pair, microbatch, microbatch == 0 or mesh.get_coordinate()[0] == 1)
        assert_synchronized_parity(pair)
        step_of(pair, optimizers_of(pair))


@pytest.mark.parametrize("has_all_reduce", [False, True])
@on_ranks(4)
def test_penalties_on_the_parameters(has_all_reduce: bool) -> None:
    pair = two_nets()
    pair[1].set_requires_all_reduce(has_all_reduce)
    for step in range(1 if has_all_reduce else 2):  # torch cannot add a penalty to whole gradients
        for network in pair:
            penalty = full(sum(param.square().sum() for param in network.parameters()))
            (network(own_input(step)).square().sum() + penalty).backward()
    assert_synchronized_parity(pair)


@on_ranks(4)
def test_gradients_before_the_step_are_visible_and_can_be_cleared() -> None:
    pair = two_nets()
    backward(pair, 0)
    average_gradients(pair[0].parameters())
    for param, whole in zip(pair[1].parameters(), pair[0].parameters(), strict=True):
        assert param.placements[1] == Shard(0) and not param.placements[0].is_replicate()
        assert param.grad.placements == (Partial("avg"), Shard(0))
        torch.testing.assert_close(full(param.grad), whole.grad)
    for network in pair:
        network.zero_grad()
    assert all(param.grad is None for param in pair[1].parameters())
    train(pair, optimizers_of(pair))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@on_ranks(4)
def test_hooks_act_on_reduced_gradients(register: str) -> None:
    pair = two_nets()
    seen, shapes = list[Any](), list[torch.Size]()
    pair[1].set_all_reduce_hook(lambda buffer: shapes.append(buffer.shape))
    getattr(pair[1].inp.weight, register)(lambda tensor: seen.append(tensor.placements))
    with pytest.raises(library.ShardError) as caught:
        run(pair, 0)
    assert str(caught.value) == (
        "Expected no hook on the gradient of 'inp.weight' of the root group, which is not reduced "
        "over the replicas in this backward, got one; call set_requires_all_reduce(True) before "
        "the last backward of a step"
    )
    for network in pair:
        network.zero_grad()
    assert not seen and not shapes
    pair[1].set_requires_all_reduce(True)
    run(pair, 1)
    assert seen == [pair[1].inp.weight.placements] and len(shapes) == 1
    assert_synchronized_parity(pair)


@on_ranks(4)
def test_clipping_scaling_and_a_divide_factor() -> None:
    pair = reference, model = two_nets()
    scaler, optimizers = (
        library.ShardedGradScaler(init_scale=8.0, growth_interval=2),
        optimizers_of(pair),
    )
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(2.0)
    for step in range(3):
        for microbatch in range(2):
            x = own_input(10 * step + microbatch)
            reference(x).square().sum().backward()
            scaler.scale(model(x).square().sum()).backward()
        average_gradients(reference.parameters())
        for param in reference.parameters():
            param.grad.mul_(2)  # of 4 ranks
        scaler.unscale_(optimizers[1])
        norm = library.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        scaler.step(optimizers[1])
        scaler.update()
        step_of(pair, optimizers[:1])
        optimizers[1].zero_grad()


@on_ranks(4)
def test_weighed_losses() -> None:
    pair = two_nets()
    with library.weigh(pair[1]) as weighing:
        for microbatch in range(2):
            losses = [network(own_input(microbatch)).square().mean() for network in pair]
            weighing.add(dist.get_rank() + 1, losses[1]).backward()
            (losses[0] * (dist.get_rank() + 1) * 4 / 20).backward()
    assert_synchronized_parity(pair)


@pytest.mark.parametrize("kind", ["flat", "layouts"])
@on_ranks(4)
def test_other_optimizers(kind: str) -> None:
    pair = two_nets()
    optimizers = optimizers_of(pair)
    layouts = {(lambda name, param: param.ndim == 2): Owned(SGD), "*": Sharded(SGD)}
    optimizers[1] = flat(optimizers[1]) if kind == "flat" else with_layout(pair[1], layouts)
    train(pair, optimizers)


# Values -------------------------------------------------------------------------------------------


def write(network: Any, *_: Any) -> None:
    with torch.no_grad():
        for param in network.parameters():
            param.mul_(0.5)


@on_ranks(4)
def test_writes_are_seen() -> None:
    pair = two_nets()
    train(pair, optimizers_of(pair), range(1))
    for network in pair:
        write(network)
    assert_close_outputs(pair)
    with torch.no_grad(), library.unsharded(pair[1]):
        for network in pair:
            write(network)
    assert_close_outputs(pair)
    with torch.no_grad():
        twice = [{name: p * 2 for name, p in network.named_parameters()} for network in pair]
        outputs = map(torch.func.functional_call, pair, twice, [(own_input(),)] * 2)
        torch.testing.assert_close(*outputs)
    assert_close_outputs(pair)
    hooks = [n.blocks[0].register_forward_hook(partial(write, n.blocks[1])) for n in pair]
    with torch.no_grad():
        for _ in range(3):
            assert_close_outputs(pair)  # although the forward writes parameters before their use
    for hook in hooks:
        hook.remove()
    pair[1].zero_grad()
    train(pair, optimizers_of(pair), range(2))


@on_ranks(4)
def test_writes_that_bump_no_version() -> None:
    """A teacher that follows, and an evaluation with other values between microbatches."""
    pair = two_nets()
    teachers, optimizers = (copy.deepcopy(pair[0]), copy.deepcopy(pair[1])), optimizers_of(pair)
    for step in range(3):
        train(pair, optimizers, [step])
        backward(pair, 10 + step)
        with torch.no_grad():
            for network, teacher in zip(pair, teachers, strict=True):
                torch._foreach_lerp_([*teacher.parameters()], [*network.parameters()], 0.5)
                torch._foreach_mul_([*network.parameters()], 2.0)
            for _ in range(2):
                assert_close_outputs(teachers)
                assert_close_outputs(pair)
            for network in pair:
                torch._foreach_mul_([*network.parameters()], 0.5)
        backward(pair, 20 + step)
        average_gradients(pair[0].parameters())
        step_of(pair, optimizers)


def fail(*_: Any) -> None:
    raise KeyError("planted")


@pytest.mark.parametrize("where", ["register_forward_pre_hook", "register_full_backward_hook"])
@on_ranks(4)
def test_failures_leave_a_model_that_trains(where: str) -> None:
    pair = two_nets()
    optimizers = optimizers_of(pair)
    train(pair, optimizers, range(1))
    hook = getattr(pair[1].blocks[0], where)(fail)
    with pytest.raises(KeyError):
        pair[1](own_input()).sum().backward()
    hook.remove()
    pair[1].zero_grad()
    train(pair, optimizers, range(1, 3))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "float"])
@on_ranks(4)
def test_copies_and_conversions_train(how: str) -> None:
    pair = two_nets()
    train(pair, optimizers_of(pair), range(1))
    if how == "float":
        for network in pair:
            network.float()(own_input().float()).square().sum().backward()
        average_gradients(pair[0].parameters())
        pair[1].synchronize_gradients()
        for param, whole in zip(pair[1].parameters(), pair[0].parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), whole.grad)
        return
    model = copy.deepcopy(pair[1]) if how == "deepcopy" else pickle.loads(pickle.dumps(pair[1]))
    copied = copy.deepcopy(pair[0]), model
    train(copied, optimizers_of(copied))
    assert_parity(pair)


def on_meta() -> Net:
    with torch.device("meta"):
        model = Net().double()
    return shard_net(model, mesh=mesh_of(), sharding="hybrid")


def checkpoints(folder: str) -> None:
    pair = reference, model = two_nets()
    optimizers = optimizers_of(pair, ADAMW)
    train(pair, optimizers, range(2))
    states = get_state_dict(model, optimizers[1])
    dcp.save(dict(zip("mo", states, strict=True)), checkpoint_id=f"{folder}/dcp")
    library.save_full(model, f"{folder}/full.safetensors")
    whole = reference.state_dict()
    for name, value in library.iter_full(model):
        if value is not None:
            torch.testing.assert_close(value, whole[name])
    for mesh, sharding in ((mesh_of(), "hybrid"), (mesh_of(), None), (mesh_of(1, 4), "zero3")):
        loaded = shard_net(Net().double(), mesh=mesh, sharding=sharding)
        optimizer = ADAMW(loaded.parameters())
        state: Any = dict(zip("mo", get_state_dict(loaded, optimizer), strict=True))
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        set_state_dict(loaded, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
        twin = copy.deepcopy(reference)
        expected = ADAMW(twin.parameters())
        expected.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        train((twin, loaded), [expected, optimizer], range(2, 3))
    empty = on_meta()
    library.load_sharded(empty, f"{folder}/full.safetensors")
    assert_parity((reference, empty))
    empty.load_state_dict({name: value * 2 for name, value in whole.items()})
    empty.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
    assert_parity((reference, empty))
    assert_close_outputs((reference, empty))
    empty = on_meta()
    library.init_sharded(empty, seed=3)
    torch.manual_seed(3)
    reference.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
    assert_parity((reference, empty))


def test_checkpoints_and_initial_values(tmp_path: Path) -> None:
    run_ranks(checkpoints, 4, str(tmp_path), timeout=120)


# What is refused, and what is told ----------------------------------------------------------------


def test_refused() -> None:
    with fake_ranks(4):
        line, square, layer = init_device_mesh("cpu", (4,)), mesh_of(), nn.Linear(64, 64)
        axes = ("replicate", "shard", "tp")
        cube, parallel = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=axes), nn.Linear(4, 4)
        placed = distribute_tensor(parallel.weight, cube["tp"], [Shard(0)])
        parallel.weight = nn.Parameter(placed)
        subclass = "a tensor subclass that is sent as other tensors"
        offloaded = {"offload_policy": library.CPUOffloadPolicy()}
        encoded = {"mp_policy": library.MixedPrecisionPolicy(gather_wire=torch.int8)}
        cases: list[tuple[str, nn.Module, DeviceMesh, dict[str, Any]]] = [
            ("one that offload_policy keeps on the CPU", layer, square, offloaded),
            ("one with gather_wire or reduce_wire", layer, square, encoded),
            (subclass, two_tensor_mlp()[0].in_proj, square, {}),
            ("a DTensor", parallel, cube[axes[:2]], {}),
        ]
        for got, module, mesh, options in cases:
            with pytest.raises(ValueError) as caught:
                library.fully_shard(module, mesh=mesh, sharding="hybrid", **options)
            assert str(caught.value) == (
                "Expected parameter 'weight' to be a plain tensor on the compute device with "
                f"sharding='hybrid', got {got}; choose another sharding for its module"
            )
        with pytest.raises(ValueError) as caught:
            library.fully_shard(layer, mesh=line, sharding="hybrid")
        assert str(caught.value) == (
            "Expected a mesh of 2 axes (replicate, shard) with sharding='hybrid', got "
            f"{line}; pass such a mesh, or another sharding"
        )
        assert type(layer) is nn.Linear
    with pytest.raises(ValueError, match=r"^Expected replicas to be 'copy' or 'shard', got 'some'"):
        library.Sharding(replicas="some")  # type: ignore[arg-type]


@on_ranks(4)
def test_moves_are_refused() -> None:
    text = r"'inp.weight' to be cut by fully_shard alone, .* got .* \(_StridedShard\(dim=0, sf=2\)"
    _, model = two_nets()
    with pytest.raises(library.ShardError, match=text):
        library.move(model, SGD(model.parameters()), init_device_mesh("cpu", (4,)))


@on_ranks(4)
def test_events_of_a_step() -> None:
    _, model = two_nets()
    with record_events(model, "all_gather", "reduce_scatter", "all_reduce") as events:
        model(own_input()).sum().backward()
    assert Counter(name for name, _ in events) == {"all_gather": 5, "reduce_scatter": NUM_GROUPS}
    with record_events(model, "reduce_scatter", "all_reduce") as events:
        model.synchronize_gradients()
    assert Counter(name for name, _ in events) == {"all_reduce": NUM_GROUPS}
