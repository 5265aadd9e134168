"""Generated tests here are the same in every run, and no slow machine fails them."""

from __future__ import annotations

import os

from hypothesis import settings

MANY = 30 if os.environ.get("BRIEF_EXAMPLES") else 200

settings.register_profile("reproducible", max_examples=MANY, deadline=None, derandomize=True)
settings.load_profile("reproducible")
