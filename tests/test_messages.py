"""The text of every error: exact, and the same on all ranks where ranks could differ.

A call stands here as a user writes it. Those that need real ranks are in
``parameters/test_state.py``, ``faults`` and ``subclasses/test_errors.py``; those of what a training
loop calls are in ``train``. The last test finds every ``raise`` of the package in one of them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import said_of_calls
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transport.own_collectives import CopyingAllGather

import composable_shard
from composable_shard import (
    FSDPModule,
    MaterializationError,
    MixedPrecisionPolicy,
    ShardError,
    StaleParameterError,
    estimate,
    fully_shard,
    iter_full,
    optim,
    weigh,
)
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks


def plain() -> nn.Linear:
    return nn.Linear(4, 4)


def sharded() -> Any:
    return fully_shard(plain())


def with_gradients() -> Any:
    module = sharded()
    module(torch.ones(2, 4)).sum().backward()
    return module


def with_weight(weight: torch.Tensor) -> nn.Module:
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(weight)
    return module


def replicated() -> nn.Module:
    return with_weight(distribute_tensor(torch.zeros(4, 4), mesh(2), [Replicate()]))


def on_cuda() -> nn.Module:
    empty = torch.empty(4, 4, device="meta")
    return with_weight(FakeTensor(FakeTensorMode(), empty, torch.device("cuda:0")))


def on_mesh(over: DeviceMesh, placement: Any) -> nn.Module:
    return with_weight(distribute_tensor(torch.zeros(4, 4), over, [placement, Replicate()]))


def on_another_device() -> nn.Module:
    over = DeviceMesh("meta", torch.arange(4), _init_backend=False)
    weight = torch.empty(4, 4, device="meta")
    return with_weight(DTensor.from_local(weight, over, [Replicate()], run_check=False))


def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def square(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names or ("replicate", "shard"))


def by_names(over: DeviceMesh, module: nn.Module) -> None:
    fully_shard(module, mesh=over, dp_mesh_dims=composable_shard.DataParallelMeshDims(shard="dp"))


def custom_then_memory() -> None:
    module = sharded()
    module.set_custom_all_gather(CopyingAllGather())
    module.set_allocate_memory_from_process_group_for_comm(True)


def enter(context: Any) -> None:
    with context:
        raise AssertionError("must not get here")


def stream(**kwargs: Any) -> None:
    next(iter_full(**{"model": plain(), **kwargs}))


def weighed(*args: Any) -> None:
    with weigh(sharded()) as weighing:
        weighing.add(*args)


def told(**kwargs: Any) -> None:
    estimate(**{"build_model": nn.Identity, "mesh_shape": 2, "batch": torch.ones(1), **kwargs})


NAMES: dict[str, Any] = {
    **{name: getattr(composable_shard, name) for name in composable_shard.__all__},
    **{"Shard": Shard, "Replicate": Replicate, "optim": optim, "record_events": record_events},
    **globals(),
}

# Each call, and indented what is raised: of one of two ranks, of one of four.
OF_TWO = r"""\
fully_shard('layer')
    TypeError: Expected module to be an nn.Module or a list of them, got str
fully_shard([plain(), None])
    TypeError: Expected a list of nn.Module, got NoneType at index 1
fully_shard(plain(), mesh=2)
    TypeError: Expected mesh to be a DeviceMesh, got int: 2
fully_shard(plain(), mp_policy=fsdp.MixedPrecisionPolicy())
    TypeError: Expected mp_policy to be a composable_shard.MixedPrecisionPolicy, got
    torch.distributed.fsdp.MixedPrecisionPolicy
fully_shard(plain(), offload_policy=True)
    TypeError: Expected offload_policy to be a composable_shard.OffloadPolicy, got builtins.bool
fully_shard(plain(), ignored_params=[])
    TypeError: Expected ignored_params to be a set, got list: []
fully_shard(plain(), ignored_params={'weight'})
    TypeError: Expected each of ignored_params to be a parameter, got str: 'weight'; pass
    {module.weight}, not its name
fully_shard(plain(), shard_placement_fn=Shard(0))
    TypeError: Expected shard_placement_fn to be a function of a parameter or None, got Shard:
    Shard(dim=0); pass lambda param: Shard(1), say
