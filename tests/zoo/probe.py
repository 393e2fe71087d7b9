"""The two processes of one model: `python tests/zoo/probe.py {save,restart} MODEL FOLDER`, one line of JSON on stdout.

`save` fills a store through `attach`, and puts beside it what llama.cpp itself says the states were. `restart` looks what
of that a new process gets back. The folder is all that they share.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from controls import Control
from llamas import first_logits, forget, generate, load, random_tokens, sequence_state, whole_state

from kvkeep.cache import attach
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.state import Form, parse
from kvkeep.store.check import Finding, check
from kvkeep.store.registry import close_root, open_root

# Prompt ends in the first process. Two on the border of a block (64), two elsewhere, and one that follows a block closely.
POSITIONS = (40, 64, 96, 130, 160)
# Where a memory that can be cut is asked, too: the first token, around borders of blocks, in the middle of one.
BETWEEN = (1, 31, 33, 63, 65, 95, 100, 159)
# The prompt of an edited message leaves the stored one here, which is no checkpoint.
EDITED_AT = 120
# Not a multiple of anything, so that the batches of a restored context aren't those of the first process by chance.
N_OTHER = 5

OPTIONS = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 32}


class Said(logging.Handler):
    """Everything that kvkeep warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("kvkeep").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Batches:
    """How many tokens each `llama_decode` of a `Llama` had.

    Sums in a batch of 32 and in one of 5 may round differently, so a control must decode in the same ones.
    """

    def __init__(self, llm: Any) -> None:
        self.sizes: list[int] = []
        decode = llm._ctx.decode

        def noting(batch: Any) -> None:
            self.sizes.append(int(batch.batch.n_tokens))
            decode(batch)

        llm._ctx.decode = noting

    def taken(self) -> list[int]:
        """The sizes since the last call."""
        sizes, self.sizes = self.sizes, []
        return sizes


def tokens_of(llm: Any) -> tuple[list[int], list[int]]:
    """The long prompt, and the tokens that come after a part of it in the second process.

    The same in both processes. Neither begins as the other goes on anywhere, so that a match can't reach further by chance.
    """
    n_vocab = llm.n_vocab()
    tokens = random_tokens(max(POSITIONS), seed=1, n_vocab=n_vocab)
    other = [token for token in random_tokens(4 * N_OTHER, seed=2, n_vocab=n_vocab) if token not in tokens]
    unused = sorted(set(range(3, n_vocab)) - set(tokens))
    return tokens, (other + unused)[:N_OTHER]


def save(model: str, folder: Path) -> dict[str, Any]:
    """Fill the store and capture what llama.cpp says."""
    said = Said()
    llm = load(model, **OPTIONS)
    arch = llm.metadata.get("general.architecture", "")
    tokens, _ = tokens_of(llm)
    control = Control(llm, folder)
    if not control.has_memory:
        return {"arch": arch, "memory": "none", "said": [], "alone": alone(llm, tokens)}
    batches = Batches(llm)
    with attach(llm, folder / "store", break_even=False) as keep:
        memory = keep._session._live.context.memory
        for end in POSITIONS:
            first_logits(llm, tokens[:end])
            control.capture(end, sequence_state(llm), whole_state(llm), batches.taken())
            # Otherwise it depends on the disk's speed which of these states are stored by themselves.
            keep.flush()
        stats = keep.stats()
    return {
        "arch": arch,
        "memory": described(memory, sequence_state(llm)),
        "n_swa": 0 if memory.window is None else memory.window.size,
        "said": said.messages,
        "errors": dict(stats.errors),
    }


def alone(llm: Any, tokens: Sequence[int]) -> dict[str, Any]:
    """What a model without a memory generates."""
    try:
        found = first_logits(llm, tokens)
        return {"tokens": generate(llm, tokens, 3), "logits": [float(value) for value in found[:64]]}
    except Exception as error:  # noqa: BLE001 - with attach it must be the same error
        return {"error": f"{type(error).__name__}: {error}"}


def described(memory: Memory, state: npt.NDArray[np.uint8]) -> str:
    """The kind of a memory, in words."""
    if memory.kind is MemoryKind.UNKNOWN:
        return "own"
    window = "" if memory.window is None else " + window"
    if memory.kind is MemoryKind.HYBRID:
        return "hybrid" + window
    if memory.kind is MemoryKind.RECURRENT:
        return "recurrent"
    caches = len(parse(state, Form.SEQUENCE, memory).caches)
    return ("attention" if caches == 1 else "two caches") + window


