"""Moved to `training.cases`; here until nothing imports it by this name."""

from training.cases import *  # noqa: F403
