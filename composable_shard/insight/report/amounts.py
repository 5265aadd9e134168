"""Numbers as people read them."""

from __future__ import annotations

UNKNOWN = "?"
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def nbytes_text(nbytes: float | None) -> str:
    """Write a number of bytes with three digits: ``1.5 MiB``, ``0 B``; ``?`` if it is not known.

    >>> nbytes_text(1536), nbytes_text(5 * 2**30), nbytes_text(12), nbytes_text(None)
    ('1.5 KiB', '5 GiB', '12 B', '?')
    """
    if nbytes is None:
        return UNKNOWN
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{_three_digits(amount)} {unit}"


def count_text(count: float) -> str:
    """Write a count with three digits: ``1.23 M``.

    >>> count_text(999), count_text(1234567), count_text(7e10)
    ('999', '1.23 M', '70 G')
    """
    amount, unit = float(count), ""
    for larger in ("k", "M", "G", "T", "P", "E"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, f" {larger}"
    return f"{_three_digits(amount)}{unit}"


def seconds_text(seconds: float | None) -> str:
    """Write a time with three digits: ``1.5 ms``.

    >>> seconds_text(0.0015), seconds_text(70.0), seconds_text(0.0), seconds_text(None)
    ('1.5 ms', '70 s', '0 s', '?')
    """
    if seconds is None:
        return UNKNOWN
    for scale, unit in _SECONDS:
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0 s" if seconds == 0 else f"{_three_digits(seconds / 1e-9)} ns"


def names_text(names: tuple[str, ...], most: int = 3) -> str:
    """List names, the first ones of many.

    >>> names_text(("a", "b")), names_text(("a", "b", "c", "d"))
    ('a, b', 'a, b, c and 1 more')
    """
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def _three_digits(amount: float) -> str:
    text = f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"
    return text
