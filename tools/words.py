"""Numbers as people read them."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_AGES = (("day", 86_400), ("h", 3600), ("min", 60))


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


def ratio(more: float, less: float) -> str:
    """`31x`, `1.0x`: how many times `less` goes into `more`."""
    if less <= 0:
        return "-"
    times = more / less
    return f"{times:,.0f}x" if times >= 9.95 else f"{times:.1f}x"


def plural(count: int, noun: str) -> str:
    """`1 block`, `1,204 blocks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
