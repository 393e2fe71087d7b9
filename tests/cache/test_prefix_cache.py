"""Match, save, restore: any prefix of anything stored comes back byte for byte, and never anything else."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from sqlalchemy import text
from synthetic import ARCH, HYBRID, RECURRENT, SMALL, Made, dense_layout, identity, random_tokens, state_of

from kvkeep.cache import batches, budget, points
from kvkeep.cache import save as save_module
from kvkeep.cache.batches import Saved
from kvkeep.cache.layout import Bytes, Layout
from kvkeep.cache.match import Reason, Source
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.prefix_cache import PrefixCache, token_bytes
from kvkeep.cache.restore import Restored
from kvkeep.cache.state import Form, blank, parse
from kvkeep.store import checkpoints, hashing, nodes, verify
from kvkeep.store.check import Trouble, check
from kvkeep.store.entry import Entry
from kvkeep.store.errors import KvkeepError, LayoutError, TooLarge, UnknownLayout, UsageError
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.nodes import Node
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.space import MIN_CAPACITY

B = 16
CHAT = random_tokens(50)
OTHER = [token + 1 for token in CHAT]


def keep(cache: PrefixCache, tokens: Sequence[int], layout: Layout = SMALL, form: Form = Form.SEQUENCE) -> Saved:
    return cache.save(tokens, state_of(layout, tokens, form), form)


def fetch(cache: PrefixCache, prompt: Sequence[int], layout: Layout = SMALL, **options: Any) -> Restored:
    """What comes back for a prompt, after it was compared with what a context would hold."""
    restored = cache.restore(cache.match(prompt, **options), prompt)
    if restored.length:
        assert np.array_equal(restored.state, state_of(layout, prompt[: restored.length]))
    else:
        assert restored.state.size == 0
    return restored


def entries(cache: PrefixCache) -> list[Entry]:
    with cache.repository.rows() as connection:
        return [*nodes.every(connection), *checkpoints.every(connection)]


def stored_nodes(cache: PrefixCache) -> list[Node]:
    return [entry for entry in entries(cache) if isinstance(entry, Node)]


def sql(cache: PrefixCache, statement: str, **values: Any) -> None:
    with cache.repository.index.write() as connection:
        assert connection.execute(text(statement), values).rowcount == 1


# -- any prefix --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "rows": dense_layout(),
    "columns": dense_layout(v_trans=True),
    "extended": dense_layout(ext=True),
    "f32": dense_layout(k_type=0, v_type=0),
    "q8_0": dense_layout(k_type=8, v_type=8),
    "q4_0 keys": dense_layout(k_type=2, v_trans=True),
    "mla": dense_layout(mla=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_prefix_of_what_is_stored_comes_back(repository: Repository, name: str) -> None:
    layout = LAYOUTS[name]
    cache = PrefixCache(repository, identity(v_trans=layout.v_trans, ext=layout.ext), block_tokens=B)
    keep(cache, CHAT, layout)
    for shared in (0, 1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B, 3 * B + 1, 50):
        assert fetch(cache, CHAT[:shared] + OTHER[shared:], layout).length == shared


def test_any_prefix_comes_back_after_a_restart(root: Path) -> None:
    repository = open_root(root, 64 << 20)
    keep(PrefixCache(repository, identity(), block_tokens=B), CHAT)
    close_root(repository)
    repository = open_root(root)
    for shared in range(51):
        assert fetch(PrefixCache(repository, identity()), CHAT[:shared] + OTHER).length == shared
    close_root(repository)


def test_chats_that_part_in_the_middle_of_a_block_share_its_first_half(cache: PrefixCache) -> None:
    first, second = CHAT[:40], [*CHAT[:24], *OTHER[24:48]]
    keep(cache, first)
    assert fetch(cache, second).length == 24
    keep(cache, second)
    for chat in (first, second):
        for length in range(1, len(chat) + 1):
            assert fetch(cache, chat[:length]).length == length
    assert fetch(cache, [*CHAT[:20], *random_tokens(9, seed=5)]).length == 20


def test_tails_of_several_pieces_come_back_at_every_position(cache: PrefixCache) -> None:
    for length in (18, 21, 22, 27, 31):
        keep(cache, CHAT[:length])
    assert [node.n_tokens for node in stored_nodes(cache)] == [16, 2, 3, 1, 5, 4]
    for length in range(1, 32):
        assert fetch(cache, CHAT[:length] + OTHER).length == length


def test_chats_that_part_within_pieces_each_come_back(cache: PrefixCache) -> None:
    chats = [CHAT[:22], CHAT[:25], [*CHAT[:20], *OTHER[:4]], [*CHAT[:23], *OTHER[:6]], [*CHAT[:25], *OTHER[:3]]]
    for chat in chats:
        keep(cache, chat)
    for chat in chats:
        assert fetch(cache, chat).length == len(chat)


def test_thirty_branches_under_one_long_prefix(cache: PrefixCache) -> None:
    trunk = random_tokens(1500, seed=3)
    branches = [trunk + random_tokens(30 + i, seed=100 + i) for i in range(30)]
    for branch in branches:
        keep(cache, branch)
    for branch in branches:
        assert fetch(cache, branch).length == len(branch)
    assert fetch(cache, trunk).length == 1500
    # The trunk's blocks are there once.
    assert sum(node.start < 1488 for node in stored_nodes(cache)) == 1500 // B
    assert sum(node.n_tokens for node in stored_nodes(cache)) == 1488 + sum(len(branch) - 1488 for branch in branches)


def test_one_token_is_a_state_too(cache: PrefixCache) -> None:
    keep(cache, [5])
    assert fetch(cache, [5, 6]).length == 1
    keep(cache, [6])
    assert fetch(cache, [6]).length == 1


def test_both_forms_are_saved_alike_and_come_back_in_either(cache: PrefixCache) -> None:
    keep(cache, CHAT, form=Form.WHOLE)
    assert fetch(cache, CHAT).length == 50
    assert keep(cache, CHAT).written == 0
    restored = cache.restore(cache.match(CHAT), CHAT, form=Form.WHOLE, arch=ARCH)
    assert np.array_equal(restored.state, state_of(SMALL, CHAT, Form.WHOLE))


def test_extreme_tokens_are_tokens(cache: PrefixCache) -> None:
    chat = [0, 2**31 - 1, -1, -(2**31), 255, 256, 0, 0]
    keep(cache, chat)
    assert fetch(cache, np.array(chat, np.int64).tolist()).length == len(chat)
    assert cache.match([0, 2**31 - 1, -2]).length == 2


# -- matching ----------------------------------------------------------------------------------------------------------


def test_a_miss_says_why(repository: Repository, cache: PrefixCache) -> None:
    def reason(of: PrefixCache = cache) -> Reason:
        found = of.match(CHAT)
        assert (found.length, found.source, found.plan) == (0, Source.NONE, ())
        return found.reason

    assert reason() is Reason.EMPTY
    other = PrefixCache(repository, identity("another model"))
    keep(other, CHAT)
    assert reason() is Reason.OTHER_NAMESPACE
    keep(cache, OTHER)
    assert reason() is Reason.NO_COMMON_PREFIX


def test_another_models_opaque_states_are_another_namespace(repository: Repository, cache: PrefixCache) -> None:
    window = PrefixCache(repository, identity("window", MemoryKind.WINDOW))
    window.save(CHAT, np.arange(100, dtype=np.uint8))
    assert cache.match(CHAT).reason is Reason.OTHER_NAMESPACE


def test_states_of_another_identity_never_match(repository: Repository, cache: PrefixCache) -> None:
    keep(cache, CHAT)
    other = PrefixCache(repository, identity("another model"), block_tokens=B)
    assert other.match(CHAT).length == 0
    keep(other, CHAT[:20])
    assert other.match(CHAT).length == 20
    assert cache.match(CHAT).length == 50


def test_no_more_is_used_than_is_wanted(cache: PrefixCache) -> None:
    keep(cache, CHAT)
    for at_most in (-1, 0, 1, 15, 16, 17, 49, 50, 99):
        assert fetch(cache, CHAT, at_most=at_most).length == max(0, min(at_most, 50))


def test_match_knows_what_it_would_read(cache: PrefixCache) -> None:
    keep(cache, CHAT)
    found = cache.match(CHAT)
    assert found.plain_bytes == sum(node.plain_bytes for node in stored_nodes(cache))
    assert (found.prompt_tokens, found.decoded, found.source, found.reason) == (50, 0, Source.DISK, Reason.FOUND)


def test_empty_prompt_matches_nothing(cache: PrefixCache) -> None:
    keep(cache, CHAT)
    assert cache.match([]).length == 0
    assert cache.restore(cache.match([]), []).length == 0


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], [1.5], ["a"], [None], [[1, 2], [3, 4]]])
@pytest.mark.parametrize("as_array", [False, True])
def test_what_is_no_token_is_a_usage_error(tokens: list[Any], as_array: bool) -> None:
    # An array would be converted without a word, and another prompt would match.
    with pytest.raises(UsageError, match="32 bits"):
        token_bytes(np.array(tokens) if as_array else tokens)


def test_tokens_of_every_integer_type_are_the_same_tokens() -> None:
    expected = token_bytes([1, 2, 300])
    assert all(token_bytes(np.array([1, 2, 300], kind)) == expected for kind in (np.int16, np.uint32, np.int64, ">i4"))
    assert token_bytes([]) == token_bytes(np.empty(0)) == b""


def test_blocks_need_a_token(repository: Repository) -> None:
    with pytest.raises(UsageError, match="block_tokens"):
        PrefixCache(repository, identity(), block_tokens=0)


def test_block_size_is_fixed_for_the_namespaces_life(repository: Repository) -> None:
    first = PrefixCache(repository, identity(), block_tokens=16)
    assert (first.namespace, first.block_tokens) == (None, 16)
    keep(first, CHAT)
    second = PrefixCache(repository, identity(), block_tokens=7)
    assert second.block_tokens == 16
    keep(second, OTHER)
    assert fetch(second, CHAT).length == fetch(second, OTHER).length == 50
    assert {node.n_tokens for node in stored_nodes(second)} == {16, 2}


def test_measured_speeds_are_there_after_a_restart(repository: Repository, cache: PrefixCache) -> None:
    cache.measured(1.0, 2.0)  # nothing was ever saved: nowhere to keep it, and no error
    keep(cache, CHAT)
    cache.measured(123.0, None)
    cache.measured(None, 5e8)
    cache.measured(None, None)
    space = PrefixCache(repository, identity()).namespace
    assert space is not None
    assert (space.prefill_rate, space.restore_rate) == (123.0, 5e8)


# -- each token once ---------------------------------------------------------------------------------------------------


def test_what_is_stored_already_writes_nothing(cache: PrefixCache) -> None:
    assert keep(cache, CHAT).written == 4
    before = [replace(entry, used=0.0) for entry in entries(cache)]
    for length in (50, 49, 33, 32, 16, 1):
        saved = keep(cache, CHAT[:length])
        assert (saved.tokens, saved.written, saved.written_bytes, saved.evicted) == (length, 0, 0, 0)
    assert [replace(entry, used=0.0) for entry in entries(cache)] == before


def test_the_beginning_of_another_chats_block_is_stored_already(cache: PrefixCache) -> None:
    keep(cache, CHAT)
    assert keep(cache, CHAT[:20]).written == 0
    keep(cache, [*CHAT[:20], *OTHER[:2]])
    assert fetch(cache, [*CHAT[:20], *OTHER[:2]]).length == 22


def test_pieces_are_gone_when_their_block_is_full(cache: PrefixCache) -> None:
    for length in (18, 21, 30, 31, 32, 40):
        keep(cache, CHAT[:length])
    assert [(node.start, node.n_tokens) for node in stored_nodes(cache)] == [(0, 16), (16, 16), (32, 8)]
    assert len(cache.repository.blobs) == 3


def test_a_piece_stays_as_long_as_another_chat_stands_on_it(cache: PrefixCache) -> None:
    mine, theirs = CHAT[:36], [*CHAT[:20], *OTHER[:5]]
    keep(cache, mine[:20])
    keep(cache, mine[:24])
    keep(cache, theirs)
    keep(cache, mine)
    assert fetch(cache, theirs).length == len(theirs)
    assert fetch(cache, mine).length == len(mine)
    # The shared piece of 4, theirs of 5 behind it; my own piece of 4 went into the block.
    assert sorted((node.start, node.n_tokens) for node in stored_nodes(cache)) == [(0, 16), (16, 4), (16, 16), (20, 5), (32, 4)]


def test_a_block_that_comes_at_once_takes_the_place_of_all_pieces(cache: PrefixCache) -> None:
    for length in (2, 5, 9, 14):
        keep(cache, CHAT[:length])
    keep(cache, CHAT)
    assert [(node.start, node.n_tokens) for node in stored_nodes(cache)] == [(0, 16), (16, 16), (32, 16), (48, 2)]


def test_growing_chat_writes_about_what_it_adds(repository: Repository) -> None:
    layout = dense_layout(4, 128)
    cache = PrefixCache(repository, identity())
    rng = Random(1)
    chat: list[int] = []
    written = 0
    for turn in range(20):
        chat += random_tokens(rng.randint(30, 50), seed=turn)
        written += keep(cache, chat, layout).written_bytes
    raw = layout.token_bytes * len(chat)
    assert written <= 2.5 * raw
    assert sum(node.stored_bytes for node in stored_nodes(cache)) <= raw
    assert repository.blobs.used_bytes <= 1.1 * raw
    assert fetch(cache, chat, layout).length == len(chat)


def test_long_state_is_written_in_several_batches(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_BYTES", 20_000)
    chat = random_tokens(300)
    assert keep(cache, chat).written == 19
    assert fetch(cache, chat).length == 300


def test_an_interrupted_save_leaves_a_first_part_that_is_good(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = random_tokens(300)
    original = save_module.codec.encode
    with monkeypatch.context() as patch:
        patch.setattr(batches, "BATCH_BYTES", 20_000)
        script = iter("." * 12)

        def encode(plain: Any) -> bytes:
            if next(script, "E") == "E":
                raise OSError("interrupted")
            return original(plain)

        patch.setattr(save_module.codec, "encode", encode)
        with pytest.raises(OSError, match="interrupted"):
            keep(cache, chat)
    assert check(cache.repository) == []
    assert 0 < fetch(cache, chat).length < 300
    keep(cache, chat)
    assert fetch(cache, chat).length == 300


# -- states as llama.cpp leaves them -----------------------------------------------------------------------------------


def shuffled(tokens: Sequence[int], layout: Layout, seed: int = 0) -> Bytes:
    """The same state with its cells in another order, as after a cut-back that left holes."""
    order = np.random.default_rng(seed).permutation(len(tokens))
    source = np.arange(len(tokens), dtype="<i4")
    data = state_of(layout, tokens)
    parsed = parse(data, Form.SEQUENCE, Memory(MemoryKind.ATTENTION, None, layout.v_trans, layout.ext))
    buffer, target = blank([layout], len(tokens))
    for array, original in zip(target.caches[0].arrays, parsed.caches[0].arrays, strict=True):
        array[...] = original[:, order, :]
    records = buffer[16 : 16 + len(tokens) * layout.cell_bytes].reshape(len(tokens), -1)
    records[:, :4] = source[order][:, None].view(np.uint8)
    return buffer


@pytest.mark.parametrize("name", ["rows", "columns", "extended"])
def test_cells_are_taken_by_their_position_and_not_by_their_place(repository: Repository, name: str) -> None:
    layout = LAYOUTS[name]
    cache = PrefixCache(repository, identity(v_trans=layout.v_trans, ext=layout.ext), block_tokens=B)
    data = shuffled(CHAT, layout)
    assert not np.array_equal(data, state_of(layout, CHAT))
    cache.save(CHAT, data)
    assert fetch(cache, CHAT, layout).length == 50


def with_position(cell: int, position: int) -> Bytes:
    data = state_of(SMALL, CHAT)
    data[16 + cell * 12 : 20 + cell * 12] = np.frombuffer(np.int32(position).tobytes(), np.uint8)
    return data


def test_state_with_a_hole_or_a_position_twice_is_refused(cache: PrefixCache) -> None:
    for cell, position in ((49, 50), (0, 50), (10, 11), (10, 9), (49, 2**31 - 1)):
        with pytest.raises(LayoutError, match="positions 0 to 49"):
            cache.save(CHAT, with_position(cell, position))
    assert entries(cache) == []


def test_state_of_another_length_than_its_tokens_is_refused(cache: PrefixCache) -> None:
    for length in (0, 1, 49, 51):
        with pytest.raises(LayoutError):
            cache.save([*CHAT, 7][:length], state_of(SMALL, CHAT))
    assert entries(cache) == []


# -- opaque states -----------------------------------------------------------------------------------------------------

WHOLE = np.frombuffer(np.random.default_rng(4).bytes(5000), np.uint8)


@pytest.fixture
def opaque(repository: Repository) -> PrefixCache:
    """A cache of a model whose memory can't be cut."""
    return PrefixCache(repository, identity(kind=MemoryKind.WINDOW), block_tokens=B)


