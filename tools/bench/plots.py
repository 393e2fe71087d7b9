"""Plots of a run, each as SVG and PNG. The only place that knows matplotlib, which is an extra."""

import statistics
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvkeep.tools.bench import figures
from kvkeep.tools.bench.figures import STEPS, TURNS
from kvkeep.tools.bench.prefixes import RESTARTS
from kvkeep.tools.bench.ways import WAYS, keeps_on_disk

WAY_TO_IT = "There are no plots without matplotlib: pip install 'kvkeep[bench]'"

_FORMATS = ("svg", "png")
_INCHES = (7.0, 4.3)
_DPI = 130


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:
        # What is blocked on purpose has no spec.
        return False


def draw(raw: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what was measured.

    Args:
        raw: as in `figures.of_everything`.
        folder: it exists.

    Returns:
        The files, two a plot.

    Raises:
        OSError: they can't be written.
    """
    files = []
    for name, draw_into in _wanted(raw).items():
        files += _drawn(folder / name, draw_into)
    return files


def _wanted(raw: Mapping[str, Any]) -> dict[str, Callable[[Any], None]]:
    """By the name of the file: what draws into a pair of axes."""
    wanted: dict[str, Callable[[Any], None]] = {}
    if "prefixes" in raw:
        wanted["first-token"] = lambda axes: _first_token(axes, raw["prefixes"])
        wanted["restart-split"] = lambda axes: _split(axes, raw["prefixes"])
    if "chats" in raw:
        wanted["bytes-on-disk"] = lambda axes: _bytes(axes, raw["chats"], "disk_bytes", "MB on the disk")
        if all(turn["written_bytes"] is not None for row in raw["chats"] for turn in row[TURNS]):
            wanted["bytes-written"] = lambda axes: _bytes(axes, raw["chats"], "written_bytes", "MB written")
    if "store" in raw:
        wanted["look-up"] = lambda axes: _lookups(axes, raw["store"]["lookups"])
        wanted["throughput"] = lambda axes: _throughput(axes, raw["store"]["throughput"])
    return wanted


def _drawn(stem: Path, draw_into: Callable[[Any], None]) -> list[Path]:
    # Without pyplot: that asks for a screen, and keeps every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_into(axes)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    files = [stem.with_suffix(f".{kind}") for kind in _FORMATS]
    for file in files:
        figure.savefig(file, dpi=_DPI)
    return files


def _first_token(axes: Any, prefixes: Mapping[str, Any]) -> None:
    lengths = prefixes["lengths"]
    for way in RESTARTS:
        axes.plot(lengths, [statistics.median(figures.restarts(prefixes, way, one)) for one in lengths], "o-", label=way)
    axes.set(xscale="log", ylim=(0, None), xlabel="tokens of the prompt's known beginning", ylabel="seconds to the first token")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_title("After a restart")
    _legend(axes)


def _split(axes: Any, prefixes: Mapping[str, Any]) -> None:
    lengths = prefixes["lengths"]
    names = [f"{length:,}" for length in lengths]
    splits = [figures.split(prefixes, length) for length in lengths]
    below = [0.0] * len(lengths)
    for step, label in STEPS.items():
        heights = [1e3 * one[step] for one in splits]
        axes.bar(names, heights, bottom=below, label=label)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set(xlabel="tokens restored", ylabel="ms to the first token")
    axes.set_title("What a restart with kvkeep is made of")
    _legend(axes)


def _bytes(axes: Any, rows: list[Mapping[str, Any]], name: str, label: str) -> None:
    last = max(row["round"] for row in rows)
    own = {row["way"]: row for row in rows if row["round"] == last}
    for way in WAYS:
        values = [turn[name] / 1e6 for turn in own[way][TURNS]]
        if keeps_on_disk(way):
            # Thinner and thinner: two ways may write the very same.
            width = 5 - len(axes.lines)
            axes.plot(range(1, len(values) + 1), values, "o-", label=way, linewidth=width, markersize=3 + 1.5 * width)
    axes.set(xlabel="turn of the chat", ylabel=label, ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("A chat, stored after each turn")
    _legend(axes)


def _legend(axes: Any) -> None:
    """Below, where it hides nothing."""
    axes.figure.legend(loc="outside lower center", ncols=3)


def _lookups(axes: Any, stores: list[Mapping[str, Any]]) -> None:
    blocks = [store["blocks"] for store in stores]
    for percent, label in ((50, "median"), (99, "99th percentile")):
        axes.plot(blocks, [1e3 * figures.percentile(store["seconds"], percent) for store in stores], "o-", label=label)
    axes.set(xscale="log", ylim=(0, None), xlabel="blocks in the store", ylabel="ms of a look-up")
    axes.set_title("Looking up a prompt")
    _legend(axes)


def _throughput(axes: Any, rows: list[Mapping[str, Any]]) -> None:
    tokens = sorted({row["tokens"] for row in rows})
    for step in ("save", "plain_write", "restore", "plain_read"):
        rates = [
            statistics.median(row["state_bytes"] / row["steps_seconds"][step] / 1e6 for row in rows if row["tokens"] == count)
            for count in tokens
        ]
        axes.plot(tokens, rates, "o-", label=step.replace("plain_", "plain file, "))
    axes.set(xscale="log", ylim=(0, None), xlabel="tokens of the state", ylabel="MB/s")
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.minorticks_off()
    axes.set_title("The store by itself, beside a plain file")
    _legend(axes)
