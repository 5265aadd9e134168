"""What the checks found, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Broken(AssertionError):
    """A promise is broken; the text says which, and what was found instead."""


class Finding(NamedTuple):
    """What one check found.

    Attributes:
        check: Its name, which ``skip`` takes.
        ok: Whether the tensor keeps this promise; also true for what was skipped.
        sentence: The promise if it is kept, else what is wrong, with the ranks and the shape.
    """

    check: str
    ok: bool
    sentence: str


@dataclass(frozen=True)
class Report:
    """What all checks found about one tensor subclass.

    Attributes:
        kind: Name of the class.
        findings: One for each check, in the order of the checks.
    """

    kind: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every promise is kept."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What fails."""
        return tuple(finding for finding in self.findings if not finding.ok)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        count = f"{len(self.failures)} of {len(self.findings)} checks fail" if self.failures else ""
        lines = [f"{self.kind}: {count or f'all {len(self.findings)} checks pass'}"]
        lines += [f"  {'ok   ' if f.ok else 'FAILS'} {f.check}: {f.sentence}" for f in self]
        return "\n".join(lines)
