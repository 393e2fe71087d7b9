"""The tree of `kvkeep ls --tree`: how prefixes share what they begin with."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from kvkeep.tools.choice import short_ids
from kvkeep.tools.texts import Texts
from kvkeep.tools.words import clean, plural, size

if TYPE_CHECKING:
    from kvkeep.cache.listing import Listing, Run

# Columns that each level of a tree takes, and the figures behind the words.
_INDENT, _FIGURES = 4, 44
_MIN_WORDS = 16


def make_tree(found: "Listing", prefixes: "Sequence[Run]", words: Texts, width: int) -> Iterator[Tree]:
    """A tree for each model, with the runs on which these prefixes stand.

    Args:
        found: everything that is stored.
        prefixes: those that are shown.
        words: reads tokens.
        width: columns of the console.
    """
    wanted = {run for prefix in prefixes for run in prefix.path}
    ids = short_ids(run.key for run in found.prefixes())
    for space in found.spaces:
        tops = [run for run in found.trees if run.space == space and run in wanted]
        if not tops:
            continue
        tree = Tree(Text(f"{clean(space.label)} ({space.fingerprint.hex()[:12]})", style="bold"), guide_style="dim")
        # By hand, because a chat of thousands of turns nests deeper than Python calls itself.
        waiting = [(tree, 1, run) for run in reversed(tops)]
        while waiting:
            branch, depth, run = waiting.pop()
            room = max(_MIN_WORDS, width - _FIGURES - _INDENT * depth)
            grown = branch.add(_label(run, words.own(run, room), "" if run.beyond else ids[run.key]))
            waiting += [(grown, depth + 1, other) for other in reversed(run.beyond) if other in wanted]
        yield tree


def _label(run: "Run", words: str, name: str) -> Text:
    figures = f"{plural(run.end - run.start, 'token')}, {size(run.own_bytes)}{', pinned' if run.pinned else ''}"
    label = Text(no_wrap=True, overflow="ellipsis")
    label.append(f"{name} " if name else "", style="bold")
    label.append(words)
    label.append(f"  {figures}", style="dim")
    return label
