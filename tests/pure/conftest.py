"""Generated tests here are the same in every run, and no slow machine fails them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")
