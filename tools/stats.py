"""`kvkeep stats`: what the cache folder holds."""

import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvkeep.tools.budget import Limits, limits_of
from kvkeep.tools.console import make_console
from kvkeep.tools.folder import nothing_there, opened
from kvkeep.tools.options import json_option, path_option, print_json
from kvkeep.tools.words import ago, clean, duration, lasting, plural, size

if TYPE_CHECKING:
    from kvkeep.cache.totals import Totals
    from kvkeep.store.namespaces import Usage

# Enough to tell any two models apart, short enough for a column.
_SHORT_FINGERPRINT = 12
_SUMS = ("blocks", "tails", "checkpoints", "windows", "tokens", "stored_bytes", "plain_bytes")


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a folder holds. `schema_revision` and `limits` are None where there is no store.

    Attributes:
        path: the folder.
        schema_revision: of its index.
        limits: what it keeps to.
        disk_bytes: what it takes.
        free_bytes: what its file system has, the reserve included.
        pins: how many prefixes are pinned.
        models: what it holds of each model.
        use: what was done with it.
    """

    path: Path
    schema_revision: str | None = None
    limits: Limits | None = None
    disk_bytes: int = 0
    free_bytes: int | None = None
    pins: int = 0
    models: "list[Usage]" = field(default_factory=list)
    use: "Totals | None" = None

    @property
    def exists(self) -> bool:
        return self.schema_revision is not None

    def total(self, name: str) -> int:
        """Sum of one figure over all models."""
        return sum(getattr(model, name) for model in self.models)


@click.command()
@path_option
@json_option
def stats(path: Path, as_json: bool) -> None:
    """Show what the cache folder holds, model by model.

    A model is one set of weights with one set of context settings, because only those can share states. Tokens are
    stored once, however many chats begin with them. Below that, what it was good for: requests, tokens reused and decoded,
    time saved (an estimate) and bytes written, of all programs together since there is this folder; programs that run add
    theirs now and then, and at their end. Looking at a folder that doesn't exist doesn't create it.
    """
    holdings = survey(path)
    if as_json:
        print_json(_document(holdings))
    else:
        _show(make_console(), holdings)


def survey(path: Path) -> Holdings:
    """What the folder at `path` holds."""
    with opened(path) as repository:
        if repository is None:
            return Holdings(path)
        from kvkeep.cache import totals
        from kvkeep.store import pins
        from kvkeep.store.namespaces import usage
        from kvkeep.store.space import Disk

        with repository.rows() as connection:
            models, n_pins, use = usage(connection), len(pins.every(connection)), totals.read(connection)
        return Holdings(
            path,
            repository.index.revision(),
            limits_of(repository),
            repository.disk_bytes,
            Disk.of(repository.path).free,
            n_pins,
            models,
            use,
        )


def _document(holdings: Holdings) -> dict[str, Any]:
    limits = holdings.limits
    return {
        "path": str(holdings.path),
        "exists": holdings.exists,
        "schema_revision": holdings.schema_revision,
        "capacity_bytes": None if limits is None else limits.capacity_bytes,
        "disk_bytes": holdings.disk_bytes,
        "reserve_bytes": None if limits is None else limits.reserve_bytes,
        "free_bytes": holdings.free_bytes,
        "lifetime_seconds": None if limits is None else limits.lifetime_seconds,
        "daily_bytes": None if limits is None else limits.daily_bytes,
        "stored_today": None if limits is None else limits.stored_today,
        "pins": holdings.pins,
        "totals": {name: holdings.total(name) for name in _SUMS},
        "use": None if holdings.use is None else _use_document(holdings.use),
        "models": [_model_document(model) for model in holdings.models],
    }


def _use_document(use: "Totals") -> dict[str, Any]:
    return asdict(use) | {"since": datetime.fromtimestamp(use.since, UTC).isoformat() if use.since else None}


def _model_document(model: "Usage") -> dict[str, Any]:
    times = {name: datetime.fromtimestamp(getattr(model, name), UTC).isoformat() for name in ("created", "used")}
    return asdict(model) | {"fingerprint": model.fingerprint.hex()} | times


def _show(console: Console, holdings: Holdings) -> None:
    if not holdings.exists:
        console.print(nothing_there(holdings.path), soft_wrap=True)
        return
    console.print(f"Cache folder: {holdings.path}", soft_wrap=True)
    if holdings.models:
        console.print("", _table(holdings), "", sep="\n")
    else:
        console.print("The store is empty: no model has kept anything there yet.")
    if holdings.use is not None and holdings.use.requests:
        _show_use(console, holdings.use)
    _show_disk(console, holdings)


def _show_use(console: Console, use: "Totals") -> None:
    since = datetime.fromtimestamp(use.since, UTC).date()
    console.print(f"Since {since}, in {plural(use.requests, 'request')} of {use.prompt_tokens:,} tokens:")
    restored = f"{use.restored_tokens:,} tokens from disk in {duration(use.restore_ms / 1e3)}"
    console.print(f"Reused:  {restored}, {use.live_tokens:,} still in the context.")
    console.print(f"Decoded: {use.decoded_tokens:,} tokens.")
    if use.saved_ms > 0:
        console.print(f"Saved:   about {duration(use.saved_ms / 1e3)} of decoding.")
    not_stored = f", {plural(use.one_shot, 'state')} not, for they begin anew each time" if use.one_shot else ""
    console.print(f"Written: {size(use.written_bytes)} in {plural(use.saves, 'save')}{not_stored}.")


def _show_disk(console: Console, holdings: Holdings) -> None:
    assert holdings.limits is not None
    assert holdings.free_bytes is not None
    limits, used = holdings.limits, holdings.disk_bytes
    share = used / limits.capacity_bytes
    console.print(f"On disk: {size(used)} of {size(limits.capacity_bytes)} allowed ({share:.1%}).")
    to_others = min(limits.reserve_bytes, holdings.free_bytes)
    console.print(f"Free:    {size(holdings.free_bytes)}, of which {size(to_others)} are left to others.")
    if limits.lifetime_seconds:
        console.print(f"Kept:    {lasting(limits.lifetime_seconds)} after it was last used.")
    if limits.daily_bytes:
        console.print(f"Today:   {size(limits.stored_today)} stored of {size(limits.daily_bytes)} allowed a day.")
    if holdings.pins:
        console.print(f"Pinned:  {plural(holdings.pins, 'prefix', 'prefixes')}.")


def _table(holdings: Holdings) -> Table:
    """All figures in 80 columns: what is long stands in two lines."""
    several = len(holdings.models) > 1
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_footer=several, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Model\nfingerprint", plural(len(holdings.models), "model"), overflow="fold", min_width=_SHORT_FINGERPRINT)
    for header, name in (("\nBlocks", "blocks"), ("Tail\npieces", "tails"), ("Check-\npoints", "checkpoints")):
        table.add_column(header, f"{holdings.total(name):,}", justify="right", no_wrap=True)
    stored, plain = holdings.total("stored_bytes"), holdings.total("plain_bytes")
    table.add_column("\nTokens", f"{holdings.total('tokens'):,}", justify="right", no_wrap=True)
    table.add_column("Stored\nof plain", _stored_of_plain(stored, plain), justify="right", no_wrap=True)
    table.add_column("\nRatio", _percent(stored, plain), justify="right", no_wrap=True)
    table.add_column("\nLast used", justify="right", no_wrap=True)
    for model in holdings.models:
        table.add_row(*_row(model))
    return table


def _row(model: "Usage") -> tuple[str, ...]:
    return (
        f"{clean(model.label)}\n{model.fingerprint.hex()[:_SHORT_FINGERPRINT]}",
        f"{model.blocks:,}",
        f"{model.tails:,}",
        f"{model.checkpoints:,}",
        f"{model.tokens:,}",
        _stored_of_plain(model.stored_bytes, model.plain_bytes),
        _percent(model.stored_bytes, model.plain_bytes),
        ago(model.used, time.time()),
    )


def _stored_of_plain(stored: int, plain: int) -> str:
    return f"{size(stored)}\nof {size(plain)}"


def _percent(stored: int, plain: int) -> str:
    return f"{stored / plain:.0%}" if plain else "-"