MixedPrecisionPolicy(param_dtype='bf16')
    TypeError: Expected param_dtype to be a torch.dtype or None, got str: 'bf16'
MixedPrecisionPolicy(param_dtype_override_fn=torch.bfloat16)
    TypeError: Expected param_dtype_override_fn to be callable or None, got dtype: torch.bfloat16
MixedPrecisionPolicy(cast_forward_inputs=1)
    TypeError: Expected cast_forward_inputs to be a bool, got int: 1
DataParallelMeshDims(shard=3)
    TypeError: Expected shard to be the name of a mesh axis, a tuple of names or None, got int: 3
sharded().set_modules_to_forward_prefetch(sharded())
    TypeError: Expected modules to be sharded modules, got FSDPLinear; pass a list, also of one
share_comm_ctx(sharded())
    TypeError: Expected modules to be sharded modules, got FSDPLinear; pass a list, also of one
sharded().set_all_reduce_hook(print, stream='s')
    TypeError: Expected stream to be a torch.Stream or None, got str: 's'
sharded().set_prefetch_depth(1.5)
    TypeError: Expected depth to be an int, got float: 1.5
sharded().set_prefetch_depth(True)
    TypeError: Expected depth to be an int, got bool: True
register_fsdp_forward_method([], 'forward')
    TypeError: Expected module to be an nn.Module, got list: []; call it for each
register_fsdp_forward_method(sharded(), 3)
    TypeError: Expected method_name to be the name of a method, got int: 3
clip_grad_norm_(sharded(), 1.0)
    TypeError: Expected parameters to be tensors, got FSDPLinear; pass its parameters()
with_gradients().clip_grad_norm_('x')
    TypeError: Expected max_norm to be a number, got str: 'x'
clip_grad_norm_(sharded().parameters(), 1.0, 'two')
    TypeError: Expected norm_type to be a number, got str: 'two'
enter(weigh('model'))
    TypeError: Expected model to be an nn.Module, got str: 'model'
weighed('x', torch.ones(()))
    TypeError: Expected num_tokens to be a number, got str: 'x'
weighed(3, 0.5)
    TypeError: Expected loss to be a tensor, got float: 0.5
uneven(None, [])
    TypeError: Expected model to be an nn.Module, got NoneType: None
uneven(sharded(), 3)
    TypeError: Expected batches to be iterable, got int: 3
ShardedGradScaler(init_scale='x')
    TypeError: Expected init_scale to be a number, got str: 'x'
ShardedGradScaler(growth_interval=3.5)
    TypeError: Expected growth_interval to be an int, got float: 3.5
ShardedGradScaler(init_scale=0.0)
    ValueError: Expected init_scale above 0, got 0.0
ShardedGradScaler(backoff_factor=1.0)
    ValueError: Expected backoff_factor between 0 and 1, got 1.0
ShardedGradScaler(growth_factor=1.0)
    ValueError: Expected growth_factor above 1, got 1.0
ShardedGradScaler(growth_interval=0)
    ValueError: Expected growth_interval of at least 1, got 0
ShardedGradScaler(device=3)
    TypeError: Expected device to be a device type such as 'cuda', or None, got int: 3
ShardedGradScaler(process_group=mesh(2))
    TypeError: Expected process_group to be a ProcessGroup that this rank is in, got DeviceMesh:
    DeviceMesh((2,), 'cpu', stride=(1,)); pass its mesh.get_group()
sync_module_states([])
    TypeError: Expected module to be an nn.Module, got list: []; call it for each
sync_module_states(plain(), src_rank=0.0)
    TypeError: Expected src_rank to be an int, got float: 0.0
stream(model={})
    TypeError: Expected model to be an nn.Module, got dict: {}
stream(bucket_bytes='64MB')
    TypeError: Expected bucket_bytes to be an int, got str: '64MB'
stream(dtype='bfloat16')
    TypeError: Expected dtype to be a torch.dtype or None, got str: 'bfloat16'
stream(rename={'a': 'b'})
    TypeError: Expected rename to be a function or None, got dict: {'a': 'b'}
stream(device=1.0)
    TypeError: Expected device to be a device or its name, got float: 1.0
save_full(plain(), 3)
    TypeError: Expected target to be a path, got int: 3
load_sharded(plain(), None)
    TypeError: Expected source to be a path, got NoneType: None
