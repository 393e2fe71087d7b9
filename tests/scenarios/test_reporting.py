"""What people can see of each request, and of all together: no speed-up that isn't one, and no miss without a reason."""

import json
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import llamas
import pytest
import sparse
from hits import ask, assert_as_cold, attached, complete
from llamas import first_logits, load, random_tokens
from restart import run_child

from kvkeep.cache import PersistentLlamaCache, Reason, Report, Source, attach
from kvkeep.store.errors import UsageError

PROMPT = random_tokens(300)
OTHER = random_tokens(300, seed=1)


def stats_of(root: Path, *arguments: str) -> str:
    """What `kvkeep stats` prints, in a process of its own."""
    found = run_child(["-m", "kvkeep.tools", "stats", "--path", str(root), *arguments])
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_g9_each_request_says_what_was_reused_and_from_where(each_kind: str, root: Path) -> None:
    """A restore reported success and every token was decoded all the same (llama.cpp #25913); callers want the number of cached
    tokens (strands PR #4127). What is reported here is what llama.cpp was spared."""
    with attached(each_kind, root) as (llm, keep):
        assert keep.report() is None
        cold = ask(llm, keep, PROMPT)
        assert (cold.report.source, cold.report.reason, cold.report.reused_tokens) == (Source.NONE, Reason.EMPTY, 0)
        live = ask(llm, keep, [*PROMPT, 5, 6])
        assert (live.report.source, live.report.read_bytes) == (Source.LIVE, 0)
    with attached(each_kind, root) as (llm, keep):
        warm = ask(llm, keep, PROMPT)
        assert (warm.report.source, warm.report.reason, warm.report.reused_tokens) == (Source.DISK, Reason.FOUND, 299)
        assert 0 < warm.report.restore_seconds <= warm.report.settle_seconds
        with closing(sqlite3.connect(root / "index.sqlite3")) as connection:
            tables = ("node", "window", "checkpoint")
            sums = (connection.execute(f"SELECT coalesce(sum(stored_bytes), 0) FROM {table}").fetchone()[0] for table in tables)
            assert 0 < warm.report.read_bytes <= sum(sums)
    for asked in (cold, live, warm):
        report = asked.report
        assert report.prompt_tokens == len(asked.prompt) == report.reused_tokens + report.decoded_tokens
        assert asked.decoded == report.decoded_tokens
        assert report.decode_seconds > 0
        told = json.loads(json.dumps(report.as_dict()))
        assert (told["reused_tokens"], told["source"], told["reason"]) == (
            report.reused_tokens,
            report.source.value,
            report.reason.value,
        )
        assert str(report).startswith(str(report.match))
    assert f"{warm.report.read_bytes:,} bytes read" in str(warm.report)


def test_g9_a_warm_disk_does_not_pass_for_a_hit(dense: str, root: Path) -> None:
    """A speed-up of 12 was the page cache's and not the prefix cache's (omlx #1803): with everything warm, a prompt that
    begins otherwise is a miss in full."""
    with attached(dense, root) as (llm, keep):
        ask(llm, keep, PROMPT)
    with attached(dense, root) as (llm, keep):
        assert ask(llm, keep, PROMPT).report.source is Source.DISK
        control = ask(llm, keep, [7, *PROMPT[1:]])
        assert (control.decoded, control.report.source) == (300, Source.NONE)
        assert control.report.reason is Reason.NO_COMMON_PREFIX
        assert control.report.parting is not None
        assert (control.report.parting.index, control.report.parting.is_inserted) == (0, True)


