"""What the figures mean on this machine, in sentences."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.tools.bench import figures
from kvkeep.tools.bench.figures import Figure
from kvkeep.tools.bench.ways import ATTACH, NO_CACHE
from kvkeep.tools.words import duration

# One thread of a model that must wait for its core holds up all others.
_BUSY = 0.5


def sentences(raw: Mapping[str, Any], found: Sequence[Figure]) -> list[str]:
    """One to four sentences.

    Args:
        raw: what was measured.
        found: the figures made from it.
    """
    said = []
    if "chats" in raw:
        said.append(_restart(raw["chats"]))
    if "prefixes" in raw:
        said.append(_break_even(raw["prefixes"]))
    if "store" in raw:
        said.append(_store(found))
    return said


def _restart(rows: Sequence[Mapping[str, Any]]) -> str:
    own = {way: [row for row in rows if row["way"] == way] for way in (ATTACH, NO_CACHE)}
    ours, cold = ([figures.first_token(row, figures.RESTART) for row in own[way]] for way in (ATTACH, NO_CACHE))
    prompt = own[ATTACH][-1][figures.RESTART]["prompt_tokens"]
    share = statistics.median(our / their for our, their in zip(ours, cold, strict=True))
    return (
        f"A restart with a prompt of {prompt:,} tokens takes {share:.2f} of the time with kvkeep to its first token: "
        f"{duration(statistics.median(ours))} instead of {duration(statistics.median(cold))}."
    )


def _break_even(prefixes: Mapping[str, Any]) -> str:
    lengths = prefixes["lengths"]
    gains = [
        statistics.median(figures.restarts(prefixes, NO_CACHE, length))
        - statistics.median(figures.restarts(prefixes, ATTACH, length))
        for length in lengths
    ]
    at = break_even(lengths, gains)
    if at is None:
        return f"Up to {lengths[-1]:,} tokens it doesn't pay here: decoding them again is as quick as restoring."
    if at <= lengths[0]:
        return f"It pays from the shortest prompt on that was measured, {lengths[0]:,} tokens."
    return f"Below about {at:,} tokens it doesn't pay here."


def break_even(lengths: Sequence[int], gains: Sequence[float]) -> int | None:
    """From which length on restoring is quicker for good; None if it never is.

    Args:
        lengths: in tokens, ascending.
        gains: seconds that it is quicker at each length; negative where it is slower.

    Returns:
        Between the last length that loses and the next one, where a line between both crosses zero.
    """
    losing = [i for i, gain in enumerate(gains) if gain <= 0]
    if not losing:
        return lengths[0]
    last = losing[-1]
    if last == len(lengths) - 1:
        return None
    part = -gains[last] / (gains[last + 1] - gains[last])
    return round(lengths[last] + part * (lengths[last + 1] - lengths[last]))


def _store(found: Sequence[Figure]) -> str:
    save, restore = ([figure for figure in found if figure.way == name][-1] for name in ("save", "restore"))
    look_up = next(figure for figure in found if figure.what.startswith("look-up"))
    return (
        f"The store by itself saves {save.what} in {save.value:.1f} times what {save.against} takes, behind the person's "
        f"back, and restores it in {restore.value:.1f} times what {restore.against} takes; a {look_up.what} takes "
        f"{look_up.value:.1f} times what it takes {look_up.against}."
    )


def busy(machine: Mapping[str, Any]) -> str:
    """What to think of times that were measured beside other programs; empty if there were none.

    Args:
        machine: as `kvkeep.tools.bench.machine.describe` found it before anything was measured.
    """
    load, cores = machine["load_average"], machine["cores"] or 1
    if load is None or load <= _BUSY * cores:
        return ""
    return (
        f"Other programs were busy when this began (load average {load:.1f} on {cores} cores): look at the tokens decoded, and "
        "don't trust the times."
    )
