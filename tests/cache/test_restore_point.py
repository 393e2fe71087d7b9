"""Where a context can be rebuilt: only where every part of the memory is there, and there byte for byte."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from synthetic import (
    ARCH,
    HYBRID,
    RECURRENT,
    TWO_CACHES,
    Made,
    dense_layout,
    hybrid_window_model,
    random_tokens,
    window_model,
)

from kvkeep.cache.batches import Saved
from kvkeep.cache.match import Reason
from kvkeep.cache.memory import MemoryKind
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.cache.restore import Restored
from kvkeep.cache.state import Form, parse
from kvkeep.store import checkpoints, nodes, windows
from kvkeep.store.check import Trouble, check
from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.entry import Entry
from kvkeep.store.errors import UnknownLayout
from kvkeep.store.nodes import Node
from kvkeep.store.repository import Repository
from kvkeep.store.windows import Window

B = 16
CHAT = random_tokens(100)
OTHER = [token + 1 for token in CHAT]

FULL = window_model(20, full=True)
MASKED = window_model(20)
CHUNKED = window_model(20, chunked=True)
HYBRID_WINDOW = hybrid_window_model(20)


@dataclass
class Life:
    """A cache of a made-up model."""

    made: Made
    cache: PrefixCache

    def save(self, tokens: Sequence[int], *points: int, **options: Any) -> Saved:
        """Save the state of some tokens, and checkpoints that were taken on the way."""
        taken = [self.made.point(tokens[:pos]) for pos in points]
        return self.cache.save(tokens, self.made.state(tokens), points=taken, **options)

    def fetch(self, prompt: Sequence[int], *, form: Form = Form.SEQUENCE, **options: Any) -> Restored:
        """What comes back for a prompt, after it was compared with what a context would hold."""
        match = self.cache.match(prompt, form=form, **options)
        restored = self.cache.restore(match, prompt, form=form, arch=ARCH)
        assert restored.length <= match.length
        self.assert_right(restored, prompt, form)
        return restored

    def assert_right(self, restored: Restored, prompt: Sequence[int], form: Form) -> None:
        length, memory = restored.length, self.made.memory
        if length == 0:
            assert restored.state.size == 0
            return
        first = 0
        window = parse(restored.state, form, memory).window
        if window is not None and memory.window is not None:
            first = int(window.positions.min())
            assert first <= min(memory.window.first_needed(length), length - 1)
        assert np.array_equal(restored.state, self.made.state(prompt[:length], form, first=first))

    def length(self, prompt: Sequence[int], **options: Any) -> int:
        return self.fetch(prompt, **options).length

    def entries(self) -> list[Entry]:
        with self.cache.repository.rows() as connection:
            return [*nodes.every(connection), *windows.every(connection), *checkpoints.every(connection)]

    def windows(self) -> list[Window]:
        return [entry for entry in self.entries() if isinstance(entry, Window)]

    def checkpoints(self) -> list[Checkpoint]:
        return [entry for entry in self.entries() if isinstance(entry, Checkpoint)]

    def nodes(self) -> list[Node]:
        return [entry for entry in self.entries() if isinstance(entry, Node)]


Begin = Callable[..., Life]


@pytest.fixture
def begin(repository: Repository) -> Begin:
    def make(made: Made, block_tokens: int = B) -> Life:
        return Life(made, PrefixCache(repository, made.identity(), block_tokens=block_tokens))

    return make


# -- windows -----------------------------------------------------------------------------------------------------------


def test_a_window_that_is_kept_in_full_comes_back_at_every_position(begin: Begin) -> None:
    life = begin(FULL)
    life.save(CHAT[:70])
    for length in range(1, 71):
        assert life.length(CHAT[:length] + OTHER[length:]) == length


def test_two_caches_come_back_at_every_position(begin: Begin) -> None:
    life = begin(TWO_CACHES)
    life.save(CHAT[:70])
    for length in range(1, 71):
        assert life.length(CHAT[:length] + OTHER[length:]) == length


@pytest.mark.parametrize("saved", [1, 15, 16, 17, 19, 20, 21, 31, 32, 33, 35, 36, 37, 63, 64, 65, 100])
def test_a_masked_window_comes_back_where_it_is_covered(begin: Begin, saved: int) -> None:
    """The state of `saved` tokens has the last 20 positions; behind a position the last 19 before it are needed."""
    life = begin(MASKED)
    life.save(CHAT[:saved])
    for length in range(1, saved + 1):
        covered = max(0, length - 19) >= max(0, saved - 20)
        assert (life.length(CHAT[:length] + OTHER[length:]) == length) == covered, f"at {length}"
    assert life.length(CHAT + OTHER) == saved


@pytest.mark.parametrize("saved", [1, 19, 20, 21, 39, 40, 41, 45, 60, 61])
def test_a_chunked_window_comes_back_from_its_chunks_beginning_on(begin: Begin, saved: int) -> None:
    life = begin(CHUNKED)
    life.save(CHAT[:saved])
    chunk = (saved - 1) // 20 * 20
    for length in range(1, saved + 1):
        # Behind the end of a chunk only one cell is needed, because llama.cpp writes no cache without any.
        covered = length > chunk
        assert (life.length(CHAT[:length] + OTHER[length:]) == length) == covered, f"at {length}"


def test_the_windows_of_several_states_are_joined(begin: Begin) -> None:
    life = begin(MASKED)
    for saved in (20, 40, 60, 80):
        life.save(CHAT[:saved])
    for length in range(1, 81):
        assert life.length(CHAT[:length] + OTHER[length:]) == length


def test_no_more_of_a_window_is_restored_than_llama_cpp_writes(begin: Begin) -> None:
    life = begin(FULL)
    life.save(CHAT[:70])
    for length in (5, 20, 21, 48, 70):
        assert np.array_equal(life.fetch(CHAT[:length]).state, MASKED.state(CHAT[:length]))


def test_the_whole_form_has_as_much_of_a_window_as_is_stored(begin: Begin) -> None:
    life = begin(FULL)
    life.save(CHAT[:70])
    restored = life.fetch(CHAT[:55], form=Form.WHOLE)
    assert np.array_equal(restored.state, FULL.state(CHAT[:55], Form.WHOLE, first=0))


@pytest.mark.parametrize("made", [FULL, MASKED, HYBRID_WINDOW], ids=["full", "masked", "hybrid"])
def test_a_window_is_stored_once(begin: Begin, made: Made) -> None:
    life = begin(made)
    assert life.save(CHAT[:70]).written > 0
    assert life.save(CHAT[:70]).written == 0


def test_a_growing_chat_leaves_one_row_for_each_block(begin: Begin) -> None:
    life = begin(FULL)
    for saved in range(1, 70):
        life.save(CHAT[:saved])
    assert [(row.start, row.n_tokens) for row in life.windows()] == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 5)]


def test_chats_that_part_in_a_window_each_come_back(begin: Begin) -> None:
    life = begin(MASKED)
    chats = [CHAT[:at] + random_tokens(9, seed=at) for at in (30, 31, 33, 40, 47, 48, 49)]
    for chat in chats:
        life.save(chat)
    for chat in chats:
        assert life.length([*chat, 7]) == len(chat)


def test_a_ring_that_holds_more_than_the_window_is_stored_as_far_as_it_is_unbroken(begin: Begin) -> None:
    life = begin(MASKED)
    life.cache.save(CHAT[:70], MASKED.state(CHAT[:70], first=33))
    for length in (52, 53, 60, 70):
        assert life.length(CHAT[:length] + OTHER[length:]) == length
    assert life.length(CHAT[:51] + OTHER) == 0


def test_a_window_that_ends_elsewhere_is_refused(begin: Begin) -> None:
    life = begin(MASKED)
    data = MASKED.state(CHAT[:30])
    window = parse(data, Form.SEQUENCE, MASKED.memory).window
    assert window is not None
    last = data.tobytes().rindex(np.int32(29).tobytes() + np.uint32(1).tobytes())
    data[last : last + 4] = np.frombuffer(np.int32(40).tobytes(), np.uint8)
    with pytest.raises(UnknownLayout, match="end at position 29"):
        life.cache.save(CHAT[:30], data)
    assert life.length(CHAT) == 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [HYBRID, HYBRID_WINDOW, RECURRENT], ids=["hybrid", "hybrid window", "recurrent"])
def test_what_cant_be_cut_comes_back_at_its_checkpoints_only(begin: Begin, made: Made) -> None:
    life = begin(made)
    taken = [1, 15, 16, 17, 30, 32, 47, 64, 69]
    life.save(CHAT[:70], *taken)
    for length in range(1, 101):
        expected = max((pos for pos in [*taken, 70] if pos <= length), default=0)
        assert life.length(CHAT[:length] + OTHER[length:]) == expected, f"at {length}"
    for at_most in (0, 14, 15, 46, 47, 69, 70):
        expected = max((pos for pos in [*taken, 70] if pos <= at_most), default=0)
        assert life.length(CHAT, at_most=at_most) == expected


def test_a_checkpoint_needs_the_nodes_below_it(begin: Begin) -> None:
    life = begin(HYBRID)
    life.save(CHAT[:70], 10, 40)
    life.cache.remove([node for node in life.nodes() if node.start == 32])
    assert life.length(CHAT) == 10
    life.save(CHAT[:70])
    assert life.length(CHAT) == 70
    assert life.length(CHAT[:69]) == 40


def test_recurrent_tensors_alone_need_nothing_else(begin: Begin) -> None:
    life = begin(RECURRENT)
    life.save(CHAT[:70], 40)
    assert life.nodes() == life.windows() == []
    assert life.length(CHAT[:50]) == 40


def test_a_checkpoint_without_its_window_gives_way_to_the_next_lower_one(begin: Begin) -> None:
    life = begin(HYBRID_WINDOW)
    life.save(CHAT[:90], 30, 60)
    missing = [row for row in life.windows() if row.start <= 80 < row.start + row.n_tokens]
    life.cache.remove(missing)
    assert life.length(CHAT) == 60
    missing = [row for row in life.windows() if row.start <= 59 < row.start + row.n_tokens]
    life.cache.remove(missing)
    assert life.length(CHAT) == 30
    life.save(CHAT[:90])
    assert life.length(CHAT) == 90


@pytest.mark.parametrize("made", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])
def test_a_checkpoint_of_another_sequence_is_none(begin: Begin, made: Made) -> None:
    life = begin(made)
    life.save(CHAT[:40], 20, seq_id=1)
    assert life.length(CHAT) == life.length(CHAT, seq_id=2) == 0
    assert life.length(CHAT, seq_id=1) == 40
    assert life.length(CHAT[:30], seq_id=1) == 20
    life.save(CHAT[:30])
    assert life.length(CHAT) == 30
    assert life.length(CHAT, seq_id=1) == 40


@pytest.mark.parametrize("made", [HYBRID, HYBRID_WINDOW, RECURRENT], ids=["hybrid", "hybrid window", "recurrent"])
def test_many_chats_that_part_behind_one_border(begin: Begin, made: Made) -> None:
    life = begin(made)
    rng = Random(2)
    chats = []
    for number in range(60):
        chat = CHAT[: 32 + rng.randint(0, 8)] + random_tokens(rng.randint(1, 6), seed=number, n_vocab=3)
        life.save(chat)
        chats.append(chat)
    for chat in chats:
        assert life.length([*chat, 9]) == len(chat)
        below = max((len(other) for other in chats if other == chat[: len(other)] and len(other) < len(chat)), default=0)
        assert life.length(chat[:-1]) == below


def test_a_checkpoint_behind_other_tokens_is_none(begin: Begin) -> None:
    life = begin(HYBRID)
    life.save(CHAT[:40], 20)
    assert life.length([*CHAT[:39], 5, 6]) == 20
    assert life.length([*CHAT[:19], 5, 6, *CHAT[21:]]) == 0
    assert life.length([5, *CHAT[1:]]) == 0


@pytest.mark.parametrize("made", [HYBRID, HYBRID_WINDOW, RECURRENT], ids=["hybrid", "hybrid window", "recurrent"])
def test_a_checkpoint_at_the_end_of_what_is_saved_is_stored_once(begin: Begin, made: Made) -> None:
    """A generation that was stopped right behind one: the checkpoint and the state are of the same position."""
    life = begin(made)
    life.save(CHAT[:40], 16, 40)
    assert sorted(point.pos for point in life.checkpoints()) == [16, 40]
    assert life.length(CHAT) == 40


@pytest.mark.parametrize("made", [FULL, MASKED, HYBRID, HYBRID_WINDOW, RECURRENT], ids=lambda made: made.memory.kind.value)
def test_both_forms_come_back_alike(begin: Begin, made: Made) -> None:
    life = begin(made)
    life.cache.save(CHAT[:70], made.state(CHAT[:70], Form.WHOLE), Form.WHOLE)
    for form in Form:
        assert life.length(CHAT, form=form) == 70


def test_recurrent_tensors_of_another_position_are_refused(begin: Begin) -> None:
    life = begin(RECURRENT)
    with pytest.raises(UnknownLayout, match="position 29"):
        life.cache.save(CHAT[:31], RECURRENT.state(CHAT[:30]))
    assert life.entries() == []


def test_tensors_of_uneven_length_come_back(begin: Begin) -> None:
    made = Made(RECURRENT.memory, tensor_bytes=21)
    life = begin(made)
    life.save(CHAT[:20])
    assert life.length(CHAT) == 20


# -- why not -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [HYBRID, HYBRID_WINDOW, MASKED], ids=["hybrid", "hybrid window", "masked window"])
def test_tokens_that_are_stored_without_a_restore_point_are_said(begin: Begin, made: Made) -> None:
    life = begin(made)
    life.save(CHAT[:70])
    found = life.cache.match(CHAT[:30] + OTHER[30:])
    assert (found.length, found.reason) == (0, Reason.NO_CHECKPOINT)
    assert "30 tokens are stored" in found.detail
    assert life.cache.match(OTHER).reason is Reason.NO_COMMON_PREFIX


# -- damage ------------------------------------------------------------------------------------------------------------


def rot(life: Life, victim: Entry) -> None:
    life.cache.repository.blobs.put([(victim.blob, b"rotten")])


def lose(life: Life, victim: Entry) -> None:
    life.cache.repository.blobs.delete([victim.blob])


def heal(life: Life, tokens: Sequence[int]) -> Restored:
    """A request that meets the damage, and what the adapters do next: quarantine, save."""
    restored = life.fetch(tokens)
    assert life.cache.quarantine(restored.damaged) == len(restored.damaged)
    life.save(tokens)
    assert life.length(tokens) == len(tokens)
    return restored


HARM = pytest.mark.parametrize("harm", [rot, lose])


@HARM
@pytest.mark.parametrize("made", [HYBRID, HYBRID_WINDOW, RECURRENT], ids=["hybrid", "hybrid window", "recurrent"])
def test_damaged_tensors_give_way_to_the_next_lower_checkpoint(begin: Begin, made: Made, harm: Callable[..., None]) -> None:
    life = begin(made)
    life.save(CHAT[:70], 16, 45)
    (victim,) = [point for point in life.checkpoints() if point.pos == 70]
    harm(life, victim)
    restored = heal(life, CHAT[:70])
    assert (restored.length, restored.damaged) == (45, (victim,))
    assert restored.detail
    assert check(life.cache.repository) == []


@HARM
def test_damage_at_every_checkpoint_is_a_miss_that_reports_all(begin: Begin, harm: Callable[..., None]) -> None:
    life = begin(HYBRID)
    life.save(CHAT[:70], 20, 50)
    points = life.checkpoints()
    for victim in points:
        harm(life, victim)
    restored = heal(life, CHAT[:70])
    assert restored.length == 0
    assert {entry.blob for entry in restored.damaged} == {point.blob for point in points}


@HARM
@pytest.mark.parametrize("position", [51, 60, 66])
def test_a_damaged_window_gives_way_to_the_next_lower_checkpoint(
    begin: Begin, harm: Callable[..., None], position: int
) -> None:
    life = begin(HYBRID_WINDOW)
    life.save(CHAT[:70], 30, 45)
    (victim,) = [row for row in life.windows() if row.start <= position < row.start + row.n_tokens]
    harm(life, victim)
    restored = heal(life, CHAT[:70])
    # One row of a block is part of the windows of both.
    assert restored.length == 45
    assert restored.damaged == (victim,)
    assert check(life.cache.repository) == []


@HARM
def test_a_damaged_window_gives_way_to_what_its_neighbours_cover(begin: Begin, harm: Callable[..., None]) -> None:
    life = begin(FULL)
    life.save(CHAT[:80])
    (victim,) = [row for row in life.windows() if row.start == 48]
    harm(life, victim)
    restored = heal(life, CHAT[:80])
    assert (restored.length, restored.damaged) == (48, (victim,))
    assert check(life.cache.repository) == []


@HARM
@pytest.mark.parametrize("name", ["full window", "masked window", "hybrid", "hybrid window"])
def test_a_damaged_node_gives_way_to_what_stands_below_it(begin: Begin, name: str, harm: Callable[..., None]) -> None:
    made = {"full window": FULL, "masked window": MASKED, "hybrid": HYBRID, "hybrid window": HYBRID_WINDOW}[name]
    life = begin(made)
    for saved in (16, 32, 48, 60):
        life.save(CHAT[:saved])
    (victim,) = [node for node in life.nodes() if node.start == 32]
    harm(life, victim)
    restored = heal(life, CHAT[:60])
    assert (restored.length, restored.damaged) == (32, (victim,))
    assert check(life.cache.repository) == []


def test_damage_in_every_part_at_once(begin: Begin) -> None:
    life = begin(HYBRID_WINDOW)
    life.save(CHAT[:90], 30, 60)
    victims = [
        next(point for point in life.checkpoints() if point.pos == 90),
        next(row for row in life.windows() if row.start == 48),
        next(node for node in life.nodes() if node.start == 32),
    ]
    for victim in victims:
        rot(life, victim)
    restored = heal(life, CHAT[:90])
    assert restored.length == 30
    assert {entry.blob for entry in restored.damaged} <= {victim.blob for victim in victims}
    while restored.damaged:
        restored = heal(life, CHAT[:90])
    assert check(life.cache.repository) == []


@pytest.mark.parametrize("table", ["window", "checkpoint"])
def test_a_flip_in_a_row_never_gives_wrong_bytes_and_the_next_save_heals_it(begin: Begin, table: str) -> None:
    life = begin(HYBRID_WINDOW)
    fields = {
        "window": ["key", "anchor", "path", "start", "n_tokens", "blob", "stored_bytes", "plain_bytes"],
        "checkpoint": ["kind", "seq_id", "pos", "prefix", "anchor", "path", "blob", "stored_bytes", "plain_bytes"],
    }[table]
    for name, which, flip in product(fields, (0, 1, -1), (1, 2, 64)):
        life.cache.remove(life.entries())
        life.save(CHAT[:57], 30)
        victim: Any = (life.windows() if table == "window" else life.checkpoints())[which]
        value = getattr(victim, name)
        other = value ^ flip if isinstance(value, int) else value[:-2] + bytes([*value[-2:-1], *(b ^ flip for b in value[-1:])])
        with life.cache.repository.index.write() as connection:
            connection.exec_driver_sql(f'UPDATE "{table}" SET "{name}" = ? WHERE id = ?', (other, victim.id))
        restored = life.fetch(CHAT[:57])
        life.cache.quarantine(restored.damaged)
        life.save(CHAT[:57], 30)
        restored = life.fetch(CHAT[:57])
        # A row that is filed elsewhere can be in the way of the new one until a request has met it.
        life.cache.quarantine(restored.damaged)
        life.save(CHAT[:57], 30)
        assert life.length(CHAT[:57]) == 57, f"{name} of {victim}"
    with life.cache.repository.writing() as writing:
        writing.remove_damaged(life.entries())
        writing.sweep()
    life.cache.remove([found.entry for found in check(life.cache.repository) if found.entry is not None])


# -- against a model ---------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What must be found, told from what was saved, by trying every position."""

    made: Made
    states: list[tuple[list[int], int]] = field(default_factory=list)

    def save(self, tokens: list[int], *points: int) -> None:
        self.states += [(tokens[:pos], self.made.first(pos)) for pos in (*points, len(tokens))]

    def length(self, prompt: list[int]) -> int:
        return max(pos for pos in range(len(prompt) + 1) if pos == 0 or self._is_there(prompt[:pos]))

    def _is_there(self, tokens: list[int]) -> bool:
        memory, length = self.made.memory, len(tokens)
        if memory.is_recurrent and not any(chat == tokens for chat, _ in self.states):
            return False
        if memory.kind is not MemoryKind.RECURRENT and not any(chat[:length] == tokens for chat, _ in self.states):
            return False
        if memory.window is None:
            return True
        needed = range(min(memory.window.first_needed(length), length - 1), length)
        return all(
            any(first <= at < len(chat) and chat[: at + 1] == tokens[: at + 1] for chat, first in self.states) for at in needed
        )