def test_g9_a_miss_says_why(dense: str, other_dense: str, hybrid: str, root: Path) -> None:
    """Each reason for which nothing is reused, with what people can do about it."""
    with attached(dense, root) as (llm, keep):
        assert ask(llm, keep, PROMPT).report.reason is Reason.EMPTY
    with attached(other_dense, root) as (llm, keep):
        now = ask(llm, keep, PROMPT)
        assert (now.report.reason, now.report.parting) == (Reason.OTHER_NAMESPACE, None)
    with attached(hybrid, root) as (llm, keep):
        ask(llm, keep, PROMPT)
    with attached(hybrid, root) as (llm, keep):
        now = ask(llm, keep, [*PROMPT[:100], 9, 8])
        assert now.report.reason is Reason.NO_CHECKPOINT
        assert "100 tokens are stored" in str(now.report)
        assert now.report.parting is not None
        assert (now.report.parting.index, now.report.parting.source) == (100, Source.DISK)
    with attached(dense, root, logits_all=True) as (llm, keep):
        assert ask(llm, keep, PROMPT).report.reason is Reason.LOGITS_ALL
    llm = load(dense)
    with attach(llm, root) as keep:
        keep._session.rates.prefill_rate, keep._session.rates.restore_rate = 1e9, 1e6
        now = ask(llm, keep, PROMPT)
        assert now.report.reason is Reason.BELOW_BREAK_EVEN
        assert "decoding 299 tokens takes about" in str(now.report)
        list(zip(llm.generate([3, 4], temp=0.0, reset=False), range(1), strict=False))
        report = keep.report()
        assert report is not None
        assert report.reason is Reason.NO_RESET


def test_g9_damage_is_a_reason_too(dense: str, tmp_path: Path) -> None:
    root = tmp_path / "damaged"
    with attached(dense, root) as (llm, keep):
        ask(llm, keep, PROMPT)
    damage_blobs(root)
    with attached(dense, root) as (llm, keep):
        now = ask(llm, keep, PROMPT)
        assert (now.report.reason, now.decoded) == (Reason.DAMAGED, 300)
        assert now.report.match.detail


def damage_blobs(root: Path) -> None:
    """Flip a byte of every page that looks like noise: those are values, and not LMDB's own."""
    [file] = root.glob("blobs-*/data.mdb")
    with file.open("r+b") as data:
        for start, end in list(sparse.ranges(data.fileno())):
            for at in range(start + 1024, end, 4096):
                data.seek(at)
                bytes_there = data.read(2048)
                if len(set(bytes_there)) > 200:
                    data.seek(at)
                    data.write(bytes([bytes_there[0] ^ 0xFF]))


