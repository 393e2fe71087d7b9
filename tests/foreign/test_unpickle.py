"""Pickles are read without running anything of them."""

import io
import os
import pickle  # noqa: TID251 - written here, and read once to show what it would do
import pickletools
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import small_state
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.cache.foreign.unpickle import Array, LlamaState, unpickled, unpickled_numbers
from kvkeep.store.errors import KvkeepError, TruncatedState, UnknownLayout

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def read(data: bytes) -> Any:
    return unpickled(io.BytesIO(data), len(data))


def fields(data: bytes) -> tuple[list[int], bytes, int]:
    """Input ids, state and number of tokens of a pickled LlamaState."""
    found = read(data)
    assert isinstance(found, LlamaState)
    ids = found.fields["input_ids"]
    assert isinstance(ids, Array)
    return ids.numbers("input_ids").tolist(), found.fields["llama_state"].load().tobytes(), found.fields["n_tokens"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("state", [b"", b"state", bytes(range(256)) * 9])
def test_every_protocol_says_the_same(protocol: int, state: bytes) -> None:
    original = small_state(state=state)
    data = pickle.dumps(original, protocol)
    expected = (original.input_ids.tolist(), state, 3)
    assert fields(data) == expected
    assert fields(pickletools.optimize(data)) == expected
    # As numpy 1 and 2 call their modules.
    for module in (b"numpy.core.", b"numpy._core."):
        if protocol < 4:
            assert fields(data.replace(b"numpy._core.", module)) == expected


def test_modules_of_numpy_1_are_known() -> None:
    data = pickle.dumps(small_state(), 4, fix_imports=False).replace(
        b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray"
    )
    # Frames say how long they are, and one got shorter; nobody needs them.
    assert fields(data)[2] == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("key", [(), (1,), (1, 2), (1, 2, 3), tuple(range(2000)), (0, -1, 1 << 31, 1 << 40)])
def test_keys(protocol: int, key: tuple[int, ...]) -> None:
    assert unpickled_numbers(pickletools.optimize(pickle.dumps(key, protocol))).tolist() == list(key)


@pytest.mark.parametrize("key", [[1], 1, ("a",), (1.5,), (True,), (1 << 70,), ((1,),), None, b"bytes"])
def test_what_is_no_key(key: object) -> None:
    with pytest.raises(UnknownLayout):
        unpickled_numbers(pickle.dumps(key))


def test_numbers_of_numpy_are_numbers() -> None:
    state = small_state()
    state.n_tokens = np.int64(3)
    found = read(pickle.dumps(state)).fields["n_tokens"]
    assert found.numbers("n_tokens").tolist() == [3]


# -- hostile ones ------------------------------------------------------------------------------------------------------


def global_(name: str, module: str = "os") -> bytes:
    return f"c{module}\n{name}\n".encode()


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def hostile(command: str) -> dict[str, bytes]:
    """Pickles that run a command when they are loaded."""
    text = short(command)
    code = short(f"__import__('os').system({command!r})")
    stand_in = global_("LlamaState", "llama_cpp.llama") + b")\x81"
    return {
        "reduce": global_("system") + text + b"\x85R.",
        "reduce by stack_global": short("os") + short("system") + b"\x93" + text + b"\x85R.",
        "posix": global_("system", "posix") + text + b"\x85R.",
        "eval": global_("eval", "builtins") + code + b"\x85R.",
        "exec of python 2": global_("eval", "__builtin__") + code + b"\x85R.",
        "getattr chain": global_("getattr", "builtins") + global_("ndarray", "numpy") + short("__class__") + b"\x86R.",
        "dotted name": short("numpy") + short("ndarray.__class__.__base__") + b"\x93.",
        "dotted name of a state": short("llama_cpp.llama") + short("os.system") + b"\x93" + text + b"\x85R.",
        "dotted name without stack": global_("os.system", "llama_cpp.llama") + text + b"\x85R.",
        "inst": b"(" + text + b"ios\nsystem\n.",
        "obj": b"(" + global_("system") + text + b"o.",
        "newobj": global_("Popen", "subprocess") + text + b"\x85\x81.",
        "newobj_ex": global_("Popen", "subprocess") + text + b"\x85}\x92.",
        "newobj of what is allowed": global_("ndarray", "numpy") + b"(K\x03t\x85\x81.",
        "ext1": b"\x82\x01.",
        "ext2": b"\x83\x01\x00.",
        "ext4": b"\x84\x01\x00\x00\x00.",
        "persistent id": b"Pname\n.",
        "binary persistent id": text + b"Q.",
        "out of band": b"\x97.",
        "build of a function": stand_in + b"}" + short("__setstate__") + global_("system") + b"sb.",
        "build with slots": stand_in + b"}}" + short("__class__") + global_("system") + b"s\x86b.",
        "build of a name": global_("LlamaState", "llama_cpp.llama") + b"}" + short("x") + b"K\x01sb.",
        "object array": pickle.dumps(np.array([os.system, print], dtype=object)),
        "structured array": pickle.dumps(np.zeros(2, dtype=[("a", "i4"), ("b", "O")])),
        "reduce of a state": global_("LlamaState", "llama_cpp.llama") + text + b"\x85R.",
        "reduce of a text": text + text + b"\x85R.",
        "reduce without a tuple": global_("encode", "_codecs") + text + b"R.",
        "another codec": global_("encode", "_codecs") + text + short("unicode_escape") + b"\x86R.",
        "reconstruct another class": global_("_reconstruct", "numpy._core.multiarray") + global_("dtype", "numpy") + b")\x86R.",
        "dict of a key that isn't hashable": b"}}K\x01s.",
        "put into a tuple": b")K\x01K\x02s.",
        "call by dispatch": global_("_reconstructor", "copyreg") + global_("system") + text + b"N\x87R.",
    }


NAMES = sorted(hostile("true"))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_run(name: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    data = hostile(f"touch {proof}")[name]
    with pytest.raises(UnknownLayout):
        read(data)
    # As the value of an attribute, too.
    state = global_("LlamaState", "llama_cpp.llama") + b")\x81}" + short("seed") + data[:-1] + b"sb."
    with pytest.raises(UnknownLayout):
        read(state)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["reduce", "eval", "inst", "posix"])
def test_these_would_run_something(name: str, tmp_path: Path) -> None:
    """The proof of the proof: the library's own reader runs them."""
    proof = tmp_path / "proof"
    pickle.loads(hostile(f"touch {proof}")[name])  # noqa: S301
    assert proof.exists()


@pytest.mark.parametrize("name", ["reduce", "reduce by stack_global", "inst", "obj"])
def test_what_it_asks_for_is_named(name: str) -> None:
    with pytest.raises(UnknownLayout, match=r"asks for os\.system"):
        read(hostile("true")[name])


# -- bombs -------------------------------------------------------------------------------------------------------------

LENGTHS = [1 << 63, (1 << 64) - 1, 1 << 40, 100]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("code", [b"\x8d", b"\x8e", b"\x96"])
def test_announced_lengths_are_not_believed(code: bytes, length: int) -> None:
    with pytest.raises(TruncatedState):
        read(code + struct.pack("<Q", length) + b"abc.")


@pytest.mark.parametrize("code", [b"X", b"B"])
def test_announced_lengths_of_32_bits_neither(code: bytes) -> None:
    with pytest.raises(TruncatedState):
        read(code + struct.pack("<I", (1 << 32) - 1) + b"abc.")


BOMBS = {
    "a memo of four billion": b"Nr\xff\xff\xff\xff.",
    "a memo of any size": b"Np99999999999999999999999999\n.",
    "deep tuples": b"N" + b"\x85" * 100_000 + b".",
    "deep tuples as a key": b"}N" + b"\x85" * 100_000 + b"K\x01s.",
    "deep dictionaries": b"}" * 2 + (short("a") + b"}") * 1000 + b"s" * 1000 + b".",
    "many marks": b"(" * 100_000 + b"t" * 100_000 + b".",
    "a very long number": b"I" + b"9" * 200 + b"\n.",
    "a still longer number": b"I" + b"9" * 100_000 + b"\n.",
    "a long long": b"\x8b" + struct.pack("<i", 1 << 30) + b"1.",
    "itself": b"}\x94" + short("a") + b"h\x00s.",
    "doubling": b")" + b"\x940" * 3 + b".",
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bombs_stay_small(name: str) -> None:
    """Some are pickles of harmless things; then no more comes of them than a small value."""
    try:
        found = read(BOMBS[name])
    except KvkeepError:
        return
    with pytest.raises(UnknownLayout):
        unpickled_numbers(BOMBS[name])
    assert found is None or isinstance(found, (tuple, dict, int))


@pytest.mark.parametrize("number", [-1, (1 << 61) - 1, 1 << 31])
def test_no_number_is_remembered_that_no_pickler_writes(number: int) -> None:
    """All multiples of 2^61 - 1 hash to the same: some thousands of them keep a dictionary busy for minutes."""
    with pytest.raises(UnknownLayout, match="no pickler does"):
        read(b"Np%d\n." % number)


def test_more_instructions_than_any_state_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.cache.foreign import instructions

    monkeypatch.setattr(instructions, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(UnknownLayout, match="more than 1000 instructions"):
        read(b"(" + b"}" * 5000 + b"t.")


@pytest.mark.parametrize("shape", [1 << 40, -1, (1 << 40,), (4, 2), "text", None])
def test_shapes_are_compared_with_the_bytes(shape: object) -> None:
    array = Array(dtype=None, shape=shape if isinstance(shape, tuple) else (shape,), payload=None)
    data = read(pickle.dumps(small_state()))
    ids = data.fields["input_ids"]
    array.dtype, array.payload = ids.dtype, ids.payload
    with pytest.raises(UnknownLayout):
        array.numbers("input_ids")


@pytest.mark.parametrize("dtype", ["f4", "U3", ">i4", "i2", "b1"])
def test_other_types_of_numbers_are_refused(dtype: str) -> None:
    state = small_state()
    state.input_ids = np.zeros(8, dtype)
    with pytest.raises(UnknownLayout, match="input_ids"):
        read(pickle.dumps(state)).fields["input_ids"].numbers("input_ids")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_length_but_the_whole_is_an_error(protocol: int) -> None:
    data = pickle.dumps(small_state(), protocol)
    for length in range(len(data)):
        with pytest.raises((TruncatedState, UnknownLayout)):
            read(data[:length])


@settings(max_examples=300, deadline=None)
@given(
    protocol=st.sampled_from(list(PROTOCOLS)),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_a_changed_pickle_is_read_or_refused(protocol: int, changes: list[tuple[float, int]]) -> None:
    data = bytearray(pickle.dumps(small_state(), protocol))
    for where, value in changes:
        data[int(where * len(data))] = value
    with suppress(KvkeepError):
        found = read(bytes(data))
        ids = found.fields.get("input_ids") if isinstance(found, LlamaState) else None
        if isinstance(ids, Array):
            ids.numbers("input_ids")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(KvkeepError):
        read(data)