enter(unsharded(3))
    TypeError: Expected module to be an nn.Module, got int: 3
enter(parked(3))
    TypeError: Expected model to be an nn.Module, got int: 3
enter(parked(sharded(), None))
    TypeError: Expected optimizer to be an Optimizer or a list of optimizers, got NoneType: None
move(3, (), mesh(2))
    TypeError: Expected model to be an nn.Module, got int: 3
move(sharded(), (), 'cpu')
    TypeError: Expected mesh to be a DeviceMesh, got str: 'cpu'
next(local_shards(3))
    TypeError: Expected model to be an nn.Module, got int: 3
changed_since([], {})
    TypeError: Expected model to be an nn.Module, got list: []; call it for each
changed_since(plain(), ['weight'])
    TypeError: Expected versions to be a mapping from names to versions, got list: ['weight']
apply_fully_shard(None, nn.Linear)
    TypeError: Expected module to be an nn.Module, got NoneType: None
sit_out('tower')
    TypeError: Expected module to be an nn.Module, got str: 'tower'
sit_out(plain())
    ShardError: Expected a model with sharded modules, got none in Linear; apply fully_shard before
    sit_out(), or call it on all ranks
uneven(plain(), [])
    ShardError: Expected a model with sharded modules, got none in Linear; apply fully_shard before
    uneven()
enter(weigh(plain()))
    ShardError: Expected a model with sharded modules, got none in Linear; apply fully_shard before
    weigh()
explain(3)
    TypeError: Expected model to be an nn.Module, got int: 3
explain(sharded(), torch.optim.SGD)
    TypeError: Expected optimizer to be a torch.optim.Optimizer or None, got type: <class
    'torch.optim.sgd.SGD'>
enter(trace(3))
    TypeError: Expected module to be an nn.Module, got int: 3
enter(trace(sharded(), folder=3))
    TypeError: Expected folder to be a path or None, got int: 3
enter(trace(sharded(), steps=2.0))
    TypeError: Expected steps to be an int, got float: 2.0
enter(trace(plain()))
    ValueError: Expected sharded modules in Linear, got none; apply fully_shard to it
enter(trace(sharded(), skip=-1))
    ValueError: Expected skip of at least 0, got -1
enter(trace(sharded(), steps=0))
    ValueError: Expected steps of at least 1, got 0
enter(record_events([]))
    TypeError: Expected module to be an nn.Module, got list: []; call it for each
told(build_model=3)
    TypeError: Expected build_model to be a function that makes a module, got int: 3
told(shard=3)
    TypeError: Expected shard to be a function or None, got int: 3
told(loss=None)
    TypeError: Expected loss to be a function of output and batch, got NoneType: None
told(optimizer='adam')
    TypeError: Expected optimizer to be a function of parameters or None, got str: 'adam'; for
    layouts, use explain(model, with_layout(model, layouts)) under fake_ranks
told(device=3)
    TypeError: Expected device to be a device or its name, got int: 3
told(flops='many', bandwidth=1.0)
    TypeError: Expected flops to be a number, got str: 'many'
optim.flat(3)
    TypeError: Expected optimizer to be a torch.optim.Optimizer, got int: 3
optim.with_layout(3, {})
    TypeError: Expected model to be an nn.Module, got int: 3
optim.with_layout(sharded(), 3)
    TypeError: Expected layouts to be a mapping from names to layouts, got int: 3
fully_shard([])
    ValueError: Expected at least one module, got an empty list
fully_shard(nn.ModuleList([plain()]))
    ValueError: Expected a module with a forward, got the container ModuleList; call fully_shard on
    its children, or on a list of them
fully_shard(sharded())
    ValueError: Expected a module that is not sharded, got FSDPLinear, which fully_shard was applied
    to before; give added modules, such as adapters, a call of their own
fully_shard(plain(), mesh=init_device_mesh('xpu', (2,)))
    ValueError: Expected a mesh of available devices, got xpu; make it for the device type of the
    machine, such as init_device_mesh('cpu', ...)
fully_shard(plain(), reshard_after_forward='no')
    ValueError: Expected reshard_after_forward to be True, False, a number of ranks or None, got
    'no'
fully_shard(plain(), shard_placement_fn=lambda _: 1)
    ValueError: Expected shard_placement_fn to return Shard, a DeviceMesh, ShardPlacementResult or
    None for parameter 'weight', got int: 1
