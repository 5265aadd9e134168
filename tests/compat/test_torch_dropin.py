"""Torch's `fully_shard` replaced by ours: what is reached, what is understood, what is put back."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as taken_before
from torch.distributed.tensor import Shard
from torch_versions import FOLLOWS_GRADIENTS, needs_new_reduce_dtype, needs_newer_torch

import composable_shard
from composable_shard.compat import torch_dropin
from composable_shard.compat.torch_dropin import install, is_installed, uninstall
from composable_shard.module import group_of
from composable_shard.run import main
from composable_shard.testing import fake_ranks, run_ranks

NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.fsdp._fully_shard",
)
of_torch = {name: getattr(fsdp, name) for name in NAMES}


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    yield
    assert {name: getattr(fsdp, name) for name in NAMES} == of_torch
    assert taken_before is of_torch["fully_shard"]


def test_every_module_of_torch_has_ours_and_then_its_own_again() -> None:
    found = {
        (path, name): getattr(importlib.import_module(path), name)
        for path in MODULES
        for name in NAMES
        if hasattr(importlib.import_module(path), name)
    }
    assert len(found) == 10
    classes = ("FSDPModule", "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy")
    before = [getattr(fsdp, name) for name in classes]
    with install():
        for path, name in found:
            assert getattr(importlib.import_module(path), name) is torch_dropin.OURS[name]
        assert [getattr(fsdp, name) for name in classes] == before  # they stay those of torch
    for (path, name), value in found.items():
        assert getattr(importlib.import_module(path), name) is value
    assert inspect.signature(torch_dropin.fully_shard) == inspect.signature(of_torch["fully_shard"])
    for name in NAMES:
        assert torch_dropin.OURS[name].__name__ == name
        assert pickle.loads(pickle.dumps(torch_dropin.OURS[name])) is torch_dropin.OURS[name]
    assert all(">>>" in (function.__doc__ or "") for function in (install, uninstall, is_installed))


class Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was loaded")


def test_references_in_loaded_modules_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = types.ModuleType("client_with_references")
    client.shard, client.kept = fsdp.fully_shard, {"in a dict": fsdp.fully_shard}
    monkeypatch.setitem(sys.modules, client.__name__, client)
    monkeypatch.setitem(sys.modules, "lazy_client", Lazy("lazy_client"))
    with install() as installation:
        assert client.shard is taken_before is torch_dropin.fully_shard
        assert client.kept["in a dict"] is of_torch["fully_shard"]
        assert "client_with_references.shard" in installation.replaced
        assert f"{__name__}.taken_before" in installation.replaced
        client.shard = of_torch["fully_shard"]  # taken from elsewhere since
        with install() as inner:
            assert inner.replaced == ["client_with_references.shard"]
        assert is_installed()  # only the outermost one uninstalls
        assert install().replaced == []
        assert is_installed()
    assert client.shard is of_torch["fully_shard"]
    assert not is_installed()
    uninstall()
    assert not is_installed()


def test_policies_mean_what_they_meant() -> None:
    args = (torch.bfloat16, torch.float32, torch.float16, False)
    own = composable_shard.MixedPrecisionPolicy(torch.bfloat16, grad_dtype=torch.float32)
    offload = fsdp.CPUOffloadPolicy(pin_memory=False)
    with fake_ranks(2), install():
        model, other = (
            fsdp.fully_shard(nn.Linear(4, 4), mp_policy=policy, offload_policy=offload)
            for policy in (fsdp.MixedPrecisionPolicy(*args), own)
        )
        group, of_other = group_of(model), group_of(other)
        state = fsdp.fully_shard.state(model)  # which pipeline schedules ask for
        with pytest.raises(TypeError) as caught:
            fsdp.fully_shard(nn.Linear(4, 4), mp_policy="bf16")
    assert str(caught.value) == (
        "Expected mp_policy to be a composable_shard.MixedPrecisionPolicy, got builtins.str"
    )
    assert type(state).__module__.startswith("composable_shard.")
    assert group is not None and of_other is not None and of_other.policy == own
    ours = composable_shard.MixedPrecisionPolicy(*args)
    assert dataclasses.asdict(group.policy) == dataclasses.asdict(ours)
    assert group.policy.rounds_gradients is not FOLLOWS_GRADIENTS
    assert all(param.offload == composable_shard.CPUOffloadPolicy(False) for param in group.params)


@needs_new_reduce_dtype
def test_an_override_of_torchs_policy_is_understood() -> None:
    with fake_ranks(2), install():
        policy = fsdp.MixedPrecisionPolicy(
            BF16, param_dtype_override_fn=lambda param: FP32 if param.ndim == 1 else None
        )
        group = group_of(fsdp.fully_shard(nn.Linear(4, 4), mp_policy=policy))
    assert group is not None
    assert [param.compute_dtype for param in group.params] == [BF16, FP32]


@needs_newer_torch("no class for the result of a placement function, or the names of axes")
def test_placements_and_axes_may_be_said_by_classes_of_torch() -> None:
    common = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    with fake_ranks(4), install():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        info = common.FSDPMeshInfo(mesh["ep"], shard_mesh_dim=0)
        result = common.ShardPlacementResult(placement=Shard(1), mesh_info=info)
        model = fsdp.fully_shard(
            nn.Linear(8, 8),
            mesh=mesh["dp"],
            shard_placement_fn=lambda param: result if param.ndim == 2 else None,
        )
        for param, (placement, axis) in zip(
            model.parameters(), ((Shard(1), "ep"), (Shard(0), "dp")), strict=True
        ):
            assert param.placements == (placement,) and param.device_mesh == mesh[axis]
        dims = fsdp.DataParallelMeshDims(shard="ep", replicate="dp")
        model = fsdp.fully_shard(nn.Linear(8, 8), mesh=mesh, dp_mesh_dims=dims)
        assert model.weight.to_local().shape == (4, 8)


class Encoder(nn.Linear):
    encode = nn.Linear.forward


def test_modules_that_torch_has_sharded_stay_with_torch() -> None:
    with fake_ranks(2):
        theirs = [of_torch["fully_shard"](Encoder(4, 4)) for _ in range(2)]
        with install():
            assert all(isinstance(module, fsdp.FSDPModule) for module in theirs)
            fsdp.register_fsdp_forward_method(theirs[0], "encode")
            assert theirs[0].encode(torch.ones(1, 4)).shape == (1, 4)  # gathered by torch
            fsdp.share_comm_ctx(theirs)
            ours = fsdp.fully_shard(Encoder(4, 4))
            fsdp.register_fsdp_forward_method(ours, "encode")
            assert ours.encode(torch.ones(1, 4)).shape == (1, 4)
            fsdp.share_comm_ctx([ours, fsdp.fully_shard(Encoder(4, 4))])
    assert isinstance(ours, composable_shard.FSDPModule)
    assert not isinstance(theirs[0], composable_shard.FSDPModule)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def trained(
    installs: bool, dtypes: tuple[torch.dtype | None, ...], of_model: torch.dtype
) -> tuple[str, Any]:
    def train() -> tuple[list[float], list[list[float]]]:
        torch.manual_seed(0)
        # For autograd the gradient of this norm's weight is one of fp32, whatever its own dtype.
        model = nn.Sequential(nn.Linear(6, 10), nn.RMSNorm(10), nn.Linear(10, 3)).to(of_model)
        policy = fsdp.MixedPrecisionPolicy(*dtypes)
        shard = functools.partial(fsdp.fully_shard, mp_policy=policy)
        for layer in (model[0], model[2]):
            shard(layer)
        shard(model)
        owners.append(type(model).__mro__[1].__module__)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(5, 6, generator=generator).to(of_model)
            loss = model(x).square().mean()
            model.set_requires_gradient_sync(step % 3 != 1)
            loss.backward()
            losses.append(loss.item())
            if step % 3 == 1:
                continue
            optimizer.step()
            optimizer.zero_grad()
        return losses, [param.full_tensor().flatten().tolist() for param in model.parameters()]

    owners: list[str] = []
    if not installs:
        return "torch", train()
    with install():
        numbers = train()
    return owners[0], numbers


@pytest.mark.parametrize(
    ("dtypes", "of_model"),
    [
        ((BF16, FP32), FP32),
        ((BF16,), FP32),  # reduced in fp32 since torch 2.15, before in bf16
        ((FP16,), FP32),
        ((BF16, BF16), FP32),
        ((None, FP32), BF16),
        ((), FP32),
        ((), BF16),
        ((FP32,), BF16),
        pytest.param((None, BF16), FP32, marks=needs_new_reduce_dtype),  # rounds otherwise before
        ((BF16, None, BF16, False), BF16),
    ],
    ids=str,
)
def test_losses_and_parameters_are_those_of_torch_bit_by_bit(
    dtypes: tuple[torch.dtype | None, ...], of_model: torch.dtype
) -> None:
    ours, theirs = (run_ranks(trained, 2, installs, dtypes, of_model) for installs in (True, False))
    assert [owner for owner, _ in ours] == ["composable_shard.module"] * 2
    assert [numbers for _, numbers in ours] == [numbers for _, numbers in theirs]


SCRIPT = """
import multiprocessing, pickle, sys
from torch.distributed.fsdp import fully_shard

