"""Numbers and texts as people read them, and the other way round."""

import re
from fractions import Fraction

from kvkeep.store.errors import UsageError

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_LETTERS = tuple(enumerate("KMGT", start=1))
_AGES = (("day", 86_400), ("h", 3600), ("min", 60))
_FACTORS = {"": 1, "B": 1} | {
    f"{letter}{kind}": base**i for kind, base in (("iB", 1024), ("B", 1000)) for i, letter in _LETTERS
}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def size(n_bytes: float) -> str:
    """`512 bytes`, `34.1 MiB`, `4 GiB`."""
    value, unit = float(n_bytes), 0
    # 1023.95 would be written as 1024.0.
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f}".removesuffix(".0") + f" {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """`41 ms`, `6.21 s`, `2 min 5 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def ago(then: float, now: float) -> str:
    """`just now`, `3 min ago`, `5 days ago`. A time to come is `just now`: clocks get set back."""
    for unit, length in _AGES:
        count = int((now - then) // length)
        if count >= 1:
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return "just now"


def lasting(seconds: int) -> str:
    """`90 days`, `36 h`, `45 s`: how long something is kept; for ever for 0."""
    if seconds <= 0:
        return "for ever"
    unit, length = next(((unit, length) for unit, length in _AGES if seconds % length == 0), ("s", 1))
    count = seconds // length
    return plural(count, unit) if unit == "day" else f"{count:,} {unit}"


def ratio(more: float, less: float) -> str:
    """`31x`, `1.0x`: how many times `less` goes into `more`."""
    if less <= 0:
        return "-"
    times = more / less
    return f"{times:,.0f}x" if times >= 9.95 else f"{times:.1f}x"


def plural(count: int, noun: str, several: str = "") -> str:
    """`1 block`, `1,204 blocks`, and for nouns of another kind `2 prefixes`."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def clean(text: str) -> str:
    """A text that moves no cursor and changes no colour, in one line: whatever can't be seen is a space."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def shortened(text: str, room: int) -> str:
    """As much of a text as has room, with dots where some is left out."""
    return text if len(text) <= room else text[: max(0, room - 3)].rstrip() + "..."


def parse_size(text: str) -> int:
    """Bytes from `4GiB`, `512 MiB`, `4GB`, `1048576`.

    Raises:
        UsageError: it is none of these.
    """
    return round(_parsed(text, _FACTORS, "a number of bytes such as 4GiB, 512MiB or 4GB"))


def parse_duration(text: str) -> int:
    """Seconds from `45s`, `10min`, `12h`, `30d`, `2w`.

    Raises:
        UsageError: it is none of these.
    """
    return round(_parsed(text, _SECONDS, "a time such as 45s, 10min, 12h, 30d or 2w"))


def _parsed(text: str, units: dict[str, int], expected: str) -> Fraction:
    match = _NUMBER.fullmatch(text.strip())
    factors = {unit.lower(): factor for unit, factor in units.items()}
    if match is None or match[2].lower() not in factors:
        raise UsageError(f"{clean(text)!r} isn't {expected}")
    # A float would round large numbers.
    return Fraction(match[1]) * factors[match[2].lower()]