@pytest.mark.parametrize("kind", [MemoryKind.WINDOW, MemoryKind.RECURRENT, MemoryKind.HYBRID, MemoryKind.UNKNOWN])
def test_opaque_state_comes_back_whole_at_exactly_its_position(repository: Repository, kind: MemoryKind) -> None:
    cache = PrefixCache(repository, identity(kind=kind), block_tokens=B)
    for length in (1, 15, 16, 17, 32, 40):
        saved = cache.save(CHAT[:length], WHOLE)
        assert (saved.opaque, saved.written) == (True, 1)
        for prompt in (CHAT[:length], CHAT, CHAT[:length] + OTHER):
            restored = cache.restore(cache.match(prompt), prompt)
            assert restored.length == length
            assert np.array_equal(restored.state, WHOLE)
        # Not one token less, and not behind other tokens.
        assert cache.match(CHAT[: length - 1]).length == 0
        assert cache.match(CHAT, at_most=length - 1).length == 0
        assert cache.match([*CHAT[: length - 1], OTHER[length - 1], *CHAT[length:]]).length == 0
        assert cache.match([OTHER[0], *CHAT[1:]]).length == 0
        cache.remove(entries(cache))


def test_state_that_could_be_cut_is_kept_whole_where_the_model_forbids_it(opaque: PrefixCache) -> None:
    # A window model's state may parse as plain attention by chance of its bytes: the model decides.
    assert keep(opaque, CHAT).opaque
    assert opaque.match(CHAT[:49]).length == 0
    assert fetch(opaque, CHAT).length == 50


