"""Send the weights of a model to an inference engine, repeatedly while the model trains.

The first ranks train a sharded model. The other ranks are the engine, which splits matrices for
tensor parallelism. Every training rank sends each rank of the engine just the rows and columns that
it needs, in one all-to-all for each bucket. So no rank ever holds the whole model, and every needed
byte is sent once. Unchanged tensors are not sent again. After each update of its weights, the
engine generates a text.

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

TEXT = "weights"  # its letters differ, so each letter determines the next
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
    """Predicts the next character from the last one; its embedding is frozen."""

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
    """Return the dim over which the engine shards a tensor; ``None`` if it replicates it."""
    if name.endswith(("up.weight", "up.bias", "head.weight")):
        return 0
    return 1 if name.endswith("down.weight") else None


# From shard to shard ------------------------------------------------------------------------------

Box = tuple[tuple[int, int], ...]
"""Start and end in each dim of a full tensor."""


class Transfer(NamedTuple):
    """A part of a tensor that one rank sends to another."""

    name: str
    source: int
    target: int
    box: Box


def nbytes_of(box: Box) -> int:
    """Return the bytes of a float32 part."""
    return torch.Size(end - start for start, end in box).numel() * 4


def part_of(tensor: torch.Tensor, tensor_box: Box, box: Box) -> torch.Tensor:
    """Return a view of ``box`` in a tensor that holds ``tensor_box`` of the full tensor."""
    pairs = zip(tensor_box, box, strict=True)
    return tensor[tuple(slice(start - origin, end - origin) for (origin, _), (start, end) in pairs)]


def overlap(left: Box, right: Box) -> Box | None:
    """Return the intersection of two boxes, if there is any."""
    pairs = zip(left, right, strict=True)
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
    return box if all(start < end for start, end in box) else None


class Plan:
    """The parts that each rank sends to each other rank, in buckets; the same on all ranks.

    Args:
        held: The shards of each training rank, by rank: pairs of a name and a box.
        wanted: The boxes that each rank of the engine needs, by rank and name.
        bucket_nbytes: The largest bucket in bytes, over all ranks. A larger tensor gets its own.
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
            for name, box in parts:  # the first rank that holds a box sends it
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


def exchange(bucket: Sequence[Transfer], held: dict[str, list[tuple[Box, torch.Tensor]]]) -> int:
    """Send and receive the parts of a bucket; return the bytes that this rank has received.

    Args:
        bucket: The transfers between all ranks.
        held: The shards of this rank and their boxes, by name.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def parts(transfers: Sequence[Transfer]) -> list[torch.Tensor]:
        return [
            part_of(tensor, tensor_box, box)
            for name, _, _, box in transfers
            for tensor_box, tensor in held[name]
            if overlap(tensor_box, box) == box
        ]

    def counts(of_peers: Sequence[Sequence[Transfer]]) -> list[int]:
        return [sum(nbytes_of(transfer.box) for transfer in peer) // 4 for peer in of_peers]

    peers = range(num_ranks)
    outgoing = [[t for t in bucket if t.source == rank and t.target == peer] for peer in peers]
    incoming = [[t for t in bucket if t.target == rank and t.source == peer] for peer in peers]
    inputs = [part.reshape(-1) for transfers in outgoing for part in parts(transfers)]
    outputs = [part for transfers in incoming for part in parts(transfers)]
    received = torch.empty(sum(counts(incoming)))
    message = torch.cat(inputs) if inputs else torch.empty(0)
    dist.all_to_all_single(received, message, counts(incoming), counts(outgoing))
    for part, values in zip(outputs, received.split([p.numel() for p in outputs]), strict=True):
        part.copy_(values.view(part.shape))
    return received.nbytes


# The training ranks -------------------------------------------------------------------------------


class Trainer:
    """A training rank."""

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
        """Train to predict the next character."""
        tokens = torch.tensor([ord(character) for character in TEXT])
        for _ in range(num_steps):
            loss = nn.functional.cross_entropy(self.model(tokens), tokens.roll(-1))
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def held(self) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        """Return the shards of this rank and their boxes."""
        found: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for shard in local_shards(self.model):
            box = tuple((dim.start, dim.stop) for dim in shard.box)
            found.setdefault(shard.name, []).append((box, shard.tensor))
        return found

    def changed(self) -> list[str]:
        """Return the names of tensors that have changed since the last call."""
        names = changed_since(self.model, self._sent)
        self._sent = {shard.name: shard.version for shard in local_shards(self.model)}
        return names


# The ranks of the engine --------------------------------------------------------------------------


class Engine:
    """A rank of the engine: it holds its rows or columns of split tensors, and all the others."""

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
        """Return the weights of this rank and their boxes."""
        return {name: [(self.boxes[name], tensor)] for name, tensor in self.weights.items()}

    def generate(self, num_characters: int) -> str:
        """Generate text from the first letter, always with the most likely character."""
        text = TEXT[0]
        while len(text) < num_characters:
            text += chr(int(self._logits(torch.tensor([ord(text[-1])])).argmax()))
        return text

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the model. Collective: an all-reduce for each block and the head."""
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