def live_at_random(life: Life, seed: int, rounds: int = 25) -> None:
    rng = Random(seed)
    expected = Expected(life.made)
    chats: list[list[int]] = [[]]
    for _ in range(rounds):
        trunk = rng.choice(chats)
        chat = trunk[: rng.randint(0, len(trunk))] + [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
        taken = rng.sample(range(1, len(chat)), min(len(chat) - 1, rng.randint(0, 2))) if life.made.tensor_bytes else []
        life.save(chat, *taken)
        expected.save(chat, *taken)
        chats.append(chat)
        assert life.length([*chat, 7]) == len(chat)
        for prompt in (rng.choice(chats), [rng.randint(0, 1) for _ in range(20)]):
            assert life.length(prompt) == expected.length(prompt), f"{prompt}"


EVERY = {
    "hybrid": HYBRID,
    "recurrent": RECURRENT,
    "full window": window_model(6, full=True),
    "masked window": window_model(8),
    "chunked window": window_model(8, chunked=True),
    "hybrid with a window": hybrid_window_model(8, dense_layout(1, 8)),
    "window below a block": window_model(3),
    "hybrid with a window below a block": hybrid_window_model(3),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", EVERY)
def test_whatever_was_saved_is_found_as_deep_as_can_be(begin: Begin, name: str, seed: int) -> None:
    live_at_random(begin(EVERY[name], block_tokens=4), seed)


def test_the_window_of_a_long_state_hides_none_of_a_shorter_one(begin: Begin) -> None:
    """Where the window of the longer state begins in the middle of the block in which the shorter one ends."""
    life = begin(HYBRID_WINDOW)
    life.save(CHAT[:40])
    life.save(CHAT[:58])
    assert [(row.start, row.n_tokens) for row in life.windows()] == [(20, 12), (32, 8), (38, 10), (48, 10)]
    assert life.length(CHAT[:57]) == 40
    assert life.length(CHAT[:46]) == 40


def test_nothing_is_left_that_nobody_names(begin: Begin) -> None:
    life = begin(HYBRID_WINDOW)
    for saved in range(1, 90, 7):
        life.save(CHAT[:saved])
    assert {found.trouble for found in check(life.cache.repository)} & {Trouble.GARBAGE, Trouble.DAMAGE} == set()
