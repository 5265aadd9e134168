"""`from_pretrained(..., distributed_config=...)`, which shards by itself: the losses of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from clients.both import llama, needs, owner, shared_folder, tokens, train_both
from clients.hugging_face import saved

pytestmark = [needs("transformers"), pytest.mark.timeout(600)]


def from_pretrained(tie: bool, sizes: dict[str, int]) -> dict[str, Any]:
    """Load the shards of a saved Llama, train four steps, and save it whole."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    folder = shared_folder()
    if dist.get_rank() == 0:
        llama(tie_word_embeddings=tie).save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(**sizes)
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        ids = tokens(step, dist.get_rank() // sizes.get("tp_size", 1))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(f"{folder}/trained")
    dist.barrier()
    return {"owner": owner(model), "losses": losses, "saved": saved(f"{folder}/trained")}


@pytest.mark.parametrize(
    ("num_ranks", "tie", "sizes"),
    [
        (2, False, {"fsdp_size": 2}),
        (2, True, {"fsdp_size": 2}),
        (4, False, {"fsdp_size": 2, "tp_size": 2}),
    ],
    ids=["sharded", "tied", "tensor parallel"],
)
def test_from_pretrained(num_ranks: int, tie: bool, sizes: dict[str, int]) -> None:
    theirs, ours = train_both(from_pretrained, tie, sizes, num_ranks=num_ranks)
    assert ours == theirs
    trained = ours[0]["saved"]
    assert len(trained) == 21
    assert (trained["lm_head.weight"] == trained["model.embed_tokens.weight"]) is tie
