"""Training a Llama under accelerate and under the Trainer of transformers, on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clients.both import llama, owner, shared_folder, tokens

LAYER = "LlamaDecoderLayer"
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@contextlib.contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Let accelerate use its FSDP2 plugin, which it ignores where there is no accelerator."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    def forget() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    forget()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    try:
        yield
    finally:
        forget()


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    return get_peft_model(model, LoraConfig(**LORA))


def accelerator(plugin: dict[str, Any], **options: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    chosen = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": [LAYER],
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    one = FullyShardedDataParallelPlugin(**{**chosen, **plugin})
    return Accelerator(cpu=True, fsdp_plugin=one, **options)


def under_accelerate(
    plugin: dict[str, Any],
    options: dict[str, Any],
    model_options: dict[str, Any],
    load_from: str = "",
    lora: bool = False,
) -> dict[str, Any]:
    """Train four steps, save, two more, load, and the same two again."""
    with as_on_an_accelerator():
        one = accelerator(plugin, **options)
        model = llama(**model_options)
        if lora:
            model = with_lora(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = one.prepare(model, optimizer)
        steps = _steps(one, model, optimizer)
        if load_from:
            one.load_state(load_from)
            return {"owner": owner(model), "losses": steps(range(4, 6))}
        folder = shared_folder()
        noted = {"losses": steps(range(4)), "folder": folder, "owner": owner(model)}
        one.save_state(f"{folder}/state")
        noted["after saving"] = steps(range(4, 6))
        one.load_state(f"{folder}/state")
        noted["after loading"] = steps(range(4, 6))
        full = one.get_state_dict(model)
        noted["full"] = {name: value.float().sum().item() for name, value in full.items()}
        return noted


def _steps(one: Any, model: nn.Module, optimizer: Any) -> Any:
    num_microbatches = one.gradient_accumulation_steps

    def run(steps: range) -> list[float]:
        noted = []
        for step in steps:
            for microbatch in range(num_microbatches):
                ids = tokens(num_microbatches * step + microbatch, dist.get_rank())
                with one.accumulate(model):
                    loss = model(input_ids=ids, labels=ids).loss
                    one.backward(loss)
                    if one.sync_gradients:
                        norm = one.clip_grad_norm_(model.parameters(), 1.0)
                        noted.append(norm.full_tensor().item())
                    optimizer.step()
                    optimizer.zero_grad()
                noted.append(loss.item())
        return noted

    return run


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(index, 0)[0]
        return {"input_ids": ids, "labels": ids}


def under_trainer(lora: bool = False, resume_from: str = "") -> dict[str, Any]:
    """Train four steps with a checkpoint after two; or go on from a checkpoint to the end."""
    from transformers import Trainer, TrainingArguments

    with as_on_an_accelerator():
        folder = shared_folder()
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "transformer_layer_cls_to_wrap": [LAYER],
                "reshard_after_forward": True,
                "cpu_ram_efficient_loading": False,
                "state_dict_type": "FULL_STATE_DICT",
            },
        )
        with_accelerator_type()
        model = with_lora(llama()) if lora else llama()
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
        trainer.train(resume_from_checkpoint=resume_from or None)
        history = [line for line in trainer.state.log_history if "loss" in line]
        trainer.save_model(f"{folder}/final")
        dist.barrier()
        return {
            "owner": owner(trainer.model),
            "folder": folder,
            "losses": [line["loss"] for line in history],
            "norms": [line["grad_norm"] for line in history],
        }


def with_accelerator_type() -> None:
    """Say again what arguments of a Trainer have overwritten."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def saved(folder: str) -> dict[str, list[float]]:
    from safetensors.torch import load_file

    file = next(Path(folder).glob("*.safetensors"))
    return {name: value.flatten().tolist() for name, value in load_file(file).items()}
