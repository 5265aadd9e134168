"""Moved to `training.iterations`; here until nothing imports it by this name."""

from training.iterations import *  # noqa: F403
