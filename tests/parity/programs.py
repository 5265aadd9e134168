"""Moved to `training.programs`; here until nothing imports it by this name."""

from training.programs import *  # noqa: F403