def test_of_several_opaque_states_the_highest_that_fits(opaque: PrefixCache) -> None:
    for length in (10, 16, 20, 33, 48):
        opaque.save(CHAT[:length], WHOLE[length:])
    opaque.save([*CHAT[:30], *OTHER[:9]], WHOLE)
    for prompt_length, expected in ((9, 0), (10, 10), (15, 10), (16, 16), (19, 16), (32, 20), (47, 33), (50, 48)):
        prompt = CHAT[:prompt_length]
        restored = opaque.restore(opaque.match(prompt), prompt)
        assert restored.length == expected
        assert np.array_equal(restored.state, WHOLE[expected:] if expected else WHOLE[:0])


def test_opaque_state_of_another_sequence_is_a_miss(opaque: PrefixCache) -> None:
    opaque.save(CHAT, WHOLE)
    assert opaque.match(CHAT, seq_id=1).length == 0


def test_opaque_state_is_stored_once(opaque: PrefixCache) -> None:
    opaque.save(CHAT, WHOLE)
    saved = opaque.save(CHAT, WHOLE[::-1].copy())
    assert (saved.tokens, saved.written) == (50, 0)
    assert np.array_equal(opaque.restore(opaque.match(CHAT), CHAT).state, WHOLE)


def test_restored_opaque_state_outlives_its_entry(opaque: PrefixCache) -> None:
    # Raw values are views into the map: what is handed out must be a copy.
    opaque.save(CHAT, WHOLE)
    restored = opaque.restore(opaque.match(CHAT), CHAT)
    opaque.remove(entries(opaque))
    for seed in range(5):
        opaque.save(OTHER, np.full(5000, seed, np.uint8))
        opaque.remove(entries(opaque))
    assert np.array_equal(restored.state, WHOLE)