fully_shard(plain(), shard_placement_fn=lambda _: Shard(-3))
    ValueError: Expected shard_placement_fn to return a dim within the 2 dims of parameter 'weight',
    got Shard(dim=-3)
fully_shard(replicated())
    ValueError: Expected the mesh of the DTensor parameter 'weight' and the data-parallel mesh to be
    parts of one mesh with named axes, got DeviceMesh((2,), 'cpu', stride=(1,)) and DeviceMesh((2,),
    'cpu', stride=(1,)); build both by slicing one mesh, and pass its data-parallel axes, such as
    mesh['data']
fully_shard(on_cuda())
    ValueError: Expected parameter 'weight' on cpu, on the CPU or on the meta device, got cuda:0
MixedPrecisionPolicy(buffer_dtype=torch.int64)
    ValueError: Expected buffer_dtype to be a floating-point dtype, got torch.int64
sharded().set_is_last_backward(None)
    ValueError: Expected is_last_backward to be a bool, got NoneType: None
sharded().set_prefetch_depth(-1)
    ValueError: Expected depth of at least 0, got -1
sharded().set_reshard_after_forward(3)
    ValueError: Expected reshard_after_forward to divide the number of shards, got 3 for 2 shards
sharded().set_reshard_after_forward(None)
    ValueError: Expected reshard_after_forward to be True, False or a number of ranks, got None
sharded().set_modules_to_forward_prefetch([plain()])
    ValueError: Expected sharded modules, got Linear; apply fully_shard to it
enter(record_events(plain()))
    ValueError: Expected sharded modules in Linear, got none; apply fully_shard to it
enter(record_events(sharded(), 'reshard', 'resharded'))
    ValueError: Expected events out of ('pre_forward', 'post_forward', 'pre_backward',
    'post_backward', 'all_gather', 'wait_for_all_gather', 'reshard', 'accumulate', 'reduce_scatter',
    'wait_for_reduce_scatter', 'all_reduce', 'wait_for_all_reduce'), got ['resharded']
stream(bucket_bytes=0)
    ValueError: Expected bucket_bytes of at least 1, got 0
stream(tied='last')
    ValueError: Expected tied to be one of ('first', 'all'), got 'last'
stream(subclasses=None)
    ValueError: Expected subclasses to be 'own', 'plain' or a function, got None
stream(dtype=torch.int8)
    ValueError: Expected dtype to be a floating-point dtype, got torch.int8
move(sharded(), (), mesh(2), bucket_nbytes=0)
    ValueError: Expected bucket_nbytes of at least 1, got 0
sharded().clip_grad_norm_(-1.0)
    ValueError: Expected max_norm of at least 0, got -1.0
sharded().clip_grad_norm_(1.0, foreach=1)
    ValueError: Expected foreach to be a bool, got int: 1
optim.flat(torch.optim.SGD(sharded().parameters()), elementwise='False')
    ValueError: Expected elementwise to be a bool, got str: 'False'
told(flops=float('nan'), bandwidth=1.0)
    ValueError: Expected speeds to be positive, and the latency at least 0, got {'flops': nan,
    'bandwidth': 1.0, 'latency': 0.0}
sharded().set_allocate_memory_from_process_group_for_comm(True)
    ShardError: Expected a backend that allocates memory for the root group, got fake, which does
    not
sharded().set_symm_mem_for_comm()
    ShardError: Expected the root group on NCCL, the backend with symmetric memory, got fake
custom_then_memory()
    ShardError: Expected built-in collectives, got custom ones, which allocate their own
    memory; choose the memory in their allocate method
sharded()._set_unshard_async_op(True)
    TorchStateError: Expected to read only _training_state, _fsdp_param_group, _fsdp_param_groups,
    _comm_ctx, _reshard_after_forward, is_unsharded of torch's private state of the root group, got
    unshard_async_op; use the methods of composable_shard.FSDPModule
"""
OF_FOUR = r"""\
fully_shard(plain(), mesh=square(), dp_mesh_dims='shard')
    TypeError: Expected dp_mesh_dims to be a DataParallelMeshDims, got str: 'shard'
DataParallelMeshDims(shard=('dp', 1))
    TypeError: Expected the name of a mesh axis to be a str, got int: 1
