"""The tree of errors: exit codes that commands return, and what callers catch."""

import re
from collections.abc import Iterator

import pytest

from kvkeep.store import errors
from kvkeep.store.errors import KvkeepError


def tree(kind: type[KvkeepError]) -> Iterator[type[KvkeepError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


# Commands have errors of their own, which take their exit code from a child process.
ALL = [kind for kind in tree(KvkeepError) if kind.__module__ == errors.__name__]


def test_no_two_errors_share_an_exit_code() -> None:
    codes = [kind.exit_code for kind in ALL]
    assert len(codes) == len(set(codes))
    assert all(0 < code < 128 for code in codes)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_is_drawn_in_the_tree_with_its_code(kind: type[KvkeepError]) -> None:
    assert errors.__doc__ is not None
    assert re.search(rf"\b{kind.__name__} +{kind.exit_code}\b", errors.__doc__)


@pytest.mark.parametrize("kind", ALL)
def test_a_code_shows_the_branch_of_the_tree(kind: type[KvkeepError]) -> None:
    parent = kind.__mro__[1]
    if issubclass(parent, KvkeepError) and parent is not KvkeepError:
        assert kind.exit_code // 10 == parent.exit_code // 10


def test_wrong_arguments_are_value_errors_too() -> None:
    assert issubclass(errors.UsageError, ValueError)
