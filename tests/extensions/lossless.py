"""Moved to `subclasses.lossless`; here until nothing imports it by this name."""

from subclasses.lossless import *  # noqa: F403
