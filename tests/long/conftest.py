"""Long runs are part of ``make test-long`` alone, which asks for more examples, too."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("PARITY_EXAMPLES") else ["test_*.py"]
