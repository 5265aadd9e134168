"""Optimizers with states of dtypes of their own."""

from __future__ import annotations

from typing import Any

import torch


class Coded(torch.optim.Optimizer):
    """Has a momentum in float32 and a code in uint8 of each element, whatever the parameter's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def begin(self, param: torch.Tensor) -> dict[str, Any]:
        return {
            "step": torch.tensor(0.0),
            "momentum": torch.zeros_like(param, dtype=torch.float32),
            "code": torch.zeros_like(param, dtype=torch.uint8),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(self.begin(param))
                grad = param.grad.float()
                state["step"] += 1
                state["momentum"].lerp_(grad, 0.1)
                state["code"].copy_((state["code"].int() + 300 + grad.sign().int()) % 251)
                scale = 1 + state["code"].float() / 256 + state.get("table", torch.zeros(1))[-1]
                param.sub_((state["momentum"] * scale).to(param.dtype), alpha=group["lr"])


class Wrapped(Coded):
    """Has a table besides, and hides all in a dict when it is saved, as bitsandbytes does."""

    def begin(self, param: torch.Tensor) -> dict[str, Any]:
        return {**super().begin(param), "step": 0, "table": torch.linspace(0, 1 / 3, 256)}

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        hidden = {key: {"step": own["step"], "hidden": own} for key, own in saved["state"].items()}
        return {**saved, "state": hidden}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        self.state.clear()
        for key, own in state_dict["state"].items():
            hidden = {name: value for name, value in own["hidden"].items() if name != "step"}
            self.state[params[key]] = {"step": own["step"], **hidden}
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})
