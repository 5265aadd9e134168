"""What some torch that is supported cannot do by itself, so no test can ask for it."""

from __future__ import annotations

import pytest
from torch.torch_version import TorchVersion
from torch.version import __version__

VERSION = TorchVersion(__version__)


def needs_newer_torch(reason: str, least: tuple[int, int] = (2, 13)) -> pytest.MarkDecorator:
    """Skip a test on a torch before ``least``, for a ``reason`` that lies in that torch."""
    return pytest.mark.skipif(least > VERSION, reason=f"torch {VERSION}: {reason}")


needs_finalize_backward = needs_newer_torch(
    "its own FSDPModule has no finalize_backward to compare with", (2, 15)
)

FOLLOWS_GRADIENTS = VERSION >= (2, 15)
"""Whether an omitted ``reduce_dtype`` of torch's policy means that of each parameter's gradient."""

needs_new_reduce_dtype = needs_newer_torch("its own reduce_dtype=None follows param_dtype", (2, 15))