def test_memory_that_the_parser_doesnt_know_is_kept_whole(cache: PrefixCache) -> None:
    # A model that calls itself plain attention, and writes something else.
    assert cache.save(CHAT, WHOLE).opaque
    restored = cache.restore(cache.match(CHAT), CHAT)
    assert np.array_equal(restored.state, WHOLE)
    assert cache.match(CHAT[:49]).length == 0


def test_opaque_states_are_kept_in_the_sequence_form_only(opaque: PrefixCache) -> None:
    with pytest.raises(UnknownLayout, match="sequence form"):
        opaque.save(CHAT, WHOLE, Form.WHOLE)
    assert entries(opaque) == []


def test_the_longer_of_blocks_and_opaque_state_is_taken(cache: PrefixCache) -> None:
    keep(cache, CHAT[:30])
    cache.save(CHAT[:40], WHOLE)
    assert cache.match(CHAT).checkpoint is not None
    assert fetch(cache, CHAT, at_most=39).length == 30


# -- thinning ----------------------------------------------------------------------------------------------------------

LONG = random_tokens(1000, seed=8)


def positions(cache: PrefixCache, seq_id: int = 0) -> list[int]:
    with cache.repository.rows() as connection:
        return sorted(point.pos for point in checkpoints.every(connection) if point.seq_id == seq_id)


