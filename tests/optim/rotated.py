"""An optimizer whose states are not all like parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Rotated(torch.optim.Optimizer):
    """Has states of shapes of their own, as Shampoo, and a value for each block."""

    def __init__(self, params: Any, lr: float = 0.1, keeps: Any = None) -> None:
        super().__init__(params, {"lr": lr, "keeps": keeps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["left"] = torch.zeros(param.shape[0], param.shape[0])
                    state["step"], state["norm"] = torch.tensor(0.0), 0.0
                    if group["keeps"]:
                        state["list"] = [1]
                state["left"] += param.grad @ param.grad.T
                state["step"] += 1
                state["norm"] = float(param.grad.norm())
                param.sub_(state["left"] @ param.grad, alpha=group["lr"] / (1 + state["norm"]))