CPUOffloadPolicy(pin_memory='yes')
    TypeError: Expected pin_memory to be a bool, got str: 'yes'
fully_shard(plain(), offload_policy={'weight': 'cpu'})
    TypeError: Expected offload_policy to be a composable_shard.OffloadPolicy for 'weight', got
    builtins.str
sharded().set_reduce_scatter_max_input_buffers(True)
    TypeError: Expected max_input_buffers to be an int, got bool: True
sharded().set_all_reduce_hook('hook')
    TypeError: Expected hook to be callable, got str: 'hook'
sharded().set_post_optim_event('event')
    TypeError: Expected event to be an object with a method wait, such as a torch.Event, got str:
    'event'
sharded().set_custom_all_gather(print)
    TypeError: Expected comm to be a custom all-gather with allocate and __call__, got
    builtin_function_or_method: <built-in function print>
sharded().set_custom_reduce_scatter(None)
    TypeError: Expected comm to be a custom reduce-scatter with allocate and __call__, got NoneType:
    None
fully_shard(plain(), mesh=mesh(2, 2))
    ValueError: Expected a mesh of 1 axis, or of 2 named axes (replicate, then shard), got
    DeviceMesh((2, 2), 'cpu', stride=(2, 1)); pass mesh_dim_names, or the data-parallel axes, such
    as mesh['shard'], or dp_mesh_dims
fully_shard(plain(), shard_placement_fn=lambda _: ShardPlacementResult(mesh=mesh(2, 2)))
    ValueError: Expected a mesh of 1 axis, or of 2 named axes (replicate, then shard), got
    DeviceMesh((2, 2), 'cpu', stride=(2, 1)); pass mesh_dim_names, or the data-parallel axes, such
    as mesh['shard'], or dp_mesh_dims, from shard_placement_fn for parameter 'weight'
fully_shard(plain(), mesh=square('dp_shard', 'tp'))
    ValueError: Expected a mesh with axes (replicate, shard), or one axis to shard, got axes
    named ('dp_shard', 'tp'); pass the axes in this order, or name their purposes by
    dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)
fully_shard(plain(), mesh=square()['replicate'])
    ValueError: Expected a mesh with axes (replicate, shard), or one axis to shard, got axes
    named ('replicate',); pass the axes in this order, or name their purposes by
    dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)
by_names(square(), plain())
    ValueError: Expected dp_mesh_dims to name axes out of ('replicate', 'shard'), got 'dp'
DataParallelMeshDims()
    ValueError: Expected shard or replicate to name a mesh axis, got neither
DataParallelMeshDims(shard='dp', replicate='dp')
    ValueError: Expected each mesh axis to be named once, got ('dp', 'dp')
fully_shard(on_another_device())
    ValueError: Expected the mesh of the DTensor parameter 'weight' and the data-parallel mesh to be
    parts of one mesh with named axes, got DeviceMesh((4,), 'meta', stride=(1,)) and
    DeviceMesh((4,), 'cpu', stride=(1,)); build both by slicing one mesh, and pass its data-parallel
    axes, such as mesh['data']
by_names(square('dp', 'tp'), plain())
    ValueError: Expected parameter 'weight' to be a DTensor on the mesh that dp_mesh_dims describes,
    got a plain Parameter; distribute it first
by_names(square('dp', 'tp'), on_mesh(square('dp', 'cp'), Replicate()))
    ValueError: Expected parameter 'weight' on the mesh that was passed to fully_shard,
    DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)), got one on DeviceMesh((dp=2, cp=2), 'cpu',
    stride=(2, 1)); if the parameter is on only some axes of that mesh, pass only the data-parallel
    axes, such as mesh['data'], without dp_mesh_dims
by_names(square('dp', 'tp'), on_mesh(square('dp', 'tp'), Shard(0)))
    ValueError: Expected parameter 'weight' to be replicated over the data-parallel axis 'dp', got
    S(0)
fully_shard(plain(), mesh=DeviceMesh('cpu', [1, 2]))
    ValueError: Expected a mesh that rank 0 is in, got DeviceMesh((2,), 'cpu', stride=(1,)); shard
    on its ranks
