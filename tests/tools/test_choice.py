import pytest

from kvkeep.store.errors import UsageError
from kvkeep.tools.choice import named, short_ids

ONE, NEAR, FAR = (
    bytes.fromhex("aabbccdd11" + "00" * 27),
    bytes.fromhex("aabbccdd12" + "00" * 27),
    bytes.fromhex("0123" + "00" * 30),
)


def test_ids_are_as_long_as_they_must_be() -> None:
    assert short_ids([ONE, NEAR, FAR]) == {ONE: "aabbccdd11", NEAR: "aabbccdd12", FAR: "01230000"}
    assert short_ids([ONE]) == {ONE: "aabbccdd"}
    assert short_ids([]) == {}
    assert short_ids([ONE, ONE]) == {ONE: "aabbccdd"}


def test_any_unambiguous_beginning_names_a_key() -> None:
    assert named(["0123", "AABBCCDD11", ONE.hex()], [ONE, NEAR, FAR]) == [FAR, ONE]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("aabb", "several ids: aabbccdd11, aabbccdd12"),
        ("ffff", "no prefix has the id ffff"),
        ("012", "at least 4"),
        ("", "is no id"),
        ("xyzw", "is no id"),
        ("%_%_", "is no id"),
        ("\x1b[2J", "is no id"),
    ],
)
def test_what_names_nothing_is_a_sentence(given: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected) as caught:
        named([given], [ONE, NEAR, FAR])
    assert "\x1b" not in str(caught.value)
