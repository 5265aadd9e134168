"""What the oldest torch that is supported cannot do by itself, so no test can ask for it."""

from __future__ import annotations

import pytest
from torch.torch_version import TorchVersion
from torch.version import __version__

IS_OLD = TorchVersion(__version__) < (2, 13)


def needs_newer_torch(reason: str) -> pytest.MarkDecorator:
    """Skip a test on torch 2.11, for a reason that lies in torch.

    Args:
        reason: What that torch does.
    """
    return pytest.mark.skipif(IS_OLD, reason=f"torch {__version__}: {reason}")
