"""Models as values: what a case of the fuzzer trains, and how its parts are grouped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 4
BATCH = 2
VOCABULARY = WIDTH + 1


@dataclass(frozen=True)
class Block:
    """One part of a model.

    Args:
        name: Its name, by which calls refer to it.
        kind: What it computes: a key of ``KINDS``, or "nest" for one that runs its children.
        group: Whether it is a group by itself ("own"), of its parent's ("parent"), or forms one
            with the siblings that have the same word here.
        source: What it is given: the stream ("x"), the stream detached, or the batch ("data").
        join: What becomes of its output: added to the stream ("add"), the stream from now on
            ("next"), changed in place and added ("inplace"), in the loss alone ("out"), unused
            ("drop").
        calls: How often it is called, one after the other.
        recompute: "reentrant" or "saved" (not reentrant): computed again in backward.
        frozen: Whether its own parameters need no gradient.
        out: What holds its output: "tensor", "dict", "dataclass", "tuple".
        tied: Whether its weight is that of the first linear block of the model.
        dim: The dim that its parameters are sharded on, where they have that many.
        wire: Whether its parameters travel as two tensors, by the protocol of extensions.
        low: Whether its last parameter is of a narrower dtype.
        children: Those of a "nest".
    """

    name: str
    kind: str = "linear"
    group: str = "own"
    source: str = "x"
    join: str = "add"
    calls: int = 1
    recompute: str = ""
    frozen: bool = False
    out: str = "tensor"
    tied: bool = False
    dim: int = 0
    wire: bool = False
    low: bool = False
    children: tuple[Block, ...] = ()

    def walk(self) -> Iterator[Block]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Call:
    """One forward: the same on all ranks, but for what a rank's loss reaches.

    Args:
        order: Names of top-level blocks that run first, in this order; then the others.
        off: By rank, names of blocks whose outputs this rank detaches.
        unused: By rank, ``block.index`` of parameters of "many" blocks that do not take part.
        skipped: Names of top-level blocks that no rank runs.
    """

    order: tuple[str, ...] = ()
    off: tuple[frozenset[str], ...] = ()
    unused: tuple[frozenset[str], ...] = ()
    skipped: frozenset[str] = frozenset()

    def for_rank(self, rank: int) -> Plan:
        off = self.off[rank] if rank < len(self.off) else frozenset()
        unused = self.unused[rank] if rank < len(self.unused) else frozenset()
        return Plan(self.order, off, unused, self.skipped)


@dataclass(frozen=True)
class Plan:
    """One rank's part of a call."""

    order: tuple[str, ...] = ()
    off: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()


@dataclass
class Output:
    y: Tensor
    label: str = "y"
    more: list[Tensor] = field(default_factory=list)


# What blocks compute ------------------------------------------------------------------------


def _embedding(block: Any, x: Tensor, data: Tensor, plan: Plan) -> Tensor:
    ids = (data > 0).sum(1)  # of signs, which no rounding changes
    return F.embedding(ids, block.p0) + 0 * x


def _many(block: Any, x: Tensor, data: Tensor, plan: Plan) -> Tensor:
    y = torch.sin(x)
    for index, param in enumerate(block.own):
        if f"{block.spec.name}.{index}" not in plan.unused:
            y = y + torch.tanh(x * param.to(x.dtype).sin().sum())
    return y


def _cached(block: Any, x: Tensor, data: Tensor, plan: Plan) -> Tensor:
    block.kept = torch.tanh(x @ block.p1)
    return torch.tanh(x @ block.p0)


def _inner(block: Any, x: Tensor, data: Tensor, plan: Plan) -> Tensor:
    if torch.is_grad_enabled() and block.p0.requires_grad:
        F.linear(x.detach(), block.p0, block.p1).square().mean().backward()
    return torch.tanh(F.linear(x, block.p0, block.p1))


Shapes = tuple[tuple[int, ...], ...]
W = WIDTH
SQUARE: Shapes = ((W, W), (W,))
KINDS: dict[str, tuple[Shapes, Callable[[Any, Tensor, Tensor, Plan], Tensor]]] = {
    "linear": (SQUARE, lambda b, x, *_: F.linear(x, b.p0, b.p1).tanh()),
    "mlp": (
        ((2 * W, W), (2 * W,), (W, 2 * W)),
        lambda b, x, *_: F.linear(F.gelu(F.linear(x, b.p0, b.p1)), b.p2),
    ),
    "embedding": (((VOCABULARY, W),), _embedding),
    "norm": (((W,), (W,)), lambda b, x, *_: F.layer_norm(x, (W,), b.p0, b.p1, eps=0.1)),
    "conv": (
        ((3, 1, 3), (3,)),
        lambda b, x, *_: F.conv1d(x.unsqueeze(1), b.p0, b.p1, padding=1).sum(1),
    ),
    "scalar": (((),), lambda b, x, *_: (x * b.p0).tanh()),
    "batched": (((3, W, W),), lambda b, x, *_: torch.einsum("bw,ewv->bv", x, b.p0) / 3),
    "rows": (((1,), (7, W)), lambda b, x, *_: x * b.p0.sin().sum() + x @ b.p1.T @ b.p1 / 4),
    "many": (((W, W), (3,), (), (5, 2)), _many),
    "cached": (((W, W), (W, W)), _cached),
    "inner": (SQUARE, _inner),
    "view": (SQUARE, lambda b, x, *_: torch.addmm(b.p1, x, b.p0.T).view(-1, W)),
    # A detached use beside a used one: read by backward, without a gradient of its own.
    "detached": (SQUARE, lambda b, x, *_: (x @ b.p0.detach()).tanh() + x * b.p1),
    "twice": (SQUARE, lambda b, x, *_: ((x @ b.p0 + b.p1).tanh() @ b.p0.T).tanh()),
}
TIED_KINDS = frozenset({"linear", "view", "twice"})