fully_shard(plain(), shard_placement_fn=lambda _: DeviceMesh('cpu', [1, 2]))
    ValueError: Expected a mesh that rank 0 is in, got DeviceMesh((2,), 'cpu', stride=(1,)); shard
    on its ranks, from shard_placement_fn for parameter 'weight'
fully_shard(plain(), reshard_after_forward=3)
    ValueError: Expected reshard_after_forward to divide the number of shards, got 3 for 4 shards
fully_shard(plain(), offload_policy={'weigth': CPUOffloadPolicy()})
    ValueError: Expected offload_policy to name parameters out of ['bias', 'weight'], got ['weigth']
sharded().set_gradient_divide_factor(0)
    ValueError: Expected factor to be a positive number, got 0
sharded().set_reduce_scatter_max_input_buffers(0)
    ValueError: Expected max_input_buffers of at least 1, got 0
fully_shard(plain(), mesh=square()).set_all_reduce_hook(print, stream=torch.Stream('cpu'))
    ValueError: Expected no stream for the root group with replicas, got one
sharded().set_symm_mem_for_comm('NVSHMEM')
    ValueError: Expected the symmetric memory of 'NCCL', got 'NVSHMEM'
"""


CASES = [(2, *case) for case in said_of_calls(OF_TWO).items()]
CASES += [(4, *case) for case in said_of_calls(OF_FOUR).items()]


@pytest.mark.parametrize(("ranks", "call", "said"), CASES, ids=[call for _, call, _ in CASES])
def test_message(ranks: int, call: str, said: str) -> None:
    with fake_ranks(ranks), pytest.raises(Exception) as caught:
        eval(call, dict(NAMES))
    assert f"{type(caught.value).__name__}: {caught.value}" == said


def test_message_of_a_mesh_of_three_axes() -> None:
    with fake_ranks(8):
        cube = mesh(2, 2, 2)
        with pytest.raises(ValueError) as caught:
            fully_shard(plain(), mesh=cube)
        assert str(caught.value) == (
            f"Expected a mesh of 1 axis, or of 2 named axes (replicate, then shard), got {cube}; "
            "pass mesh_dim_names, or the data-parallel axes, such as mesh['shard'], or dp_mesh_dims"
        )


def test_every_field_names_its_field() -> None:
    for field in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "grad_dtype"):
        with pytest.raises(TypeError) as caught:
            MixedPrecisionPolicy(**{field: 16})
        assert str(caught.value) == f"Expected {field} to be a torch.dtype or None, got int: 16"


ROOT = Path(composable_shard.__file__).parent


def raised_templates() -> dict[str, re.Pattern[str]]:
    """Find each ``raise Error("...")`` outside of ``testing``, as a pattern of its text."""
    templates = {}
    for path in sorted(ROOT.rglob("*.py")):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            error = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(error, ast.Call) and not ast.unparse(error).startswith("_"):
                place = f"{path.relative_to(ROOT)}:{error.lineno}"
                templates[place] = re.compile(_pattern(error.args[0]) + r"\Z", re.DOTALL)
    return templates


def _pattern(text: ast.expr) -> str:
    if isinstance(text, ast.Constant):
        return re.escape(str(text.value))
    if isinstance(text, ast.JoinedStr):
        return "".join(map(_pattern, text.values))
    if isinstance(text, ast.BinOp):
        return _pattern(text.left) + _pattern(text.right)
    return ".*"


def texts_in_tests() -> set[str]:
    """Find each string that a test holds, and the innermost message that ends it.

    What is formatted into it stands as ``{}``.
    """
    texts = set()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts |= {node.value, *said_of_calls(node.value).values()}
            elif isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
                texts.add("".join(map(str, parts)))
    texts |= {text[text.rindex("Expected ") :] for text in texts if "Expected " in text}
    return texts | {text.partition("Error: ")[2] for text in texts}


def test_every_raise_has_a_test_of_its_text() -> None:
    texts = texts_in_tests()
    templates = raised_templates()
    assert len(templates) > 30
    untested = [place for place, pattern in templates.items() if not any(map(pattern.match, texts))]
    assert untested == []


def test_errors_of_states_are_runtime_errors() -> None:
    for error in (MaterializationError, StaleParameterError, composable_shard.ExtensionError):
        assert issubclass(error, ShardError) and issubclass(error, RuntimeError)
    assert issubclass(FSDPModule, fsdp.FSDPModule)
