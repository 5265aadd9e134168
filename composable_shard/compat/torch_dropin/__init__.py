"""Programs that call torch's ``fully_shard`` get ours, without a change to them.

``install()`` does it for this process, ``composable-shard run script.py`` and ``torchrun -m
composable_shard.run script.py`` for a script and all that it starts. See ``docs/drop_in.md``.
"""

from composable_shard.compat.torch_dropin.installation import (
    Installation,
    install,
    is_installed,
    uninstall,
)

__all__ = ["Installation", "install", "is_installed", "uninstall"]
