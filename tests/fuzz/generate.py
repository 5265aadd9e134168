"""Draws cases: one integer and the switches give one case."""

from __future__ import annotations

import random
from dataclasses import replace

from .model import KINDS, Block, Call
from .program import Case, Op

REACH = frozenset(
    {
        *("off", "unused"),  # ranks' losses reach different parts, or use different parameters
        *("detach", "data"),  # parts that are given a detached stream, or the batch
        *("lists", "frozen", "tied", "nests"),  # groups of several modules; containers
        *("calls", "inner", "cached"),  # two calls; backwards in forward; losses of what is stored
        *("saved", "reentrant", "saved_nests", "reentrant_nests"),  # checkpoints of both kinds
        *("order", "skipped"),  # forwards in another order, or without some parts
        *("several", "interleaved", "retain"),  # more forwards, or backwards, than one
        *("accumulate", "freeze", "fewer"),  # requires_grad_ between steps; gather from fewer ranks
    }
)
FEATURES = REACH | {
    *("evaluate", "inference", "dry_run"),  # an optimizer that is made after a first backward
    *("zeros", "clip", "edit", "foreach"),  # zero_grad(set_to_none=False); edits of no version
    *("states", "teacher", "fail", "by_hand", "settings", "keep"),  # unshard and reshard
    *("offload", "precision", "hybrid", "dims", "low"),  # several dtypes in a group
    *("live", "start", "inplace"),  # parameters asked of the model at each step
    *("wire", "alone"),  # parameters that travel as two tensors; forwards of one part
    "stages",  # parameters gathered, and gradients reduced, once in a step
    "registered",  # a check: outside of compute the sharded parameters are registered
}
FAMILIES = {"all": FEATURES, "reach": REACH, "alike": FEATURES - {"off", "unused"}}
"""What may be drawn: everything, what decides whom a loss reaches, what all ranks do alike."""

WORDS = {
    **{"train": 10, "accumulate": 4, "sync": 2, "zero": 3, "step": 5, "evaluate": 3, "clip": 2},
    **{"edit": 2, "states": 2, "teacher": 2, "fail": 1, "by_hand": 1, "settings": 2, "freeze": 2},
    **{"none": 1, "alone": 1},
}
"""How often the steps of a program are drawn."""


def generate(seed: int, features: frozenset[str]) -> Case:
    return Generator(seed, features).case()


