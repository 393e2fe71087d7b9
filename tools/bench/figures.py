"""Ratios from what was measured. Times of two ways are compared within one round, and the median of all rounds counts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.tools.bench.ways import ATTACH, NO_CACHE, SEQUENCE_FILE, keeps_on_disk
from kvkeep.tools.words import duration, size

Row = Mapping[str, Any]

TURNS, BACK, RESTART = "turns", "back", "restart"
PARTS = {
    TURNS: "first token in a running chat",
    BACK: "first token after another chat",
    RESTART: "first token after a restart",
}
STEPS = {
    "look_up": "look-up",
    "read": "read, decode, assemble",
    "hand_over": "hand over to llama.cpp",
    "decode": "decode the rest",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One ratio.

    Attributes:
        what: was measured.
        way: which way to keep states, or which part of the work.
        value: the ratio; below 1 is less than what it is compared with.
        against: what it is compared with.
        detail: how it came about, for people.
        decoded: tokens that were decoded there; None where that has no meaning.
    """

    what: str
    way: str
    value: float
    against: str
    detail: str
    decoded: int | None = None


def of_everything(raw: Mapping[str, Any]) -> list[Figure]:
    """All figures of a run.

    Args:
        raw: `chats`, `prefixes` and `store`, as far as they were measured.
    """
    found: list[Figure] = []
    if "chats" in raw:
        found += _of_chats(raw["chats"])
    if "prefixes" in raw:
        found += _of_prefixes(raw["prefixes"])
    if "store" in raw:
        found += _of_throughput(raw["store"]["throughput"]) + _of_lookups(raw["store"]["lookups"])
    return found


# -- chats ----------------------------------------------------------------------------------------------------------------


def first_token(row: Row, part: str) -> float:
    """Seconds to the first token in one way's row. Of the turns without the first one, which is new to everybody."""
    if part == TURNS:
        return float(statistics.median(turn["first_token_seconds"] for turn in row[TURNS][1:]))
    return float(row[part]["first_token_seconds"])


def _of_chats(rows: Sequence[Row]) -> list[Figure]:
    ways = _by(rows, "way")
    others = [way for way in ways if way != NO_CACHE]
    times = [_time(ways, way, part, what) for part, what in PARTS.items() for way in others]
    on_disk = [way for way in others if keeps_on_disk(way) and way != SEQUENCE_FILE]
    disk = [_bytes(ways, way, "disk_bytes", "bytes on the disk after the chats") for way in on_disk]
    written = [_bytes(ways, way, "written_bytes", "bytes written for the chats") for way in on_disk]
    return [*times, *filter(None, disk), *filter(None, written)]


def _time(ways: Mapping[str, Sequence[Row]], way: str, part: str, what: str) -> Figure:
    ours = [first_token(row, part) for row in ways[way]]
    cold = [first_token(row, part) for row in ways[NO_CACHE]]
    last = ways[way][-1][part]
    turn = last[-1] if part == TURNS else last
    detail = f"{_against(ours, cold)}; of {turn['prompt_tokens']:,} tokens {turn['new_tokens']:,} are new"
    return Figure(what, way, _ratio(ours, cold), NO_CACHE, detail, turn["decoded_tokens"])


def _bytes(ways: Mapping[str, Sequence[Row]], way: str, name: str, what: str) -> Figure | None:
    """None where the system doesn't say."""
    ours, theirs = ([row[BACK][name] for row in ways[one]] for one in (way, SEQUENCE_FILE))
    if None in ours or None in theirs:
        return None
    return Figure(what, way, _ratio(ours, theirs), SEQUENCE_FILE, _against(ours, theirs, size))


# -- prefixes -------------------------------------------------------------------------------------------------------------


def restarts(prefixes: Mapping[str, Any], way: str, length: int) -> list[float]:
    """Seconds to the first token of all repetitions, in their order."""
    rows = [row for row in prefixes["restarts"] if row["way"] == way and row["length"] == length]
    return [row["first_token_seconds"] for row in sorted(rows, key=lambda row: row["repeat"])]