class Local:
    pass

def tell(who):
    print(who, __name__, fully_shard.__module__.partition(".")[0], flush=True)

if __name__ == "__main__":
    tell("script")
    print(sys.argv[1:], sys.path[0] == sys.argv[0].rpartition("/")[0])
    print(type(pickle.loads(pickle.dumps(Local()))) is Local, flush=True)
    child = multiprocessing.get_context("spawn").Process(target=tell, args=("spawned",))
    child.start()
    child.join()
    sys.exit(3)
"""


def test_a_script_and_what_it_spawns_get_ours_without_knowing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "script.py"), "a", "--b"])
    assert caught.value.code == 3
    assert capfd.readouterr().out.splitlines() == [
        "script __main__ composable_shard",
        "['a', '--b'] True",
        "True",
        "spawned __mp_main__ composable_shard",
    ]
    assert not is_installed()


def test_a_module_runs_as_after_python_m(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some_program.py").write_text(
        "import sys\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "print(__name__, __spec__.name, sys.argv, sys.path[0])\n"
        "print(fully_shard.__module__.partition('.')[0])\n"
    )
    monkeypatch.chdir(tmp_path)
    main(["-m", "some_program", "--steps", "3"])
    file = tmp_path / "some_program.py"
    assert capsys.readouterr().out.splitlines() == [
        f"__main__ some_program ['{file}', '--steps', '3'] {tmp_path}",
        "composable_shard",
    ]
    assert not is_installed()


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2), (["-x"], 2)])
def test_wrong_arguments(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == code
    assert ("required: SCRIPT" in capsys.readouterr().err) is bool(code)
