"""Moved to `training.trees`; here until nothing imports it by this name."""

from training.trees import *  # noqa: F403
