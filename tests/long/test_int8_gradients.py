"""The demo with gradients that travel as int8, to its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from demo import run

AFTER = r"held-out loss after training *\S *(\S+) nats"


@pytest.mark.timeout(1200)
def test_the_demo_with_int8_gradients_ends_within_a_hundredth_of_the_loss(tmp_path: Path) -> None:
    found = []
    for more in ((), ("--int8-gradients",)):
        folder = str(tmp_path / "-".join(("run", *more)))
        printed = run("examples/train_lm.py", "--checkpoint-dir", folder, *more, timeout=600)
        (loss,) = re.findall(AFTER, printed)
        found.append(float(loss))
    assert 1.5 < found[0] < 2.2
    assert found[1] == pytest.approx(found[0], rel=0.01)
