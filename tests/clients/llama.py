"""The small Llama that clients of ``transformers`` train, and its batches."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, LENGTH, BATCH = 64, 12, 2


def llama(**changes: object) -> Any:
    """Return the same model on every rank."""
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
    """Return the batch of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