# All ranks ----------------------------------------------------------------------------------------


def update(member: Trainer | Engine, plan: Plan) -> dict[str, int]:
    """Send the changed tensors to the engine; return the number of tensors and received bytes."""
    changed = [member.changed() if isinstance(member, Trainer) else None]
    dist.broadcast_object_list(changed, src=0)
    names, held = changed[0] or [], member.held()
    received = [exchange(bucket, held) for bucket in plan.buckets(names)]
    largest = max(received, default=0)
    return {"tensors": len(names), "nbytes": sum(received), "largest": largest}


def is_equal(member: Trainer | Engine, engine: Sequence[int]) -> bool:
    """Compare the weights of the engine with full tensors from rank 0."""
    if isinstance(member, Trainer):
        for _, full in iter_full(member.model, rank0_only=True, process_group=member.group):
            for rank in engine:
                dist.send(full, rank)
        return True
    same = True
    for name, weight in member.weights.items():
        box, dim = member.boxes[name], cut_dim(name)
        shape = [end for _, end in box]
        if dim is not None:
            shape[dim] = VOCABULARY if name == "head.weight" else HIDDEN
        full = torch.empty(shape)
        dist.recv(full, 0)
        same &= torch.equal(weight, part_of(full, tuple((0, length) for length in shape), box))
    return same


def run(options: argparse.Namespace) -> None:
    """Train, update and generate on one rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    trainers = list(range(num_ranks - options.engine))
    engine = list(range(num_ranks - options.engine, num_ranks))
    mesh = DeviceMesh("cpu", trainers, mesh_dim_names=("shard",))  # made on all ranks
    group = dist.new_group(engine)
    member = Trainer(mesh) if rank in trainers else Engine(engine, group)
    held = [(name, box) for name, parts in member.held().items() for box, _ in parts]
    boxes: list[list[tuple[str, Box]]] = [[]] * num_ranks
    dist.all_gather_object(boxes, held)
    plan = Plan(
        {rank: boxes[rank] for rank in trainers},
        {rank: dict(boxes[rank]) for rank in engine},
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
    """Read the command line and run on this rank of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=int, default=2, help="number of ranks that generate")
    parser.add_argument("--updates", type=int, default=5, help="number of updates of the engine")
    parser.add_argument("--steps", type=int, default=2, help="training steps between two updates")
    parser.add_argument("--bucket-bytes", type=int, default=16384, help="largest bucket")
    parser.add_argument("--check", action="store_true", help="compare with full tensors")
    parser.add_argument("--json", type=Path, help="folder for the figures of each rank")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if not 0 < options.engine < dist.get_world_size():
        parser.error(f"expected at least one rank to train beside --engine {options.engine}")
    run(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
