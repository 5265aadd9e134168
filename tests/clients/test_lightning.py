"""Lightning's `ModelParallelStrategy`: losses and checkpoints of ours are those of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from clients.both import needs, owner, shared_folder, train_both

pytestmark = [needs("lightning"), pytest.mark.timeout(600)]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def make_module() -> Any:
    import lightning

    class Small(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
            self.losses: list[float] = []

        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    return Small()


def make_trainer(max_steps: int, distributed_checkpoint: bool) -> Any:
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    class TheseRanks(LightningEnvironment):
        creates_processes_externally = True
        world_size: Callable[..., int] = staticmethod(dist.get_world_size)
        global_rank: Callable[..., int] = staticmethod(dist.get_rank)
        local_rank: Callable[..., int] = staticmethod(dist.get_rank)

    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=distributed_checkpoint,
        ),
        plugins=[TheseRanks()],
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def under_lightning(distributed_checkpoint: bool) -> dict[str, Any]:
    """Train two steps, save, and go on from there with a new trainer for two more."""
    batches = torch.utils.data.DataLoader(Rows(), batch_size=2)
    checkpoint = f"{shared_folder()}/checkpoint"
    first, trainer = make_module(), make_trainer(2, distributed_checkpoint)
    trainer.fit(first, batches)
    trainer.save_checkpoint(checkpoint)
    second = make_module()
    make_trainer(4, distributed_checkpoint).fit(second, batches, ckpt_path=checkpoint)
    full = {name: value.full_tensor().tolist() for name, value in second.net.state_dict().items()}
    is_folder = Path(checkpoint).is_dir()
    return {
        "owner": owner(second.net),
        "losses": first.losses + second.losses,
        "parameters": full,
        "is folder": is_folder,
    }


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "full"])
def test_model_parallel_strategy(distributed: bool) -> None:
    theirs, ours = train_both(under_lightning, distributed)
    assert ours == theirs
    assert len(ours[0]["losses"]) == 4
    assert ours[0]["is folder"] is distributed
