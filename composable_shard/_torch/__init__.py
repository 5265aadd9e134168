"""Every private name of torch that the library uses, each behind a name of our own.

This package absorbs the differences between torch versions. No other module imports a private name.
"""

from composable_shard._torch.autograd import *
from composable_shard._torch.dtensors import *
from composable_shard._torch.memory import *
from composable_shard._torch.modules import *
from composable_shard._torch.pretended import *
from composable_shard._torch.process_groups import *
from composable_shard._torch.streams import *
from composable_shard._torch.tensors import *
