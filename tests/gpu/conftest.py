"""What tests on a CUDA device need of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and `-m gpu`, which lets tests see it")


@pytest.fixture
def nccl_rank(tmp_path: Path) -> Iterator[None]:
    """Be the one rank of NCCL, and of gloo for what is on the host."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
