"""How many starts of the README's example under torchrun end cleanly.

    python benchmarks/exits.py --starts 50

A clean end is exit code 0 and no word of an abort. The script destroys no process group: its last
line, which does, is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNCLEAN = re.compile(r"abort|terminate|fault|corrupt|not been destroyed|Traceback", re.IGNORECASE)


def example() -> str:
    """Return the first program of the README, which does not end its process group here."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    program, end = found.group(1), "dist.destroy_process_group()\n"
    assert program.count(end) == 1
    return program.replace(end, "")


def start(script: Path, num_ranks: int) -> str:
    """Run a script under torchrun; return the problems of its exit, empty if it is clean."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    text = done.stdout + done.stderr
    return "" if done.returncode == 0 and not UNCLEAN.search(text) else text[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    num_clean = 0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(example())
        for number in range(options.starts):
            wrong = start(script, options.ranks)
            num_clean += not wrong
            if wrong:
                print(f"start {number}:\n{wrong}", flush=True)
    print(f"{num_clean} of {options.starts} starts ended cleanly")
    sys.exit(num_clean != options.starts)


if __name__ == "__main__":
    main()
