"""How the figures are shown: a table, where they were measured, and what they mean."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.tools.bench.figures import Figure
from kvkeep.tools.words import clean, size


def show(console: Console, document: Mapping[str, Any], figures: list[Figure]) -> None:
    """Everything of a run that people read.

    Args:
        console: where to.
        document: the JSON document.
        figures: the same ones as in the document.
    """
    console.print(_where(document), soft_wrap=True)
    console.print(_table(figures))
    for sentence in document["meaning"]:
        console.print(Text(sentence), style="bold", soft_wrap=not console.is_terminal)


def _where(document: Mapping[str, Any]) -> str:
    machine, model = document["machine"], document.get("model")
    memory = size(machine["memory_bytes"]) if machine["memory_bytes"] else "unknown memory"
    lines = [
        f"Machine: {machine['processor'] or machine['architecture']}, {machine['cores']} cores, {memory}, {machine['system']}"
    ]
    if model is not None:
        lines.append(f"Model:   {clean(model['name'])}, {model['tokens_per_second']:,.0f} tokens/s of a prompt")
    return "\n".join([*lines, "Ratios below 1 are better than what they are compared with.", ""])


def _table(figures: list[Figure]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("what")
    table.add_column("how")
    table.add_column("ratio", justify="right")
    table.add_column("against")
    table.add_column("decoded", justify="right")
    table.add_column("how it came about")
    before = ""
    for figure in figures:
        if before and figure.what != before:
            table.add_section()
        what = "" if figure.what == before else figure.what
        decoded = "" if figure.decoded is None else f"{figure.decoded:,}"
        table.add_row(what, figure.way, _ratio(figure.value), figure.against, decoded, figure.detail)
        before = figure.what
    return table


def _ratio(value: float) -> str:
    """Three digits, because a ratio of 0.004 isn't 0.00."""
    return f"{value:.3f}" if value < 0.0995 else f"{value:.2f}" if value < 99.5 else f"{value:,.0f}"
