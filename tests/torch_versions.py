"""What some torch that is supported cannot do by itself, so no test can ask for it."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.torch_version import TorchVersion
from torch.version import __version__

IS_OLD = TorchVersion(__version__) < (2, 13)


def needs_newer_torch(reason: str) -> pytest.MarkDecorator:
    """Skip a test on torch 2.11, for a reason that lies in torch.

    Args:
        reason: What that torch does.
    """
    return pytest.mark.skipif(IS_OLD, reason=f"torch {__version__}: {reason}")


needs_finalize_backward = pytest.mark.skipif(
    not hasattr(FSDPModule, "finalize_backward"),
    reason=f"torch {__version__}: its own FSDPModule has no finalize_backward to compare with",
)

FOLLOWS_GRADIENTS = TorchVersion(__version__) >= (2, 15)
"""Whether an omitted ``reduce_dtype`` of torch's policy means that of each parameter's gradient."""

needs_new_reduce_dtype = pytest.mark.skipif(
    not FOLLOWS_GRADIENTS,
    reason=f"torch {__version__}: its own reduce_dtype=None follows param_dtype",
)