def keep_points(cache: PrefixCache, made: Made, tokens: Sequence[int], *taken: int, **options: Any) -> Saved:
    return cache.save(tokens, made.state(tokens), points=[made.point(tokens[:at]) for at in taken], **options)


def assert_spread(found: list[int], end: int) -> None:
    gaps = [b - a for a, b in pairwise([0, *found])]
    assert max(gaps) <= 3 * end / points.MAX_POINTS


@pytest.mark.parametrize("made", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])
def test_of_too_many_checkpoints_a_spread_remains(repository: Repository, made: Made) -> None:
    cache = PrefixCache(repository, made.identity(), block_tokens=B)
    keep_points(cache, made, LONG, *range(10, 1000, 10))
    found = positions(cache)
    assert len(found) == points.MAX_POINTS
    assert found[-points.NEWEST :] == [980, 990, 1000]
    assert_spread(found, 1000)
    assert [cache.match(LONG[:at]).length for at in found] == found
    assert len(repository.blobs) == len(entries(cache))


def test_a_growing_chat_keeps_a_spread_of_its_checkpoints(repository: Repository) -> None:
    cache = PrefixCache(repository, HYBRID.identity(), block_tokens=B)
    for end in range(20, 1001, 20):
        keep_points(cache, HYBRID, LONG[:end], end - 1)
        assert len(positions(cache)) <= points.MAX_POINTS
        assert cache.match(LONG[:end]).length == end
    assert_spread(positions(cache), 1000)


def test_thinning_one_chat_leaves_the_others_alone(repository: Repository) -> None:
    cache = PrefixCache(repository, HYBRID.identity(), block_tokens=B)
    branch = [*LONG[:300], *random_tokens(200, seed=9)]
    keep_points(cache, HYBRID, branch, *range(310, 500, 10))
    keep_points(cache, HYBRID, LONG[:100], *range(5, 100, 5), seq_id=1)
    keep_points(cache, HYBRID, LONG, *range(10, 1000, 10))
    assert [at for at in range(310, 501, 10) if cache.match(branch[:at]).length == at] == list(range(310, 501, 10))
    assert positions(cache, seq_id=1) == list(range(5, 101, 5))


def test_the_checkpoints_of_one_chat_take_no_more_than_their_share(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "largest", lambda _: 400_000)
    made = Made(HYBRID.memory, HYBRID.caches, tensor_bytes=8000)
    cache = PrefixCache(repository, made.identity(), block_tokens=B)
    keep_points(cache, made, LONG[:200], *range(20, 200, 20))
    with repository.rows() as connection:
        found = list(checkpoints.every(connection))
    assert 2 <= len(found) < 10
    assert sum(point.stored_bytes for point in found) <= 400_000 * save_module.POINTS_SHARE
    assert cache.match(LONG).length == 200


def test_one_checkpoint_stays_however_large_it_is(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "largest", lambda _: 200_000)
    made = Made(HYBRID.memory, HYBRID.caches, tensor_bytes=50_000)
    cache = PrefixCache(repository, made.identity(), block_tokens=B)
    for end in (20, 30, 40):
        keep_points(cache, made, LONG[:end])
        assert positions(cache) == [end]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat_in_pieces(cache: PrefixCache) -> PrefixCache:
    """Two blocks and a tail of two pieces."""
    for length in (32, 35, 40):
        keep(cache, CHAT[:length])
    assert len(entries(cache)) == 4
    return cache


PROMPT = CHAT[:40]


def heal(cache: PrefixCache) -> Restored:
    """A request that meets the damage, and what the adapters do next: quarantine, save."""
    restored = fetch(cache, PROMPT)
    cache.quarantine(restored.damaged)
    keep(cache, PROMPT)
    return restored


def meet_and_heal(cache: PrefixCache) -> Restored:
    """Heal, and remove what no request meets any more.

    That is a row whose own place was flipped, what stood on a removed piece, and a blob whose name was flipped. It is
    never served, and goes by eviction.
    """
    restored = heal(cache)
    assert fetch(cache, PROMPT).length == len(PROMPT)
    while findings := check(cache.repository):
        with cache.repository.writing() as writing:
            writing.remove([finding.entry for finding in findings if finding.entry is not None])
            writing.sweep()
    return restored


