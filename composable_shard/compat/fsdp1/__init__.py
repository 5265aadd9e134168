"""``FullyShardedDataParallel``, the interface of the first generation, over ``fully_shard``.

Names, arguments and defaults are those of ``torch.distributed.fsdp``; see ``docs/from_fsdp1.md``.
The enumerations, configurations and policies that its arguments take are torch's own.
"""

from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch
from torch.distributed.fsdp import CPUOffload as CPUOffload
from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
from torch.distributed.fsdp import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from torch.distributed.fsdp import LocalStateDictConfig as LocalStateDictConfig
from torch.distributed.fsdp import MixedPrecision as MixedPrecision
from torch.distributed.fsdp import OptimStateDictConfig as OptimStateDictConfig
from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import StateDictConfig as StateDictConfig
from torch.distributed.fsdp import StateDictSettings as StateDictSettings
from torch.distributed.fsdp import StateDictType as StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy
from torch.distributed.fsdp.wrap import always_wrap_policy as always_wrap_policy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as size_based_auto_wrap_policy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as transformer_auto_wrap_policy

from composable_shard.compat.fsdp1.module import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
