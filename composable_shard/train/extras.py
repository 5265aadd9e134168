"""Libraries that only some functions need, imported when these are called."""

from __future__ import annotations

import importlib
from typing import Any


def library(module: str, extra: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: What to import.
        extra: The extra of this package that installs it.

    Raises:
        ImportError: If it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"Expected {module.split('.')[0]} to be installed, got: {error}; "
            f"pip install 'composable_shard[{extra}]'"
        ) from error
