"""`counted` moved to `launches`; here until nothing imports it by this name."""

from launches import counted

__all__ = ["counted"]