@pytest.mark.parametrize("number", range(4), ids=["first block", "second block", "first piece", "second piece"])
def test_flip_in_a_stored_value_is_a_shorter_state_until_it_is_saved_anew(chat_in_pieces: PrefixCache, number: int) -> None:
    for at in (0, 4, 9, 16, 60, 120, 200, -1):
        victim = stored_nodes(chat_in_pieces)[min(number, len(entries(chat_in_pieces)) - 1)]
        with chat_in_pieces.repository.snapshot() as snapshot:
            value = bytearray(snapshot.blobs.get(victim.blob) or b"")
        value[at] ^= 0x20
        chat_in_pieces.repository.blobs.put([(victim.blob, bytes(value))])
        restored = fetch(chat_in_pieces, PROMPT)
        assert (restored.length, restored.damaged) == (victim.start, (victim,))
        assert restored.detail
        assert chat_in_pieces.quarantine(restored.damaged) == 1
        assert keep(chat_in_pieces, PROMPT).written >= 1
        assert Trouble.DAMAGE not in {finding.trouble for finding in check(chat_in_pieces.repository)}
        assert meet_and_heal(chat_in_pieces).damaged == ()


def flips(value: Any) -> Iterator[Any]:
    if isinstance(value, int):
        yield from (value ^ bit for bit in (1, 2, 64, 1 << 20, 1 << 30))
        return
    for at in {0, len(value) // 2, len(value) - 1}:
        yield value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


NODE_FIELDS = ["key", "parent", "anchor", "path", "start", "n_tokens", "blob", "stored_bytes", "plain_bytes"]


@pytest.mark.parametrize("field", NODE_FIELDS)
def test_flip_in_a_row_never_gives_wrong_bytes_and_the_next_save_heals_it(cache: PrefixCache, field: str) -> None:
    for number in range(4):
        cache.remove(entries(cache))
        for length in (32, 35, 40):
            keep(cache, PROMPT[:length])
        victim = stored_nodes(cache)[number]
        for flipped in flips(getattr(victim, field)):
            victim = stored_nodes(cache)[min(number, len(entries(cache)) - 1)]
            sql(cache, f"UPDATE node SET {field} = :value WHERE id = :id", value=flipped, id=victim.id)
            assert victim.start <= meet_and_heal(cache).length <= 40


@pytest.mark.parametrize("field", NODE_FIELDS)
def test_flip_in_every_row_at_once_is_healed_too(chat_in_pieces: PrefixCache, field: str) -> None:
    for victim in stored_nodes(chat_in_pieces):
        flipped = next(flips(getattr(victim, field)))
        sql(chat_in_pieces, f"UPDATE node SET {field} = :value WHERE id = :id", value=flipped, id=victim.id)
    # The first save may still build on a piece that nobody has met yet.
    heal(chat_in_pieces)
    meet_and_heal(chat_in_pieces)


@pytest.mark.parametrize("field", ["kind", "seq_id", "pos", "prefix", "anchor", "path", "blob", "stored_bytes", "plain_bytes"])
def test_flip_in_a_checkpoints_row_is_a_miss_and_the_next_save_heals_it(repository: Repository, field: str) -> None:
    cache = PrefixCache(repository, identity(kind=MemoryKind.HYBRID), block_tokens=B)
    cache.save(PROMPT, WHOLE)
    for flipped in flips(getattr(entries(cache)[0], field)):
        cache.remove(entries(cache))
        cache.save(PROMPT, WHOLE)
        sql(cache, f"UPDATE checkpoint SET {field} = :value", value=flipped)
        restored = cache.restore(cache.match(PROMPT), PROMPT)
        assert restored.length in (0, 40)
        cache.quarantine(restored.damaged)
        cache.save(PROMPT, WHOLE)
        restored = cache.restore(cache.match(PROMPT), PROMPT)
        assert (restored.length, restored.damaged) == (40, ())
        assert np.array_equal(restored.state, WHOLE)
        damaged = [finding.entry for finding in check(repository) if finding.entry is not None]
        with repository.writing() as writing:
            writing.remove(damaged)
            writing.sweep()
        assert check(repository) == []


def test_missing_blob_is_a_shorter_state_until_it_is_saved_anew(chat_in_pieces: PrefixCache) -> None:
    for number in (3, 0, 1, 2):
        victim = stored_nodes(chat_in_pieces)[number]
        chat_in_pieces.repository.blobs.delete([victim.blob])
        restored = meet_and_heal(chat_in_pieces)
        assert (restored.length, restored.damaged) == (victim.start, (victim,))
        assert "missing" in restored.detail


def test_everything_damaged_is_met_at_once(chat_in_pieces: PrefixCache) -> None:
    for victim in stored_nodes(chat_in_pieces):
        chat_in_pieces.repository.blobs.put([(victim.blob, b"rotten")])
    restored = meet_and_heal(chat_in_pieces)
    assert (restored.length, len(restored.damaged)) == (0, 4)


def test_missing_row_is_a_shorter_state(chat_in_pieces: PrefixCache) -> None:
    victim = stored_nodes(chat_in_pieces)[1]
    chat_in_pieces.remove([victim])
    assert meet_and_heal(chat_in_pieces).length == victim.start


def test_values_of_two_blocks_mixed_up_are_found(chat_in_pieces: PrefixCache) -> None:
    first, second = stored_nodes(chat_in_pieces)[:2]
    with chat_in_pieces.repository.snapshot() as snapshot:
        values = [bytes(snapshot.blobs.get(node.blob) or b"") for node in (first, second)]
    chat_in_pieces.repository.blobs.put([(first.blob, values[1]), (second.blob, values[0])])
    assert meet_and_heal(chat_in_pieces).length == 0


def test_quarantine_spares_what_was_saved_anew_meanwhile(chat_in_pieces: PrefixCache) -> None:
    victim = stored_nodes(chat_in_pieces)[3]
    chat_in_pieces.repository.blobs.put([(victim.blob, b"rotten")])
    restored = fetch(chat_in_pieces, PROMPT)
    assert chat_in_pieces.quarantine(restored.damaged) == 1
    keep(chat_in_pieces, PROMPT)
    assert chat_in_pieces.quarantine(restored.damaged) == 0
    assert fetch(chat_in_pieces, PROMPT).length == 40


def test_what_was_evicted_between_match_and_restore_is_a_shorter_state(chat_in_pieces: PrefixCache) -> None:
    found = chat_in_pieces.match(PROMPT)
    chat_in_pieces.remove(stored_nodes(chat_in_pieces)[2:])
    restored = chat_in_pieces.restore(found, PROMPT)
    assert restored.length == 32
    assert np.array_equal(restored.state, state_of(SMALL, PROMPT[:32]))


def test_states_of_another_layout_are_never_joined(cache: PrefixCache) -> None:
    # The same fingerprint for other settings: the fingerprint would be wrong, but the bytes must not be.
    keep(cache, CHAT[:32])
    keep(cache, CHAT, dense_layout(3))
    restored = cache.restore(cache.match(CHAT), CHAT)
    assert restored.length == 32
    assert np.array_equal(restored.state, state_of(SMALL, CHAT[:32]))
    assert "another layout" in restored.detail


# -- recency -----------------------------------------------------------------------------------------------------------


def hits(cache: PrefixCache) -> list[int]:
    cache.repository.flush_touched()
    with cache.repository.rows() as connection:
        return list(connection.execute(text("SELECT hits FROM node ORDER BY start, id")).scalars())


def test_a_restore_refreshes_its_whole_path(chat_in_pieces: PrefixCache) -> None:
    fetch(chat_in_pieces, PROMPT[:33])
    assert hits(chat_in_pieces) == [1, 1, 1, 0]
    chat_in_pieces.match(PROMPT)
    assert hits(chat_in_pieces) == [1, 1, 1, 0]


def test_damaged_entries_are_not_refreshed(chat_in_pieces: PrefixCache) -> None:
    chat_in_pieces.repository.blobs.put([(stored_nodes(chat_in_pieces)[1].blob, b"rotten")])
    restored = fetch(chat_in_pieces, PROMPT[:20])
    assert hits(chat_in_pieces)[:2] == [1, 0]
    chat_in_pieces.quarantine(restored.damaged)
    keep(chat_in_pieces, PROMPT)


# -- hash collisions ---------------------------------------------------------------------------------------------------


def short(parent: bytes, tokens: Any) -> PrefixHash:
    """One of 256 hashes."""
    return PrefixHash(blake3(parent + bytes(tokens)).digest()[:1] + bytes(31))


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch, repository: Repository) -> PrefixCache:
    """A cache whose prefix hashes have 8 bits."""
    for module in (hashing, verify, save_module):
        monkeypatch.setattr(module, "extend", short)
    return PrefixCache(repository, identity(), block_tokens=4)


