"""Step time, host time and memory on one GPU; see `gpu.py`, which this runs.

NVIDIA has a package of the same name. Torch imports that package if it is installed, and must not
import this file instead.
"""

from __future__ import annotations

import sys

if __name__ == "cuda":
    raise ModuleNotFoundError("This is a benchmark, not the package of NVIDIA", name="cuda")
sys.path.append(sys.path.pop(0))

from gpu import main

if __name__ == "__main__":
    sys.exit(main())
