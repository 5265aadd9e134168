"""The result of ``explain``: plain values, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass, replace

from composable_shard.insight.groups.advice import Advice
from composable_shard.insight.groups.copies import Copy
from composable_shard.insight.groups.traffic import StepTraffic, Traffic, total
from composable_shard.insight.report.amounts import (
    UNKNOWN,
    count_text,
    names_text,
    nbytes_text,
)
from composable_shard.insight.report.report import Report
from composable_shard.insight.report.sections import Section, Sentences, Table


@dataclass(frozen=True)
class ParameterExplanation:
    """One parameter.

    Attributes:
        name: Its name in the model.
        shape: Its global shape.
        dtype: In which it is stored.
        placements: Those of its DTensor.
        num_shards: Ranks that share it.
        num_replicas: Ranks that hold the same shard.
        is_trained: Whether it has gradients.
        sharded_nbytes: Bytes of this rank's shard, padding included.
        gathered_nbytes: Bytes of the gathered parameter, padding included; ``None`` for a tensor
            subclass whose hook has not said it yet.
        travels: How it is gathered: ``"in place"``, ``"packed"``, ``"permuted"``, ``"as a
            subclass"`` or ``"not at all"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    num_shards: int
    num_replicas: int
    is_trained: bool
    sharded_nbytes: int
    gathered_nbytes: int | None
    travels: str


@dataclass(frozen=True)
class GroupExplanation:
    """One communication group, that of one ``fully_shard`` call.

    Attributes:
        name: Its name in the model; that of a root is ``"(root)"``.
        modules: The classes of its modules.
        parameters: What it holds.
        sharded_nbytes: Bytes of this rank's shards, padding included.
        gathered_nbytes: Bytes of the gathered parameters.
        traffic: What it sends in one step.
        copies: What it packs, copies and casts in one step.
        reasons: Why it does what it does, sentences.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[ParameterExplanation, ...]
    sharded_nbytes: int
    gathered_nbytes: int | None
    traffic: StepTraffic
    copies: tuple[Copy, ...]
    reasons: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        numel = 0
        for param in self.parameters:
            elements = 1
            for length in param.shape:
                elements *= length
            numel += elements
        return numel

    def is_like(self, other: GroupExplanation) -> bool:
        """Tell whether two groups differ in names alone."""
        return self.without_names() == other.without_names()

    def without_names(self) -> object:
        """Return what groups that are alike have in common."""
        return (
            [replace(param, name=param.name.rpartition(".")[2]) for param in self.parameters],
            [(copy.kind, copy.nbytes, copy.times, copy.why) for copy in self.copies],
            replace(self, name="", parameters=(), copies=()),
        )


@dataclass(frozen=True)
class Explanation(Report):
    """What sharding does to a model.

    Attributes:
        groups: The groups, roots before what lies in them.
        advice: What to look at.
    """

    groups: tuple[GroupExplanation, ...]
    advice: tuple[Advice, ...]

    @property
    def traffic(self) -> Traffic:
        """What this rank sends in one step."""
        return total(group.traffic.total for group in self.groups)

    def sections(self) -> list[Section]:
        """Return the table of groups, then for each kind of group what is done and why."""
        alike = _runs(self.groups)
        shown: list[Section] = [self._overview(alike), self._communication(alike)]
        for groups in alike:
            shown.append(Sentences(_title(groups), _told(groups[0])))
        if self.advice:
            shown.append(Sentences("Worth a look", tuple(map(_advice_text, self.advice))))
        return shown

    def _overview(self, alike: list[list[GroupExplanation]]) -> Table:
        columns = (
            "group",
            "modules",
            "placements",
            "parameters",
            "elements",
            "sharded",
            "gathered",
        )
        rows = [
            (
                _title(groups),
                names_text(groups[0].modules),
                "; ".join(_placements(groups[0])),
                str(len(groups[0].parameters)),
                count_text(groups[0].numel),
                nbytes_text(groups[0].sharded_nbytes),
                nbytes_text(groups[0].gathered_nbytes),
            )
            for groups in alike
        ]
        title = "Groups: bytes of one of each, on this rank"
        return Table(title, columns, tuple(rows), num_words=3)

    def _communication(self, alike: list[list[GroupExplanation]]) -> Table:
        columns = (
            "group",
            "forward gathers",
            "backward gathers",
            "reductions",
            "all-reduces",
            "sent",
            "copied",
        )
        rows = []
        for groups in alike:
            traffic = groups[0].traffic
            copied = sum(copy.nbytes * copy.times for copy in groups[0].copies)
            parts = (
                traffic.forward_gathers,
                traffic.backward_gathers,
                traffic.reductions,
                traffic.all_reduces,
            )
            cells = map(_traffic_text, parts)
            sent = nbytes_text(traffic.total.nbytes)
            rows.append((_title(groups), *cells, sent, nbytes_text(copied)))
        everything = self.traffic
        copied = sum(copy.nbytes * copy.times for group in self.groups for copy in group.copies)
        total_row = ("all of them", "", "", "", "")
        rows.append((*total_row, nbytes_text(everything.nbytes), nbytes_text(copied)))
        title = "One step: launches x messages in each, bytes that this rank sends and copies"
        return Table(title, columns, tuple(rows))


def _runs(groups: tuple[GroupExplanation, ...]) -> list[list[GroupExplanation]]:
    """Put neighbours that differ in names alone together."""
    runs: list[list[GroupExplanation]] = []
    for group in groups:
        if runs and runs[-1][-1].is_like(group):
            runs[-1].append(group)
        else:
            runs.append([group])
    return runs


def _title(groups: list[GroupExplanation]) -> str:
    if len(groups) == 1:
        return groups[0].name
    return f"{groups[0].name} to {groups[-1].name} ({len(groups)} alike)"


def _placements(group: GroupExplanation) -> list[str]:
    kinds = {(" ".join(p.placements), p.num_shards) for p in group.parameters}
    return [f"{placements} of {count}" for placements, count in sorted(kinds)]


def _traffic_text(traffic: Traffic) -> str:
    if not traffic.launches:
        return "-"
    amount = UNKNOWN if traffic.nbytes is None else nbytes_text(traffic.nbytes)
    if traffic.launches == 1:
        return f"1 x {traffic.messages}, {amount}"
    return f"{traffic.launches}, {traffic.messages} in all, {amount}"


def _told(group: GroupExplanation) -> tuple[str, ...]:
    return (*group.reasons, *map(_copy_text, group.copies))


def _copy_text(copy: Copy) -> str:
    times = "" if copy.times == 1 else f" {copy.times} times a step"
    names = names_text(tuple(".".join(name.split(".")[-2:]) for name in copy.parameters))
    of_whom = f" ({names})" if names else ""
    return f"{copy.kind}{of_whom}, {nbytes_text(copy.nbytes)}{times}: {copy.why}"


def _advice_text(advice: Advice) -> str:
    about = names_text(tuple(name or "(root)" for name in advice.about))
    return f"{advice.kind}, {about}: {advice.problem}. Advice: {advice.remedy}."