@pytest.mark.parametrize("seed", range(3))
def test_colliding_hashes_never_give_wrong_bytes(colliding: PrefixCache, seed: int) -> None:
    rng = Random(seed)
    chats: list[list[int]] = []
    refused = 0
    for _ in range(120):
        trunk = rng.choice(chats) if chats and rng.random() < 0.6 else []
        chat = trunk[: rng.randint(0, len(trunk))] + [rng.randint(0, 2) for _ in range(rng.randint(1, 9))]
        chats.append(chat)
        try:
            keep(colliding, chat)
        except KvkeepError:
            refused += 1
        if rng.random() < 0.2:
            with colliding.repository.rows() as connection:
                leaves = nodes.oldest_leaves(connection, 5)
            colliding.remove(rng.sample(leaves, min(2, len(leaves))))
        for prompt in (rng.choice(chats), [rng.randint(0, 2) for _ in range(20)]):
            fetch(colliding, prompt)
    for chat in chats:
        fetch(colliding, chat)
    with colliding.repository.writing() as writing:
        writing.sweep()
    # With 256 hashes there must have been collisions, and with so many chats something must have been found.
    assert refused or len(entries(colliding)) < 256
    assert any(colliding.match(chat).length for chat in chats)


# -- budget ------------------------------------------------------------------------------------------------------------

WIDE = dense_layout(8, 256)
"""8 KiB a token."""


@pytest.fixture
def tiny(root: Path) -> Iterator[PrefixCache]:
    repository = open_root(root, MIN_CAPACITY)
    yield PrefixCache(repository, identity(), block_tokens=B)
    close_root(repository)


