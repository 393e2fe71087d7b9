"""`kvkeep budget`: how much disk the cache folder may take, what it leaves to others, how long it keeps anything, and how much
it may store a day.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvkeep.tools.console import make_console
from kvkeep.tools.folder import nothing_there, opened
from kvkeep.tools.options import json_option, path_option, print_json
from kvkeep.tools.words import lasting, parse_duration, parse_size, size

if TYPE_CHECKING:
    from kvkeep.store.repository import Repository


@dataclass(frozen=True, slots=True)
class Limits:
    """What a folder keeps to.

    Attributes:
        capacity_bytes: the most that it takes. One that was just asked for holds from the next save or open on.
        reserve_bytes: free disk that is left to others.
        default_reserve: whether nobody has asked for another reserve.
        lifetime_seconds: how long anything is kept that nobody uses; 0 is for ever.
        daily_bytes: how many bytes may be stored a day; 0 is as many as come.
        stored_today: how many were; 0 if there is no limit.
    """

    capacity_bytes: int
    reserve_bytes: int
    default_reserve: bool
    lifetime_seconds: int
    daily_bytes: int
    stored_today: int


@click.command()
@path_option
@click.option("--capacity", metavar="SIZE", help="The most that the folder may take: 8GiB, 512MiB, 4GB.")
@click.option("--reserve", metavar="SIZE", help="Free disk that is left to others, however large the budget.")
@click.option("--lifetime", metavar="AGE", help="Remove what nobody has used for so long: 12h, 90d, 8w; off keeps it for ever.")
@click.option("--daily", metavar="SIZE", help="How much may be stored a day (UTC): 2GiB; 0 or off stores whatever comes.")
@json_option
def budget(
    path: Path, capacity: str | None, reserve: str | None, lifetime: str | None, daily: str | None, as_json: bool
) -> None:
    """Show or change the limits of the cache folder.

    They hold for everybody who uses it. A smaller budget is kept to from the next save on; kvkeep compact sees to it at
    once.
    """
    wishes = _wishes(capacity, reserve, lifetime, daily)
    with opened(path, create=bool(wishes)) as repository:
        if repository is not None:
            _set(repository, wishes)
        limits = None if repository is None else limits_of(repository)
    if as_json:
        print_json(_document(path, limits))
    else:
        _show(make_console(), path, limits)


def _wishes(capacity: str | None, reserve: str | None, lifetime: str | None, daily: str | None) -> dict[str, int]:
    """Settings by name, all looked at before the first one is changed."""
    from kvkeep.store import settings
    from kvkeep.store.space import valid_capacity, valid_daily, valid_reserve

    wishes = {}
    if capacity is not None:
        wishes[settings.CAPACITY_BYTES] = valid_capacity(parse_size(capacity))
    if reserve is not None:
        wishes[settings.RESERVE_BYTES] = valid_reserve(parse_size(reserve))
    if lifetime is not None:
        wishes[settings.LIFETIME_SECONDS] = 0 if _is_off(lifetime) else parse_duration(lifetime)
    if daily is not None:
        wishes[settings.DAILY_BYTES] = 0 if _is_off(daily) else valid_daily(parse_size(daily))
    return wishes


def _is_off(given: str) -> bool:
    return given.strip().lower() == "off"


def _set(repository: "Repository", wishes: dict[str, int]) -> None:
    from kvkeep.cache import allowance
    from kvkeep.store import settings

    for name, value in wishes.items():
        if name == settings.CAPACITY_BYTES:
            repository.agree_on_capacity(value)
        elif name == settings.DAILY_BYTES:
            allowance.agree(repository, value)
        else:
            repository.agree_on(name, value)


def limits_of(repository: "Repository") -> Limits:
    """What a root remembers, or its defaults."""
    from kvkeep.cache import allowance
    from kvkeep.store import settings
    from kvkeep.store.space import Disk

    with repository.rows() as connection:
        capacity, reserve, lifetime = (
            settings.find(connection, name)
            for name in (settings.CAPACITY_BYTES, settings.RESERVE_BYTES, settings.LIFETIME_SECONDS)
        )
        daily, stored_today = allowance.limit(connection), allowance.stored_today(connection)
    return Limits(
        capacity_bytes=repository.capacity_bytes if capacity is None else capacity,
        reserve_bytes=Disk.of(repository.path).default_reserve if reserve is None else reserve,
        default_reserve=reserve is None,
        lifetime_seconds=lifetime or 0,
        daily_bytes=daily,
        stored_today=stored_today,
    )


def _document(path: Path, limits: Limits | None) -> dict[str, Any]:
    return {
        "path": str(path),
        "exists": limits is not None,
        "capacity_bytes": None if limits is None else limits.capacity_bytes,
        "reserve_bytes": None if limits is None else limits.reserve_bytes,
        "lifetime_seconds": None if limits is None else limits.lifetime_seconds,
        "daily_bytes": None if limits is None else limits.daily_bytes,
        "stored_today": None if limits is None else limits.stored_today,
    }


def _show(console: Console, path: Path, limits: Limits | None) -> None:
    if limits is None:
        console.print(nothing_there(path), soft_wrap=True)
        return
    console.print(f"Cache folder: {path}", soft_wrap=True)
    default = " (the default)" if limits.default_reserve else ""
    console.print(f"Capacity: {size(limits.capacity_bytes)}")
    console.print(f"Reserve:  {size(limits.reserve_bytes)} of free disk are left to others{default}")
    console.print(f"Lifetime: {lasting(limits.lifetime_seconds)}")
    if limits.daily_bytes:
        console.print(f"Daily:    {size(limits.daily_bytes)} may be stored; today (UTC) {size(limits.stored_today)} were")
    else:
        console.print("Daily:    whatever comes is stored")