def restart(model: str, folder: Path) -> dict[str, Any]:
    """Look what a new process gets back."""
    said = Said()
    llm = load(model, **OPTIONS)
    # Of its own context: what llama.cpp does by itself must not go through the store, nor through what it has decoded.
    control = Control(load(model, **OPTIONS), folder)
    tokens, other = tokens_of(llm)
    if not control.has_memory:
        with attach(llm, folder / "store", break_even=False) as keep:
            found = alone(llm, tokens)
            reused = keep.stats().restored_tokens + keep.stats().live_tokens
        return {"alone": found, "reused": reused, "said": said.messages}
    batches = Batches(llm)
    arch = llm.metadata.get("general.architecture", "")
    with attach(llm, folder / "store", break_even=False) as keep:
        # The model's hash decides whose states these are; a first prompt may be quicker than that.
        keep.flush()
        cache = keep._session.cache
        assert cache is not None, "the model wasn't identified"
        # Before anything is decoded, because that is stored too.
        same = [compared(cache, control, tokens[:end], form, arch) for end in POSITIONS for form in Form]
        cuttable = not keep._session._live.context.memory.needs_checkpoints
        prompts = [(tokens[:end] + other, end, "end") for end in POSITIONS]
        prompts.append((tokens, len(tokens) - 1, "again"))
        before = [end - 1 for end in POSITIONS]
        inside = sorted({*BETWEEN, *before}) if cuttable else before
        prompts += [(tokens[:end] + other, end, "between") for end in inside]
        largest = EDITED_AT if cuttable else max(end for end in POSITIONS if end <= EDITED_AT)
        prompts.append((tokens[:EDITED_AT] + other, largest, "edited"))
        asked = []
        for prompt, expected, why in prompts:
            # What the last prompt leaves in the store is there before the next one, in each run.
            keep.flush()
            forget(llm)
            batches.taken()
            logits = first_logits(llm, prompt)
            sizes = batches.taken()
            match = keep.last
            assert match is not None
            row = {"why": why, "expected": expected, "length": match.length, "source": match.source.value}
            row |= {"opaque": match.is_opaque, "reason": str(match)}
            if match.length:
                behind = prompt[match.length :]
                row["loaded"] = difference(logits, control.loaded(tokens, match.length, behind, sizes, cuttable))
                row["live"] = difference(logits, control.live(tokens, match.length, behind, sizes, cuttable))
                row["wrong"] = difference(control.wrong(tokens[::-1][: match.length], behind, sizes), logits)
            asked.append(row)
        keep.flush()
        stats = keep.stats()
    findings = [finding.message for finding in sound(folder / "store")]
    return {
        "findings": findings,
        "cuttable": cuttable,
        "same": same,
        "asked": asked,
        "said": said.messages,
        "errors": dict(stats.errors),
    }


def sound(root: Path) -> list[Finding]:
    """What is wrong with a store."""
    repository = open_root(root)
    try:
        return list(check(repository))
    finally:
        close_root(repository)


def compared(cache: Any, control: Control, tokens: Sequence[int], form: Form, arch: str) -> dict[str, Any]:
    """Whether an assembled state is byte for byte the one that llama.cpp wrote there."""
    match = cache.match(tokens, form=form)
    row: dict[str, Any] = {"end": len(tokens), "form": form.value, "length": match.length, "opaque": match.is_opaque}
    if match.length == len(tokens) and not (match.is_opaque and form is Form.WHOLE):
        # A state that isn't parsed exists in the form that it was saved in, and in no other.
        state = cache.restore(match, tokens, form=form, arch=arch).state
        captured = control.captured(len(tokens), form)
        row |= {"bytes": int(state.size), "captured": int(captured.size), "equal": bool(np.array_equal(state, captured))}
        if not row["equal"] and state.size == captured.size:
            row["first"] = int(np.flatnonzero(state != captured)[0])
    return row


def difference(found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> float:
    """The largest error, as a share of the largest logit. 0.0 is bit for bit equal, and nothing else is."""
    if np.array_equal(found, wanted):
        return 0.0
    error = float(np.abs(found - wanted).max()) / (float(np.abs(wanted).max()) or 1.0)
    return error or float(np.finfo(np.float32).tiny)


if __name__ == "__main__":
    job = {"save": save, "restart": restart}[sys.argv[1]]
    print(json.dumps(job(sys.argv[2], Path(sys.argv[3]))))