def test_g9_a_folder_that_cannot_be_used_is_the_reason(dense: str, tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("no folder")
    with attached(dense, file) as (llm, keep):
        now = ask(llm, keep, PROMPT)
        assert now.report.reason is Reason.UNAVAILABLE
        assert "is a file; a folder is needed" in str(now.report)


def test_g9_the_first_token_that_differs_is_shown_with_its_text(each_kind: str, root: Path) -> None:
    """By its position and its text, and by what was there before: in the context, and after a restart in the store."""
    old = "the weather in lisbon is " + "fine and warm and dry " * 12
    new = old.replace("warm", "cold", 1)
    with attached(each_kind, root) as (llm, keep):
        complete(llm, keep, old)
        live = complete(llm, keep, new)
        at = next(i for i, (a, b) in enumerate(zip(llm.tokenize(old.encode()), live.prompt, strict=False)) if a != b)
    asked = [live]
    if "recurrent" not in each_kind:
        # Of recurrent states the store knows the tokens at their ends only.
        with attached(each_kind, root) as (llm, keep):
            keep.clear()
            complete(llm, keep, old)
        with attached(each_kind, root) as (llm, keep):
            asked.append(complete(llm, keep, new))
    for one, source in zip(asked, (Source.LIVE, Source.DISK), strict=False):
        parting = one.report.parting
        assert parting is not None, str(one.report)
        assert (parting.index, parting.source) == (at, source)
        assert parting.text == llm.detokenize([one.prompt[at]]).decode()
        assert parting.behind.startswith(parting.text)
        assert parting.known_behind.startswith(parting.known_text) != parting.behind.startswith(parting.known_text)
        assert f"token {at} is {parting.text!r} where" in str(one.report)
        assert json.dumps(one.report.as_dict()["parting"])
    assert_continued_is_no_difference(each_kind, root, old)


def assert_continued_is_no_difference(model: str, root: Path, text: str) -> None:
    with attached(model, root) as (llm, keep):
        complete(llm, keep, text)
        keep.flush()
        tokens = llm.input_ids[: llm.n_tokens].tolist()
        assert ask(llm, keep, [*tokens, 7, 8]).report.parting is None
        keep.clear()
        assert ask(llm, keep, tokens).report.parting is None


def test_g9_a_text_that_no_token_stands_for_is_shown_all_the_same(dense: str, root: Path) -> None:
    """Half a letter, numbers that are no tokens: something is shown, and nothing raised."""
    with attached(dense, root) as (llm, keep):
        complete(llm, keep, "größe " * 20)
        now = complete(llm, keep, "gräße " * 20)
        assert now.report.parting is not None
        assert now.report.parting.text == "\ufffd"
        # A character of two bytes of which the first is the same.
        assert now.report.parting.before.endswith("gr\ufffd")


def test_g9_the_other_way_in_reports_too(dense: str, root: Path) -> None:
    for source in (Source.NONE, Source.DISK):
        llm = load(dense)
        llm.set_cache(PersistentLlamaCache.for_model(llm, root, break_even=False))
        llm.create_completion("what is a lighthouse " * 6, max_tokens=2, temperature=0.0)
        report = llm.cache.report()
        assert isinstance(report, Report)
        assert report.source is source
        assert (report.read_bytes > 0) == (source is Source.DISK)
        assert report.decode_seconds > 0
        llm.cache.close()
        assert llm.cache is None
    del llm


def test_g9_a_handler_s_own_decoding_and_its_completion_are_one_request(dense: str, root: Path) -> None:
    """Handlers decode a prompt, and ask for a completion of it then."""
    prompt = random_tokens(300)
    filling = load(dense)
    with attach(filling, root, break_even=False):
        first_logits(filling, prompt)
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        llm.reset()
        llm.eval([*prompt, 7, 8])
        stream = llm.generate([*prompt, 7, 8], temp=0.0)
        next(stream)
        stream.close()
        stats = keep.stats()
    assert (stats.requests, stats.hits, stats.restored_tokens) == (1, 1, 300)


def test_g9_a_report_never_waits_for_a_prompt(dense: str, root: Path) -> None:
    """Not in another thread, nor in a child that was forked in the middle of one."""
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, random_tokens(100))
        with keep._session._lock:
            told: list[Report | None] = []
            asking = threading.Thread(target=lambda: told.append(keep.report()))
            asking.start()
            asking.join(60)
            assert told
            assert told[0] is not None
            child = os.fork()
            if child == 0:
                try:
                    keep.pin(random_tokens(5))
                except UsageError:
                    os._exit(0 if keep.report() is not None else 2)
                finally:
                    os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("value", [-5, (1 << 63) - 1])
def test_g9_totals_that_cannot_be_are_left_out(dense: str, root: Path, value: int) -> None:
    """A flipped bit in a count is no reason to tell nothing."""
    with attached(dense, root) as (llm, keep):
        ask(llm, keep, random_tokens(100))
    with closing(sqlite3.connect(root / "index.sqlite3")) as index:
        index.execute("UPDATE setting SET value = ? WHERE name IN ('total.since', 'total.requests')", [value])
        index.commit()
    use = json.loads(stats_of(root, "--json"))["use"]
    assert (use["since"], use["requests"]) == (None, 0)
    assert use["saves"] == 1


def test_g9_a_report_on_a_damaged_row_is_one_without_a_parting(dense: str, tmp_path: Path) -> None:
    """Rows are damaged, not requests."""
    root = tmp_path / "damaged"
    prompt = random_tokens(300)
    with attached(dense, root) as (llm, keep):
        ask(llm, keep, prompt)
    with closing(sqlite3.connect(root / "index.sqlite3")) as index:
        index.execute("UPDATE node SET path = substr(path, 1, 7)")
        index.commit()
    with attached(dense, root) as (llm, keep):
        asked = ask(llm, keep, [*prompt[:250], 7, 8, 9])
        assert asked.decoded == 253
        assert_as_cold(asked, dense)