def split(prefixes: Mapping[str, Any], length: int) -> dict[str, float]:
    """Seconds of each step of a kvkeep restart, medians, by the names in `STEPS`."""
    rows = [row["steps_seconds"] for row in prefixes["restarts"] if row["way"] == ATTACH and row["length"] == length]
    return {step: statistics.median(row[step] for row in rows) for step in STEPS}


def _of_prefixes(prefixes: Mapping[str, Any]) -> list[Figure]:
    found = []
    for length in prefixes["lengths"]:
        for way, against in ((ATTACH, NO_CACHE), (SEQUENCE_FILE, NO_CACHE), (ATTACH, SEQUENCE_FILE)):
            ours, theirs = (restarts(prefixes, one, length) for one in (way, against))
            decoded = next(r["decoded_tokens"] for r in prefixes["restarts"] if (r["way"], r["length"]) == (way, length))
            what = f"restart, prompt of {length:,} tokens"
            found.append(Figure(what, way, _ratio(ours, theirs), against, _against(ours, theirs), decoded))
    longest = prefixes["lengths"][-1]
    steps = split(prefixes, longest)
    whole = sum(steps.values())
    what = f"part of a kvkeep restart, {longest:,} tokens"
    return found + [
        Figure(what, STEPS[step], seconds / whole, "all of it", f"{_precise(seconds)} of {_precise(whole)}")
        for step, seconds in steps.items()
    ]


# -- the store ------------------------------------------------------------------------------------------------------------


def _of_throughput(rows: Sequence[Row]) -> list[Figure]:
    found = []
    for tokens, own in _by(rows, "tokens").items():
        n_bytes = own[0]["state_bytes"]
        for step, plain, what, how in (
            ("save", "plain_write", "save", "writing a plain file"),
            ("restore", "plain_read", "restore", "reading a plain file"),
        ):
            ours, theirs = ([row["steps_seconds"][name] for row in own] for name in (step, plain))
            rates = " against ".join(f"{size(n_bytes / statistics.median(times))}/s" for times in (ours, theirs))
            detail = f"{rates}; the state has {size(n_bytes)}"
            found.append(Figure(f"a state of {tokens:,} tokens", what, _ratio(ours, theirs), how, detail))
        disk = statistics.median(row["disk_bytes"] for row in own)
        detail = f"{size(disk)} for {size(n_bytes)}"
        found.append(Figure(f"a state of {tokens:,} tokens", "bytes on the disk", disk / n_bytes, "a plain file", detail))
    return found


def percentile(seconds: Sequence[float], percent: int) -> float:
    """The smallest time that so many percent of all don't exceed."""
    return sorted(seconds)[max(0, -(-len(seconds) * percent // 100) - 1)]


def _of_lookups(stores: Sequence[Row]) -> list[Figure]:
    few, many = stores
    found = []
    for percent in (50, 99):
        ours, theirs = (percentile(store["seconds"], percent) for store in (many, few))
        name = "median" if percent == 50 else f"{percent}th percentile"
        detail = f"{_precise(ours)} against {_precise(theirs)}"
        what, against = f"look-up among {many['blocks']:,} blocks", f"among {few['blocks']:,} blocks"
        found.append(Figure(what, name, ours / theirs, against, detail))
    return found


# -- all ------------------------------------------------------------------------------------------------------------------


def _by(rows: Sequence[Row], name: str) -> dict[Any, list[Row]]:
    """The rows of each value, in the order of their rounds."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def _precise(seconds: float) -> str:
    """Short times with their digits: look-ups take less than a millisecond."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else duration(seconds)


def _against(ours: Sequence[float], theirs: Sequence[float], written: Callable[[float], str] = _precise) -> str:
    medians = f"{written(statistics.median(ours))} against {written(statistics.median(theirs))}"
    if len(ours) == 1:
        return medians
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return f"{medians} ({min(ratios):.2f} to {max(ratios):.2f})"