def test_smallest_budget_is_kept_after_every_save(tiny: PrefixCache) -> None:
    evicted = 0
    for number in range(16):
        chat = random_tokens(250, seed=number)
        saved = keep(tiny, chat, WIDE)
        evicted += saved.evicted
        assert tiny.repository.disk_bytes <= MIN_CAPACITY
        # What was just saved is all there.
        assert tiny.match(chat).length == 250
    assert evicted > 0
    assert fetch(tiny, chat, WIDE).length == 250


def test_a_chat_that_is_larger_than_the_budget_is_refused_and_nothing_breaks(tiny: PrefixCache) -> None:
    keep(tiny, CHAT, WIDE)
    chat = random_tokens(2500, seed=1)
    with pytest.raises(TooLarge):
        keep(tiny, chat, WIDE)
    assert tiny.repository.disk_bytes <= MIN_CAPACITY
    assert check(tiny.repository) == []
    # Its first part is there, and good.
    assert fetch(tiny, chat, WIDE).length > 0
    keep(tiny, random_tokens(50, seed=2), WIDE)


def test_an_opaque_state_that_is_larger_than_the_budget_evicts_nobody(tiny: PrefixCache) -> None:
    keep(tiny, CHAT, WIDE)
    with pytest.raises(TooLarge):
        tiny.save(OTHER, np.frombuffer(np.random.default_rng(1).bytes(20 << 20), np.uint8))
    assert fetch(tiny, CHAT, WIDE).length == 50


def test_a_piece_that_was_evicted_for_its_own_block_takes_nobody_along(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = dense_layout(4, 128)
    keep(cache, CHAT[:19], layout)
    block, piece = stored_nodes(cache)
    # One byte too little for the block that makes the piece superfluous: the piece goes, and the block gets its number.
    room = cache.repository.blobs.used_bytes + budget.footprint(block.stored_bytes) - 1
    monkeypatch.setattr(budget, "largest", lambda _: room)
    assert keep(cache, CHAT[:32], layout).evicted == 1
    assert [node.id for node in stored_nodes(cache)] == [block.id, piece.id]
    assert fetch(cache, CHAT, layout).length == 32


# -- threads -----------------------------------------------------------------------------------------------------------


def test_saving_and_restoring_at_once(root: Path) -> None:
    repository = open_root(root, MIN_CAPACITY)
    cache = PrefixCache(repository, identity(), block_tokens=B)
    layout = dense_layout(4, 128)
    chats = [random_tokens(200, seed=9)[: 40 * (i % 4)] + random_tokens(150, seed=i) for i in range(24)]
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                barrier.wait()
                work()
            except BaseException as error:  # noqa: BLE001 - reported by the test's thread
                failures.append(error)

        return threading.Thread(target=run)

    def saver(numbers: range) -> None:
        for number in numbers:
            keep(cache, chats[number], layout)

    def reader(seed: int) -> None:
        rng = Random(seed)
        for _ in range(40):
            chat = rng.choice(chats)
            restored = fetch(cache, chat[: rng.randint(1, len(chat))], layout)
            cache.quarantine([entry for entry in restored.damaged if entry is not None])

    threads = [
        guarded(lambda: saver(range(0, 24, 2))),
        guarded(lambda: saver(range(1, 24, 2))),
        guarded(lambda: reader(1)),
        guarded(lambda: reader(2)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert repository.disk_bytes <= MIN_CAPACITY
    assert {finding.trouble for finding in check(repository)} <= {Trouble.UNREACHABLE}
    assert fetch(cache, chats[-1], layout).length + fetch(cache, chats[-2], layout).length > 0
    close_root(repository)


FORK = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from synthetic import SMALL, identity, random_tokens, state_of
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.registry import close_root, open_root
chat = random_tokens(300)
def restored():
    cache = PrefixCache(open_root(Path(sys.argv[1])), identity(), block_tokens=16)
    if cache.namespace is None:
        cache.save(chat, state_of(SMALL, chat))
    state = cache.restore(cache.match(chat), chat).state
    close_root(cache.repository)
    return (state == state_of(SMALL, chat)).all()
assert restored()
child = os.fork()
if child == 0:
    os._exit(0 if restored() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_restores_with_threads_of_its_own(root: Path) -> None:
    # The pool's threads stay with the parent: the child would wait for them forever.
    support = str(Path(__file__).parents[1] / "support")
    subprocess.run([sys.executable, "-c", FORK, str(root), support], timeout=60, check=True)


def test_what_was_replaced_since_the_match_is_no_damage(cache: PrefixCache) -> None:
    """The writer may put a full block in the place of a tail's pieces between a match and its restore."""
    keep(cache, CHAT[:20])
    match = cache.match(CHAT[:20])
    keep(cache, CHAT[:40])
    restored = cache.restore(match, CHAT[:20])
    assert (restored.length, restored.damaged, restored.detail) == (20, (), "")
    assert np.array_equal(restored.state, state_of(SMALL, CHAT[:20]))


def test_what_was_evicted_since_the_match_is_no_damage(cache: PrefixCache) -> None:
    keep(cache, CHAT)
    match = cache.match(CHAT)
    cache.remove(entries(cache)[1:])
    restored = cache.restore(match, CHAT)
    assert (restored.length, restored.damaged) == (16, ())
