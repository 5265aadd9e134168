"""Torchtitan's own function shards its Llama debug model: losses of ours are those of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from clients.both import needs, owner, train_both

pytestmark = [needs("torchtitan", "triton"), pytest.mark.timeout(600)]

VOCABULARY = 2048


def debug_model() -> Any:
    """Build the debug model with torchtitan's attention that the CPU has a backward of."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(1)
    model = config.build()
    model.init_states()
    return model


def under_torchtitan(param_dtype: torch.dtype, policy: str) -> dict[str, Any]:
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    model = debug_model()
    apply_fsdp_to_decoder(
        model,
        init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        param_dtype=param_dtype,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy=policy,
    )
    if owner(model) == "torch.distributed.fsdp":
        # Torch's cannot divide on gloo by what torchtitan asks for but in this way.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(VOCABULARY, (1, 16), generator=generator)
        logits = model(ids).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, ids.flatten(), reduction="sum") / 32
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.full_tensor().item()]
    return {"owner": owner(model), "losses": losses}


@pytest.mark.parametrize(
    ("param_dtype", "policy"), [(torch.float32, "default"), (torch.bfloat16, "always")], ids=str
)
def test_apply_function(param_dtype: torch.dtype, policy: str) -> None:
    theirs, ours = train_both(under_torchtitan, param_dtype, policy)
    assert ours == theirs
