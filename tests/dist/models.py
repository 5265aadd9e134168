"""Moved to `nets`; here until nothing imports it by this name."""

from nets import *  # noqa: F403
