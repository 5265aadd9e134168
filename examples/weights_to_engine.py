"""Send the weights of a training to an engine that generates, again and again while it trains.

The first ranks train a sharded model; the others are an engine with another layout: matrices cut
for tensor parallelism. Every rank that trains sends each rank of the engine just those rows and
columns that the one has and the other needs, straight from shard to shard, in one all-to-all for
each bucket: no rank ever holds the whole model, and every byte that is needed is sent once. What
has not changed since the last time is not sent again. After each update the engine generates.

    torchrun --nproc-per-node 4 examples/weights_to_engine.py
    torchrun --nproc-per-node 5 examples/weights_to_engine.py --engine 3 --check
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import changed_since, fully_shard, iter_full, local_shards

TEXT = "weights"  # each of its letters tells which one is next
VOCABULARY, WIDTH, HIDDEN, NUM_BLOCKS = 128, 24, 48, 2

# The model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, width] to [batch, width]."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts the next character from the last one; its embedding is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [batch] to logits [batch, vocabulary]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cut_dim(name: str) -> int | None:
    """Return which dim of a tensor the ranks of the engine share; ``None`` if each has all."""
    if name.endswith(("up.weight", "up.bias", "head.weight")):
        return 0
    return 1 if name.endswith("down.weight") else None


# From shard to shard ------------------------------------------------------------------------------

Box = tuple[tuple[int, int], ...]
"""From where to where, in each dim of a full tensor."""


class Transfer(NamedTuple):
    """A part of a tensor that one rank sends to another."""

    name: str
    source: int
    target: int
    box: Box


def nbytes_of(box: Box) -> int:
    """Return the bytes of a part, all of which are float32."""
    return torch.Size(end - start for start, end in box).numel() * 4


def part_of(tensor: torch.Tensor, lies_at: Box, box: Box) -> torch.Tensor:
    """View what of a box a tensor contains that is itself another box of the full tensor."""
    pairs = zip(lies_at, box, strict=True)
    return tensor[tuple(slice(start - origin, end - origin) for (origin, _), (start, end) in pairs)]


def overlap(one: Box, other: Box) -> Box | None:
    """Return what both contain."""
    pairs = zip(one, other, strict=True)
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
    return box if all(start < end for start, end in box) else None


class Plan:
    """Who sends which part to whom, in buckets. Every rank makes the same one.

    Args:
        held: What each rank that trains holds, by its number: pairs of a name and a box.
        wanted: What each rank of the engine needs.
        bucket_nbytes: How many bytes all ranks together send at once, at most, but for a larger
            tensor alone.
    """

    def __init__(
        self,
        held: dict[int, list[tuple[str, Box]]],
        wanted: dict[int, dict[str, Box]],
        bucket_nbytes: int,
    ) -> None:
        self._bucket_nbytes = bucket_nbytes
        senders: dict[str, dict[Box, int]] = {}
        for rank, parts in held.items():
            for name, box in parts:  # of ranks that hold the same, the first one sends
                senders.setdefault(name, {}).setdefault(box, rank)
        self._transfers: dict[str, list[Transfer]] = {}
        for target, boxes in wanted.items():
            for name, needed in boxes.items():
                for box, source in senders[name].items():
                    common = overlap(box, needed)
                    if common is not None:
                        transfer = Transfer(name, source, target, common)
                        self._transfers.setdefault(name, []).append(transfer)

    def buckets(self, names: Sequence[str]) -> Iterator[list[Transfer]]:
        """Yield the transfers of some tensors, bucket by bucket."""
        bucket: list[Transfer] = []
        nbytes = 0
        for name in names:
            more = self._transfers[name]
            added = sum(nbytes_of(transfer.box) for transfer in more)
            if bucket and nbytes + added > self._bucket_nbytes:
                yield bucket
                bucket, nbytes = [], 0
            bucket, nbytes = bucket + more, nbytes + added
        if bucket:
            yield bucket


def exchange(bucket: Sequence[Transfer], own: dict[str, list[tuple[Box, torch.Tensor]]]) -> int:
    """Send and receive the parts of a bucket; return how many bytes this rank has received.

    Args:
        bucket: Who sends what to whom.
        own: By name, what this rank holds, and which part of the full tensor that is.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def places(transfers: Sequence[Transfer]) -> list[torch.Tensor]:
        return [
            part_of(tensor, lies_at, box)
            for name, _, _, box in transfers
            for lies_at, tensor in own[name]
            if overlap(lies_at, box) == box
        ]

    def counts(parts: Sequence[Sequence[Transfer]]) -> list[int]:
        return [sum(nbytes_of(transfer.box) for transfer in some) // 4 for some in parts]

    to = [[t for t in bucket if t.source == rank and t.target == peer] for peer in range(num_ranks)]
    come = [
        [t for t in bucket if t.target == rank and t.source == peer] for peer in range(num_ranks)
    ]
    sent = [part.reshape(-1) for some in to for part in places(some)]
    into = [part for some in come for part in places(some)]
    received = torch.empty(sum(counts(come)))
    message = torch.cat(sent) if sent else torch.empty(0)
    dist.all_to_all_single(received, message, counts(come), counts(to))
    for part, values in zip(into, received.split([p.numel() for p in into]), strict=True):
        part.copy_(values.view(part.shape))
    return received.nbytes


# The ranks that train -----------------------------------------------------------------------------


class Trainer:
    """A rank that trains."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.model, self.group = Model(), mesh.get_group()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        params = [param for param in self.model.parameters() if param.requires_grad]
        self._optimizer = torch.optim.AdamW(params, lr=0.01)
        self._sent: dict[str, tuple[int, ...]] = {}

    def train(self, num_steps: int) -> None:
        """Learn which character follows which."""
        tokens = torch.tensor([ord(character) for character in TEXT])
        for _ in range(num_steps):
            loss = nn.functional.cross_entropy(self.model(tokens), tokens.roll(-1))
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def held(self) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        """Return what this rank holds of the model now."""
        found: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for shard in local_shards(self.model):
            box = tuple((one.start, one.stop) for one in shard.box)
            found.setdefault(shard.name, []).append((box, shard.tensor))
        return found

    def changed(self) -> list[str]:
        """Return what the engine does not have as it is now, and take it for sent."""
        names = changed_since(self.model, self._sent)
        self._sent = {shard.name: shard.version for shard in local_shards(self.model)}
        return names


# The ranks of the engine --------------------------------------------------------------------------


class Engine:
    """A rank that generates: it holds its columns and rows of matrices, and all of the rest."""

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        self._group = group
        place = ranks.index(dist.get_rank())
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in Model().state_dict().items()}
        self.boxes: dict[str, Box] = {}
        for name, shape in shapes.items():
            box = [(0, length) for length in shape]
            dim = cut_dim(name)
            if dim is not None:
                box[dim] = (
                    shape[dim] * place // len(ranks),
                    shape[dim] * (place + 1) // len(ranks),
                )
            self.boxes[name] = tuple(box)
        self.weights = {
            name: torch.empty([end - start for start, end in box])
            for name, box in self.boxes.items()
        }

    def held(self) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        """Return what is to be received."""
        return {name: [(self.boxes[name], tensor)] for name, tensor in self.weights.items()}

    def generate(self, num_characters: int) -> str:
        """Return what follows the first letter, one most likely character after another."""
        text = TEXT[0]
        while len(text) < num_characters:
            text += chr(int(self._logits(torch.tensor([ord(text[-1])])).argmax()))
        return text

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute what the model does. Collective: an all-reduce for each block and the head."""
        get, functional = self.weights.__getitem__, nn.functional
        x = get("embed.weight")[tokens]
        for index in range(NUM_BLOCKS):
            block = f"blocks.{index}."
            norm = get(f"{block}norm.weight"), get(f"{block}norm.bias")
            y = functional.layer_norm(x, (WIDTH,), *norm)
            y = torch.relu(functional.linear(y, get(f"{block}up.weight"), get(f"{block}up.bias")))
            y = functional.linear(y, get(f"{block}down.weight"))
            dist.all_reduce(y, group=self._group)
            x = x + y + get(f"{block}down.bias")
        logits = torch.zeros(len(tokens), VOCABULARY)
        logits[:, slice(*self.boxes["head.weight"][0])] = x @ get("head.weight").T
        dist.all_reduce(logits, group=self._group)
        return logits


# All of them --------------------------------------------------------------------------------------


def update(member: Trainer | Engine, plan: Plan) -> dict[str, int]:
    """Bring the engine what has changed; return what this rank has received."""
    said = [member.changed() if isinstance(member, Trainer) else None]
    dist.broadcast_object_list(said, src=0)
    names, own = said[0] or [], member.held()
    received = [exchange(bucket, own) for bucket in plan.buckets(names)]
    largest = max(received, default=0)
    return {"tensors": len(names), "nbytes": sum(received), "largest": largest}


def is_equal(member: Trainer | Engine, engine: Sequence[int]) -> bool:
    """Compare the weights of the engine with the whole tensors, which the first rank sends."""
    if isinstance(member, Trainer):
        for _, full in iter_full(member.model, rank0_only=True, process_group=member.group):
            for rank in engine:
                dist.send(full, rank)
        return True
    same = True
    for name, own in member.weights.items():
        box, dim = member.boxes[name], cut_dim(name)
        shape = [end for _, end in box]
        if dim is not None:
            shape[dim] = VOCABULARY if name == "head.weight" else HIDDEN
        full = torch.empty(shape)
        dist.recv(full, 0)
        same &= torch.equal(own, part_of(full, tuple((0, length) for length in shape), box))
    return same


def run(options: argparse.Namespace) -> None:
    """Train, update and generate, as one of the ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    trainers = list(range(num_ranks - options.engine))
    engine = list(range(num_ranks - options.engine, num_ranks))
    mesh = DeviceMesh("cpu", trainers, mesh_dim_names=("shard",))  # all ranks make it
    group = dist.new_group(engine)
    member = Trainer(mesh) if rank in trainers else Engine(engine, group)
    held = [(name, box) for name, parts in member.held().items() for box, _ in parts]
    told: list[list[tuple[str, Box]]] = [[]] * num_ranks
    dist.all_gather_object(told, held)
    plan = Plan(
        {rank: told[rank] for rank in trainers},
        {rank: dict(told[rank]) for rank in engine},
        options.bucket_bytes,
    )
    lines = []
    for number in range(options.updates):
        if isinstance(member, Trainer):
            member.train(options.steps if number else 0)
        figures: dict[str, object] = {"update": number, **update(member, plan)}
        if options.check:
            figures["equal"] = is_equal(member, engine)
        if isinstance(member, Engine):
            figures["text"] = member.generate(2 * len(TEXT))
        lines.append(figures)
        if rank == engine[0]:
            print(json.dumps(figures), flush=True)
    if options.json:
        options.json.mkdir(parents=True, exist_ok=True)
        (options.json / f"{rank}.json").write_text(json.dumps(lines))


def main() -> None:
    """Read the command line and be one of torchrun's ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=int, default=2, help="how many ranks generate")
    parser.add_argument("--updates", type=int, default=5, help="how often weights are sent")
    parser.add_argument("--steps", type=int, default=2, help="steps between two of them")
    parser.add_argument("--bucket-bytes", type=int, default=16384, help="sent at once, at most")
    parser.add_argument("--check", action="store_true", help="compare with whole tensors")
    parser.add_argument("--json", type=Path, help="a folder for what each rank has seen")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if not 0 < options.engine < dist.get_world_size():
        parser.error(f"expected at least one rank to train beside --engine {options.engine}")
    run(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
