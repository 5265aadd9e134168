"""``python -m composable_shard`` is the command ``composable-shard``."""

from composable_shard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
