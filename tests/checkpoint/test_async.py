"""``async_save``: what is written is what was there at the call, while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from checkpoint.models import Model, State, assert_equal, plain_values, shard, three_ranks, train
from checkpoint.optimizers import OPTIMIZERS
from composable_shard.testing import run_ranks


def new(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = shard(Model(columns=7))
    return model, OPTIMIZERS["groups"](model)


def saved(folder: Path, stager: str) -> State:
    model, optimizers = new(0)
    train(model, optimizers, 0, 1)
    state = {"model": model.state_dict(), "optimizer": get_state_dict(model, optimizers)[1]}
    before = plain_values(state)
    options: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType.THREAD}
    if stager != "blocking":
        options["async_stager"] = DefaultStager(
            StagingOptions(
                use_async_staging=stager == "async",
                use_shared_memory=stager == "shared",
                use_pinned_memory=False,
                use_non_blocking_copy=False,
            )
        )
    # The writing thread talks beside the training one: it needs a process group of its own.
    group = dist.new_group()
    response = dcp.async_save(state, checkpoint_id=folder, process_group=group, **options)
    if isinstance(response, AsyncSaveResponse):
        response.staging_completion.result()
        response = response.upload_completion
    train(model, optimizers, 1, 3)
    response.result()
    after = plain_values(state)
    assert not torch.equal(after["model"]["wide.weight"], before["model"]["wide.weight"])
    dcp.load(state, checkpoint_id=folder)
    assert_equal(state, before)
    if stager != "blocking":
        options["async_stager"].close()
    return before


@pytest.mark.brief(2)
@three_ranks
@pytest.mark.parametrize("stager", ["blocking", "copying", "shared", "async"])
def test_threads(tmp_path: Path, num_ranks: int, stager: str) -> None:
    first, *others = run_ranks(saved, num_ranks, tmp_path, stager)
    for other in others:
        assert_equal(other, first)