def test_g9_a_report_can_still_be_asked_for_when_the_model_is_gone(dense: str, root: Path) -> None:
    for how in ("closed model", "no model", "closed cache", "detached"):
        llm = load(dense)
        keep = attach(llm, root, break_even=False)
        ask(llm, keep, PROMPT)
        now = ask(llm, keep, [*PROMPT[:100], 9])
        keep._session._requests._now.is_compared = False
        if how == "closed model":
            llm.close()
        elif how == "no model":
            del llm
        elif how == "closed cache":
            keep.close()
        else:
            keep.detach()
        report = keep.report()
        assert report is not None
        assert report.match == now.report.match
        assert str(report).startswith("100 of 101 tokens from live")
        keep.close()


def test_g9_stats_add_up_over_processes(dense: str, hybrid: str, root: Path) -> None:
    """The folder's totals: requests, tokens by where they came from, time, bytes, of all programs that ever used it."""
    expected: dict[str, Any] = dict.fromkeys(("requests", "hits", "prompt_tokens", "restored_tokens", "decoded_tokens"), 0)
    expected |= dict.fromkeys(("live_tokens", "saves", "written_bytes", "one_shot", "dropped", "errors"), 0)
    saved = restored = 0.0
    for model in (dense, hybrid, dense, hybrid):
        with attached(model, root) as (llm, keep):
            keep._session.rates.prefill_rate = 1000.0
            ask(llm, keep, PROMPT)
            ask(llm, keep, [*PROMPT, 5, 6])
            keep.flush()
            stats = keep.stats()
            for name in expected:
                expected[name] += sum(stats.errors.values()) if name == "errors" else getattr(stats, name)
            saved += stats.saved_seconds
            restored += stats.restore_seconds
    use = json.loads(stats_of(root, "--json"))["use"]
    assert {name: use[name] for name in expected} == expected
    assert use["prompt_tokens"] == use["restored_tokens"] + use["live_tokens"] + use["decoded_tokens"]
    assert (use["requests"], use["hits"], use["restored_tokens"]) == (8, 4, 2 * (299 + 301))
    assert use["saved_ms"] == pytest.approx(saved * 1e3, abs=4)
    assert use["restore_ms"] == pytest.approx(restored * 1e3, abs=4)
    assert use["since"].endswith("+00:00")
    told = stats_of(root)
    assert "in 8 requests of 2,408 tokens" in told
    assert "Reused:  1,200 tokens from disk in " in told
    assert f"in {expected['saves']} saves" in told
    assert "Saved:   about " in told


def test_g9_looking_at_a_folder_counts_nothing(dense: str, root: Path) -> None:
    with attached(dense, root) as (llm, keep):
        ask(llm, keep, PROMPT)
    before = json.loads(stats_of(root, "--json"))["use"]
    for _ in range(2):
        attach(load(dense), root).close()
    assert json.loads(stats_of(root, "--json"))["use"] == before


def test_g9_saved_seconds_are_plausible_right_after_a_start(dense: str, root: Path) -> None:
    """The first decode of a process waits for the weights and takes many times as long as any other. What was estimated by its
    speed doesn't stay, and isn't what the next process begins with."""
    with attached(dense, root) as (llm, keep):
        rates = keep._session.rates
        rates.prefill_rate = None
        ask(llm, keep, PROMPT)
        ask(llm, keep, OTHER)
        keep.flush()
        rates.prefill_rate = 0.001
        rates._is_provisional = True
        ask(llm, keep, PROMPT)
        assert keep.report().source is Source.DISK  # type: ignore[union-attr]
        assert keep.stats().saved_seconds > 1000
        ask(llm, keep, random_tokens(200, seed=7))
        llm.reset()
        assert keep.stats().saved_seconds < 300
    with attached(dense, root) as (llm, keep):
        known = keep._session.rates.prefill_rate
        assert known is not None
        assert known > 1
        ask(llm, keep, random_tokens(64, seed=8))
        rate = keep._session.rates.prefill_rate
        assert rate is not None
        assert rate >= 0.89 * known
        assert llamas.n_decoded(llm) == 64
