import pytest

from kvkeep.store.errors import UsageError
from kvkeep.tools import words


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (4 << 30, "4 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_size(n_bytes: int, expected: str) -> None:
    assert words.size(n_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 ms"), (0.0412, "41 ms"), (0.9999, "1.00 s"), (6.214, "6.21 s"), (59.999, "1 min 0 s"), (125, "2 min 5 s")],
)
def test_duration(seconds: float, expected: str) -> None:
    assert words.duration(seconds) == expected


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (-50, "just now"),
        (59, "just now"),
        (60, "1 min ago"),
        (7300, "2 h ago"),
        (86_400, "1 day ago"),
        (500_000, "5 days ago"),
    ],
)
def test_ago(age: float, expected: str) -> None:
    assert words.ago(1e9, 1e9 + age) == expected


@pytest.mark.parametrize(
    ("more", "less", "expected"), [(1, 1, "1.0x"), (99.4, 10, "9.9x"), (31, 1, "31x"), (1e6, 1, "1,000,000x"), (1, 0, "-")]
)
def test_ratio(more: float, less: float, expected: str) -> None:
    assert words.ratio(more, less) == expected


def test_plural() -> None:
    assert words.plural(1, "block") == "1 block"
    assert words.plural(1204, "block") == "1,204 blocks"
    assert words.plural(2, "prefix", "prefixes") == "2 prefixes"


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "for ever"), (45, "45 s"), (86_400, "1 day"), (7200, "2 h"), (600, "10 min")]
)
def test_lasting(seconds: int, expected: str) -> None:
    assert words.lasting(seconds) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("4 gib", 4 << 30),
        ("4GB", 4_000_000_000),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
        ("7B", 7),
    ],
)
def test_parse_size(text: str, expected: int) -> None:
    assert words.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1", "4 G i B", "1e9", "4XiB", "٤GiB", "nan", "\x1b[2J"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="a number of bytes such as") as caught:
        words.parse_size(text)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"), [("45s", 45), ("10min", 600), ("12h", 43_200), ("30d", 2_592_000), ("2w", 1_209_600)]
)
def test_parse_duration(text: str, expected: int) -> None:
    assert words.parse_duration(text) == expected


@pytest.mark.parametrize("text", ["30", "30 months", "d", "-1d", "off"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="a time such as"):
        words.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n\tb  c", "a b c"),
        ("\x1b[31mred\x1b[0m", "[31mred [0m"),
        ("\x9b2Jx\u202ey\u2028z", "2Jx y z"),
        ("Ärger 日本", "Ärger 日本"),
        ("\x00\x7f", ""),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert words.clean(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("short", "short"), ("a longer text", "a longer..."), ("longer words", "longer...")]
)
def test_shortened(text: str, expected: str) -> None:
    assert words.shortened(text, 11 if text.startswith("a") else 10) == expected
