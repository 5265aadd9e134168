"""Where torch's ``fully_shard`` is imported from, by names that may be private; how it behaves."""

from __future__ import annotations

from torch.version import __version__

REDUCES_IN_GRAD_DTYPE = tuple(map(int, __version__.split(".")[:2])) >= (2, 15)
"""Whether gradients are reduced in the dtype of the parameter's, where a policy of torch names no
``reduce_dtype``; before torch 2.15 they were in ``param_dtype``."""

FULLY_SHARD_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
