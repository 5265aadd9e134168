"""``FullyShardedDataParallel``, the interface of FSDP1, on top of ``fully_shard``.

Names, arguments and defaults are those of ``torch.distributed.fsdp``; see ``docs/from_fsdp1.md``.
"""

from composable_shard.compat.fsdp1.module import (
    FullyShardedDataParallel as FullyShardedDataParallel,
)
from composable_shard.compat.fsdp1.options import BackwardPrefetch as BackwardPrefetch
from composable_shard.compat.fsdp1.options import CPUOffload as CPUOffload
from composable_shard.compat.fsdp1.options import CustomPolicy as CustomPolicy
from composable_shard.compat.fsdp1.options import (
    FullOptimStateDictConfig as FullOptimStateDictConfig,
)
from composable_shard.compat.fsdp1.options import FullStateDictConfig as FullStateDictConfig
from composable_shard.compat.fsdp1.options import (
    LocalOptimStateDictConfig as LocalOptimStateDictConfig,
)
from composable_shard.compat.fsdp1.options import LocalStateDictConfig as LocalStateDictConfig
from composable_shard.compat.fsdp1.options import MixedPrecision as MixedPrecision
from composable_shard.compat.fsdp1.options import ModuleWrapPolicy as ModuleWrapPolicy
from composable_shard.compat.fsdp1.options import OptimStateDictConfig as OptimStateDictConfig
from composable_shard.compat.fsdp1.options import (
    ShardedOptimStateDictConfig as ShardedOptimStateDictConfig,
)
from composable_shard.compat.fsdp1.options import ShardedStateDictConfig as ShardedStateDictConfig
from composable_shard.compat.fsdp1.options import ShardingStrategy as ShardingStrategy
from composable_shard.compat.fsdp1.options import StateDictConfig as StateDictConfig
from composable_shard.compat.fsdp1.options import StateDictSettings as StateDictSettings
from composable_shard.compat.fsdp1.options import StateDictType as StateDictType
from composable_shard.compat.fsdp1.options import always_wrap_policy as always_wrap_policy
from composable_shard.compat.fsdp1.options import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from composable_shard.compat.fsdp1.options import (
    size_based_auto_wrap_policy as size_based_auto_wrap_policy,
)
from composable_shard.compat.fsdp1.options import (
    transformer_auto_wrap_policy as transformer_auto_wrap_policy,
)
