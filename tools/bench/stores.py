"""The store by itself: throughput of large states, and look-ups among many blocks. No model, no llama_cpp."""

from pathlib import Path
from typing import Any

from kvkeep.store.errors import DiskFull, UsageError
from kvkeep.store.space import Disk
from kvkeep.tools.bench.machine import free_memory
from kvkeep.tools.bench.plan import StoreSizes
from kvkeep.tools.bench.steps import Step, own_folder, run
from kvkeep.tools.words import size

Row = dict[str, Any]

# The state and its restored copy, and what is being compared; on the disk the store, the plain file, and a copy's worth of air.
_COPIES = 3
_SLACK_BYTES = 256 << 20


def steps(sizes: StoreSizes, parent: Path, found: Row) -> list[Step]:
    """The steps in their order. They fill `found`: `throughput`, one row a process, and `lookups`.

    Raises:
        DiskFull: the disk has no room for the smallest state.
        UsageError: the memory hasn't.
    """
    throughput: list[Row] = []
    found["throughput"] = throughput

    def save(number: int, tokens: int) -> Step:
        text = f"a state of {tokens:,} tokens out and in again, {number + 1} of {sizes.rounds}"

        def do() -> None:
            with own_folder(parent) as folder:
                throughput.append(run("throughput", folder=str(folder), shape=sizes.shape, tokens=tokens, seed=number))

        return Step(text, do)

    def look_up() -> None:
        with own_folder(parent) as folder:
            given = {"few": sizes.few, "many": sizes.many, "chat_tokens": sizes.chat_tokens, "rounds": sizes.lookups}
            found["lookups"] = run("lookups", folder=str(folder), **given)["stores"]

    saves = [save(number, tokens) for tokens in _fitting(sizes, parent) for number in range(sizes.rounds)]
    return [*saves, Step(f"looking up among {sizes.few} and {sizes.many:,} chats", look_up)]


def _fitting(sizes: StoreSizes, folder: Path) -> list[int]:
    """The states for which there is room, in memory and on the disk."""
    layers, heads, dim = sizes.shape
    wanted = {tokens: _COPIES * tokens * layers * heads * dim * 4 + _SLACK_BYTES for tokens in sizes.tokens}
    memory, disk = free_memory(), Disk.of(folder).room(None)
    smallest = min(wanted.values())
    if smallest > disk:
        raise no_room(folder, smallest, disk)
    if memory is not None and smallest > memory:
        raise UsageError(f"the bench needs {size(smallest)} of memory, and {size(memory)} are free")
    return [tokens for tokens, needed in wanted.items() if needed <= min(disk, disk if memory is None else memory)]


def no_room(folder: Path, needed: int, free: int) -> DiskFull:
    """The error about a disk that is too full."""
    return DiskFull(
        f"the bench needs {size(needed)} in {folder}, and kvkeep may take {size(max(0, free))} there: "
        "name another folder with --path"
    )
