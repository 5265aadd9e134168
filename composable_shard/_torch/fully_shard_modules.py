"""Where torch's ``fully_shard`` is imported from, by names that may be private."""

from __future__ import annotations

FULLY_SHARD_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
