"""``FullyShardedDataParallel``, the interface of FSDP1, on top of ``fully_shard``.

Names, arguments and defaults are those of ``torch.distributed.fsdp``; see ``docs/from_fsdp1.md``.
"""

from composable_shard.compat.fsdp1 import options
from composable_shard.compat.fsdp1.module import FullyShardedDataParallel
from composable_shard.compat.fsdp1.options import *  # noqa: F403

__all__ = ["FullyShardedDataParallel"]
__all__ += options.__all__