class Generator:
    """Draws one case."""

    def __init__(self, seed: int, features: frozenset[str]) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.features = features
        self.num_blocks = 0

    def has(self, feature: str, chance: float = 0.5) -> bool:
        drawn = self.random.random() < chance
        return drawn and feature in self.features

    def case(self) -> Case:
        pick = self.random.choice
        total = self.random.randint(2, 6)
        blocks: list[Block] = []
        while self.num_blocks < total:
            blocks.append(self.block(0, False))
        blocks = self.grouped(blocks)
        ranks = self.random.choices([1, 2, 3, 4], [1, 8, 5, 3])[0]
        mesh: tuple[int, ...] = (ranks,)
        if self.has("hybrid", 0.15):
            mesh = pick([(2, 2), (2, 1), (1, 2)])
        shards = mesh[-1]
        reshard = pick([None, True, True, False])
        if shards == 4 and self.has("fewer", 0.5):
            reshard = 2
        case = Case(
            self.seed,
            tuple(blocks),
            (),
            own=pick(["", "before", "after", "both"]),
            mesh=mesh,
            reshard=reshard,
            reshard_root=pick(["same", "same", None, True, False]),
            keep=self.has("keep", 0.1),
            offload=self.has("offload", 0.1),
            precision=pick(["bfloat16", "float32"]) if self.has("precision", 0.1) else "",
            optimizer=pick(["sgd", "sgd.foreach", "adamw", "adamw.foreach", "adamw.fused"]),
            live=self.has("live", 0.3),
            start=pick(["double", "assign", "empty"]) if self.has("start", 0.15) else "",
            checks_registered="registered" in self.features,
        )
        if case.start in ("assign", "empty"):  # which untie, as torch does
            untied = tuple(map(_untied, case.blocks))
            case = replace(case, blocks=untied)
        if self.has("stages", 0.25):
            sharding = pick(["zero1", "zero2", "hybrid"])
            self.features -= {"foreach"}  # edits between backwards that torch counts
            case = replace(case, sharding=sharding)
            if sharding == "hybrid":
                plain = tuple(map(_plain, case.blocks))
                mesh = pick([(2, 2), (2, 2), (2, 1), (3, 1), (1, 2)])
                reshard = None if case.reshard == 2 else case.reshard
                case = replace(case, mesh=mesh, reshard=reshard, offload=False, blocks=plain)
            else:
                self.features -= {"alone"}
                case = replace(case, reshard=None, reshard_root="same")
        return replace(case, ops=tuple(self.program(case)))

    # The model ------------------------------------------------------------------------------

    def block(self, depth: int, inside: bool) -> Block:
        """Draw a block; inside of a checkpoint some kinds make no sense."""
        pick = self.random.choice
        name = f"b{self.num_blocks}"
        self.num_blocks += 1
        block = Block(name, group=pick(["own", "own", "own", "parent"]))
        if self.has("detach", 0.15):
            block = replace(block, source="detach")
        elif self.has("data", 0.1):
            block = replace(block, source="data")
        joins = ["add"] * 5 + ["next"] + (["out", "out"] if depth == 0 else [])
        joins += ["drop"] if self.has("off", 0.5) else []
        joins += ["inplace"] if self.has("inplace", 0.5) else []
        block = replace(block, join=pick(joins))
        if self.has("calls", 0.1):
            block = replace(block, calls=2)
        recompute = ""
        is_nest = depth < 2 and self.has("nests", 0.3)
        if self.has("saved_nests" if is_nest else "saved", 0.12):
            recompute = "saved"
        elif self.has("reentrant_nests" if is_nest else "reentrant", 0.1):
            recompute = "reentrant"
        if recompute:
            block = replace(block, recompute=recompute)
        inside = inside or bool(recompute)
        if self.has("frozen", 0.12):
            block = replace(block, frozen=True)
        if is_nest:
            if block.join == "inplace":
                block = replace(block, join="add")
            children = [self.block(depth + 1, inside) for _ in range(self.random.randint(1, 3))]
            own = pick(["", "", "before", "after", "both"])
            return replace(block, kind="nest" + own, children=tuple(self.grouped(children)))
        kinds = sorted(set(KINDS) - {"inner", "cached"})
        kinds += ["many"] * 4 if "unused" in self.features else []
        if not inside:
            kinds += ["inner"] if "inner" in self.features else []
            kinds += ["cached"] * 2 if "cached" in self.features else []
        if block.join == "inplace":  # of outputs that autograd does not save
            kinds = ["mlp", "norm", "conv", "batched", "rows", "view"]
        block = replace(block, kind=pick(kinds))
        if not block.recompute and not inside:
            block = replace(block, out=pick(["tensor"] * 4 + ["dict", "dataclass", "tuple"]))
        if self.has("tied", 0.15):
            block = replace(block, tied=True)
        if self.has("dims", 0.15):
            block = replace(block, dim=1)
        if self.has("wire", 0.1):
            block = replace(block, wire=True)
        if block.kind == "many" and self.has("low", 0.2):
            block = replace(block, low=True)
        return block

    def grouped(self, blocks: list[Block]) -> list[Block]:
        """Let some siblings form one group."""
        if len(blocks) < 2 or not self.has("lists", 0.3):
            return blocks
        members = self.random.sample(range(len(blocks)), self.random.randint(2, len(blocks)))
        return [
            replace(block, group="g") if place in members else block
            for place, block in enumerate(blocks)
        ]

    # The program ----------------------------------------------------------------------------

    def call(self, case: Case, whole: bool = False) -> Call:
        """Draw what a forward runs, and what each rank's loss reaches of it."""
        names = [block.name for block in case.blocks]
        order: tuple[str, ...] = ()
        if self.has("order", 0.2):
            order = tuple(self.random.sample(names, len(names)))
        skipped: frozenset[str] = frozenset()
        if self.has("skipped", 0.12) and len(names) > 2:
            skipped = frozenset([self.random.choice(names)])
        if whole:
            return Call(order, (), (), skipped)
        is_refused = any(b.frozen for b in case.walk())  # what the parent's own parameters give
        every = [b.name for b in case.walk() if not (is_refused and b.group == "parent")]
        every += [b.name + ".kept" for b in case.walk() if b.kind == "cached"]
        many = [
            f"{b.name}.{index}"
            for b in case.walk()
            if b.kind == "many"
            for index in range(len(KINDS["many"][0]))
        ]
        off, unused = [], []
        for _ in range(case.num_ranks):
            chance = self.random.choice([0.0, 0.2, 0.5, 0.8]) if "off" in self.features else 0.0
            off.append(frozenset(n for n in every if self.random.random() < chance))
            chance = self.random.choice([0.0, 0.3, 0.7]) if "unused" in self.features else 0.0
            unused.append(frozenset(n for n in many if self.random.random() < chance))
        return Call(
            order, tuple(off) if any(off) else (), tuple(unused) if any(unused) else (), skipped
        )

    def train(self, case: Case, sync: bool) -> Op:
        is_deferred = case.is_deferred
        completes = sync and case.sharding == "hybrid" and self.random.random() < 0.3
        sync = completes or (sync and not is_deferred)
        calls = [self.call(case)]
        how = ""
        if self.has("several", 0.15):
            calls.append(self.call(case))
            how = self.random.choice(["", "", "drop"])
            if self.has("interleaved", 0.4):
                how = self.random.choice(["each", "each reversed"])
        if self.has("retain", 0.1):
            how = "retain"
        if case.sharding == "hybrid":
            how += " all" if completes else " unsynced" if self.random.random() < 0.3 else ""
        if not sync and not case.sharding and len(case.mesh) == 2 and self.random.random() < 0.5:
            how += " replicas"
        return Op("train", tuple(calls), flag=sync, how=how.strip())

    def program(self, case: Case) -> list[Op]:
        pick = self.random.choice
        ops = []
        names = [b.name for b in case.walk()] + ["root"]
        if self.has("dry_run", 0.15):
            ops.append(self.dry(case))
        ops.append(Op("optimize"))
        trained = 0
        for _ in range(self.random.randint(1, 7)):
            word = self.random.choices(list(WORDS), list(WORDS.values()))[0]
            if word == "train":
                ops.append(self.train(case, sync=True))
                trained += 1
            elif word == "accumulate" and "accumulate" in self.features:
                ops.append(self.train(case, sync=False))
                trained += 1
            elif word == "sync" and "accumulate" in self.features:
                ops.append(Op("sync"))
            elif word == "zero" and trained:
                flag = not self.has("zeros", 0.4)
                ops.append(Op("zero", how=pick(["optimizer", "module", "hand"]), flag=flag))
            elif word == "step" and trained:
                ops += [Op("step")] + [Op("zero", how="optimizer")] * self.random.randint(0, 1)
            elif word == "evaluate" and "evaluate" in self.features:
                ops.append(self.evaluate(case, "evaluate"))
            elif word == "clip" and "clip" in self.features and trained:
                ops.append(Op("clip", how=pick(["", "function"])))
            elif word == "edit" and "edit" in self.features:
                hows = ["clamp", "each"] + ["foreach"] * ("foreach" in self.features)
                ops += [Op("reshard")] * case.live  # edits of unsharded parameters are lost
                ops.append(Op("edit", how=pick(hows)))
            elif word == "states" and "states" in self.features:
                saved = any(op.name == "save" for op in ops)
                ops.append(Op("restore" if saved else "save", how=pick(["", "full"])))
            elif word == "teacher" and "teacher" in self.features:
                ops.append(Op("teach"))
                if self.random.random() < 0.7:
                    ops.append(self.evaluate(case, "ask_teacher"))
            elif word == "fail" and "fail" in self.features:
                ops.append(self.fail(case))
            elif word == "by_hand" and "by_hand" in self.features:
                some = tuple(self.random.sample(names, self.random.randint(1, len(names))))
                if pick([True, False]):
                    flag = pick([True, False])
                    ops.append(Op("unshard", names=some, flag=flag, how=pick(["", "wait"])))
                if pick([True, False]):
                    ops.append(Op("reshard", names=pick([some, ()])))
            elif word == "settings" and "settings" in self.features:
                ops.append(self.setting(names))
            elif word == "freeze" and "freeze" in self.features:
                some = tuple(self.random.sample(names, self.random.randint(1, 2)))
                ops.append(Op("freeze", names=some, flag=pick([True, False, False])))
            elif word == "alone" and "alone" in self.features:
                roots = [b.name for b in case.blocks if b.group != "parent"]
                ops += [Op("alone", names=(pick(roots),))] if roots else []
                trained += 1
            elif word == "none" and "zeros" in self.features:
                ops.append(Op("grad_none", names=(pick(names),)))
        if trained < 1:
            ops.append(self.train(case, sync=True))
        return ops

    def dry(self, case: Case) -> Op:
        ops = [self.train(case, sync=True), self.evaluate(case, "evaluate")]
        return self.random.choice(ops)

    def evaluate(self, case: Case, name: str) -> Op:
        how = "inference" if self.has("inference", 0.5) else ""
        return Op(name, (self.call(case, whole=True),), how=how)

    def fail(self, case: Case) -> Op:
        names = [b.name for b in case.walk() if not b.recompute] or ["b0"]
        how = self.random.choice(["forward", "backward"])
        return Op("fail", (self.call(case, whole=True),), (self.random.choice(names),), how)

    def setting(self, names: list[str]) -> Op:
        pick = self.random.choice
        name = pick(["set_reshard", "set_keep", "prefetch"])
        if name == "prefetch":
            some = self.random.sample(names, min(len(names), self.random.randint(1, 3)))
            return Op("prefetch", names=tuple(some), how=pick(["forward", "backward"]))
        return Op(name, names=(pick(names),), how=pick(["", "recurse"]), flag=pick([True, False]))


def _plain(block: Block) -> Block:
    return replace(block, wire=False, children=tuple(map(_plain, block.children)))


def _untied(block: Block) -> Block:
    return replace(block, tied=False, children=tuple(map(_untied, block.children)))
