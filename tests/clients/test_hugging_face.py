"""Llama under accelerate, under Trainer and with LoRA: losses of ours are those of torch, bitwise.

Two ranks: the sum of two gradients does not depend on their order, so nothing may differ.
"""

from __future__ import annotations

from typing import Any

import pytest

from clients.both import OWNERS, needs, train_both, train_with
from clients.hugging_face import saved, under_accelerate, under_trainer
from composable_shard.testing import run_ranks

pytestmark = [needs("transformers", "accelerate", "peft"), pytest.mark.timeout(600)]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "bf16, tied, recomputed, loaded by rank 0, kept after forward": (
        {
            "activation_checkpointing": True,
            "cpu_ram_efficient_loading": True,
            "reshard_after_forward": False,
        },
        {"mixed_precision": "bf16"},
        {"tie_word_embeddings": True},
    ),
    "accumulated": ({}, {"gradient_accumulation_steps": 2}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_accelerate(case: str) -> None:
    theirs, ours = train_both(under_accelerate, *CASES[case])
    for noted in (*theirs, *ours):
        del noted["folder"]
        assert noted["after loading"] == noted["after saving"]
    assert ours == theirs
    assert theirs[0]["losses"] != theirs[1]["losses"]


def test_what_one_has_saved_the_other_loads() -> None:
    theirs, ours = train_both(under_accelerate, *CASES["plain"])
    after = [{"losses": noted["after saving"]} for noted in theirs]
    for whose, of_other in (("ours", theirs), ("torch", ours)):
        folder = f"{of_other[0]['folder']}/state"
        loaded = run_ranks(train_with, 2, under_accelerate, whose, *CASES["plain"], folder)
        assert [{"losses": noted["losses"]} for noted in loaded] == after


def test_offloading_changes_no_number() -> None:
    """Torch's cannot offload where there is no accelerator, so the oracle is that without."""
    plain = run_ranks(train_with, 2, under_accelerate, "torch", *CASES["plain"], timeout=280.0)
    offloaded = run_ranks(
        train_with, 2, under_accelerate, "ours", {"cpu_offload": True}, {}, {}, timeout=280.0
    )
    assert [noted["owner"] for noted in offloaded] == [OWNERS["ours"]] * 2
    for noted in (*plain, *offloaded):
        del noted["folder"], noted["owner"]
    assert offloaded == plain


def test_lora_on_a_frozen_base() -> None:
    theirs, ours = train_both(under_accelerate, *CASES["plain"], "", True)
    for noted in (*theirs, *ours):
        del noted["folder"]
    assert ours == theirs


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_trainer(lora: bool) -> None:
    theirs, ours = train_both(under_trainer, lora)
    finals = [saved(f"{noted[0].pop('folder')}/final") for noted in (theirs, ours)]
    folders = [noted[1].pop("folder") for noted in (theirs, ours)]
    assert finals[0] == finals[1] != {}
    assert ours == theirs
    assert len(ours[0]["losses"]) == 4
    resumed = run_ranks(
        train_with, 2, under_trainer, "ours", lora, f"{folders[0]}/checkpoint-2", timeout=280.0
    )
    assert [noted["losses"][-2:] for noted in resumed] == [noted["losses"][2:] for noted in theirs]