class Leaf(nn.Module):
    def __init__(self, spec: Block, known: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.spec = spec
        shapes, self.compute = KINDS[spec.kind]
        for index, shape in enumerate(shapes):
            # The random state moves on alike, tied or not.
            param = nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.6)
            if spec.low and index == len(shapes) - 1:
                param = nn.Parameter(param.detach().float())
            param.requires_grad_(not spec.frozen)
            if index == 0 and spec.kind in TIED_KINDS:
                param = known["weight"] if spec.tied and "weight" in known else param
                known.setdefault("weight", param)
            self.register_parameter(f"p{index}", param)

    @property
    def own(self) -> list[nn.Parameter]:
        return [param for param in self._parameters.values() if param is not None]

    def forward(self, x: Tensor, data: Tensor, plan: Plan) -> Any:
        y = self.compute(self, x, data, plan)
        if self.spec.out == "dict":
            return {"y": y, "n": 3}
        if self.spec.out == "dataclass":
            return Output(y, more=[y])
        return (y, None) if self.spec.out == "tuple" else y


def unpacked(y: Any) -> Tensor:
    if isinstance(y, dict):
        y = y["y"]
    elif isinstance(y, Output):
        y = y.y
    elif isinstance(y, tuple):
        y = y[0]
    return y


class Nest(nn.Module):
    """Runs blocks one after the other; perhaps uses parameters of its own before and after."""

    def __init__(self, spec: Block, known: dict[str, nn.Parameter], own: str = "") -> None:
        super().__init__()
        self.spec = spec
        for where in ("before", "after"):
            param = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64).abs() + 0.5)
            if where in own or "both" in own:
                self.register_parameter(where, param.requires_grad_(not spec.frozen))
        self.parts = nn.ModuleDict({b.name: build_block(b, known) for b in spec.children})

    def forward(self, x: Tensor, data: Tensor, plan: Plan) -> Tensor:
        return self.run(x, data, plan, [])

    def run(self, x: Tensor, data: Tensor, plan: Plan, outs: list[Tensor]) -> Tensor:
        if "before" in self._parameters:
            x = x * self.before
        names = [name for name in plan.order if name in self.parts]
        names += [name for name in self.parts if name not in names]
        for name in names:
            if name not in plan.skipped:
                x = self.run_part(self.parts[name], x, data, plan, outs)
        return x * self.after if "after" in self._parameters else x

    def run_part(
        self, part: Any, x: Tensor, data: Tensor, plan: Plan, outs: list[Tensor]
    ) -> Tensor:
        spec = part.spec
        given = {"x": x, "detach": x.detach(), "data": data.to(x.dtype)}[spec.source]
        for _ in range(spec.calls):
            if spec.recompute:
                reentrant = spec.recompute == "reentrant"
                y = unpacked(checkpoint(part, given, data, plan, use_reentrant=reentrant))
            else:
                y = unpacked(part(given, data, plan))
            if spec.name in plan.off:
                y = y.detach()
            elif spec.join == "inplace":
                y = y.mul_(1.5)
            if spec.calls > 1:
                given = y
        y = y.to(x.dtype)
        if spec.join == "next":
            return y
        if spec.join == "out":
            outs.append(y)
        return x if spec.join in ("out", "drop") else x + y


class Model(Nest):
    def forward(self, data: Tensor, plan: Plan) -> Tensor:  # type: ignore[override]
        for module in self.modules():
            if isinstance(module, Leaf):
                module.kept = None
        outs: list[Tensor] = []
        x = self.run(data, data, plan, outs)
        loss = x.double().square().mean()
        for weight, out in enumerate(outs, 2):
            loss = loss + out.double().square().mean() / weight
        for module in self.modules():
            kept = module.kept if isinstance(module, Leaf) else None
            if kept is not None and module.spec.name + ".kept" not in plan.off:
                loss = loss + kept.double().square().mean()
        return loss


def build_block(spec: Block, known: dict[str, nn.Parameter]) -> nn.Module:
    if spec.kind.startswith("nest"):
        return Nest(spec, known, own=spec.kind[4:])
    return Leaf(spec, known)


def build(blocks: tuple[Block, ...], own: str, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(Block("root", kind="nest", children=blocks), {}, own)
