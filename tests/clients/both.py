"""Training in a client with torch's `fully_shard` and with ours, on the same ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard.compat.torch_dropin import install
from composable_shard.testing import run_ranks

Train = Callable[..., dict[str, Any]]
OWNERS = {"torch": "torch.distributed.fsdp", "ours": "composable_shard.module"}


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} missing: make test-clients installs all"
    )


def owner(module: nn.Module) -> str:
    """Return where the class comes from that `fully_shard` has mixed into a module's."""
    return type(module).__mro__[1].__module__


def shared_folder() -> str:
    """Make a folder that all ranks know. Collective: a broadcast."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return names[0]


def train_with(train: Train, whose: str, *arguments: Any) -> dict[str, Any]:
    """Train on this rank; the client's modules are loaded when the drop-in is installed."""
    if whose == "torch":
        return train(*arguments)
    with install():
        return train(*arguments)


def train_both(
    train: Train, *arguments: Any, num_ranks: int = 2
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train with torch's and with ours; return what each rank notes, `owner` taken out."""
    theirs, ours = (
        run_ranks(train_with, num_ranks, train, whose, *arguments, timeout=280.0)
        for whose in OWNERS
    )
    assert [noted.pop("owner") for noted in theirs] == [OWNERS["torch"]] * num_ranks
    assert [noted.pop("owner") for noted in ours] == [OWNERS["ours"]] * num_ranks
    return theirs, ours


# The small Llama that clients of ``transformers`` train, and its batches.
VOCABULARY, LENGTH, BATCH = 64, 12, 2


def llama(**changes: object) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**options, **changes}))


def tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
