"""What llama.cpp gives without kvkeep: its own states of the first process, and contexts that decoded everything."""

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llamas import forget, logits

from kvkeep.cache.state import Form

_BYTES = ctypes.POINTER(ctypes.c_uint8)

Bytes = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]


class Control:
    """One context that kvkeep doesn't see, and the states that the first process captured.

    Args:
        llm: the context's `Llama`; in the first process only its states are captured.
        folder: where they are.
    """

    def __init__(self, llm: Any, folder: Path) -> None:
        self._llm = llm
        self._folder = folder

    @property
    def has_memory(self) -> bool:
        """False for embedding and diffusion models."""
        return llama_cpp.llama_get_memory(self._llm.ctx) is not None

    def capture(self, end: int, sequence: Bytes, whole: Bytes, batches: Sequence[int]) -> None:
        """Keep a state of `end` tokens, and in which batches the tokens since the last one were decoded."""
        self._path(end, Form.SEQUENCE).write_bytes(sequence.tobytes())
        self._path(end, Form.WHOLE).write_bytes(whole.tobytes())
        (self._folder / f"{end}.json").write_text(json.dumps(list(batches)))

    def captured(self, end: int, form: Form) -> Bytes:
        """A state of the first process."""
        return np.fromfile(self._path(end, form), np.uint8)

    def _path(self, end: int, form: Form) -> Path:
        return self._folder / f"{end}.{form.value}"

    @property
    def _ends(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.whole"))

    def loaded(self, tokens: Sequence[int], length: int, behind: Sequence[int], sizes: Sequence[int], cuttable: bool) -> Logits:
        """Logits behind a captured state that is loaded through llama.cpp itself.

        Where none was captured it comes from the next one above and is cut back; a memory that can't be cut goes on from the
        next one below.
        """
        if length in self._ends:
            self._load(length)
        elif cuttable:
            self._load(min(end for end in self._ends if end > length))
            self._cut(length)
        else:
            below = max((end for end in self._ends if end < length), default=0)
            forget(self._llm)
            if below:
                self._load(below)
            self._llm.eval(tokens[below:length])
        return self._decoded(behind, sizes)

    def live(self, tokens: Sequence[int], length: int, behind: Sequence[int], sizes: Sequence[int], cuttable: bool) -> Logits:
        """Logits of a context that was never saved: everything is decoded, in the batches of the first process.

        A memory that can be cut decodes the last of these batches to its end and is cut back, as the stored one was.
        """
        forget(self._llm)
        batches = [size for end in self._ends for size in json.loads((self._folder / f"{end}.json").read_text())]
        for size in batches:
            at = self._llm.n_tokens
            if at >= length:
                break
            self._llm.eval(tokens[at : at + size if cuttable else min(at + size, length)])
        assert self._llm.n_tokens >= length, f"the first process decoded {self._llm.n_tokens} tokens, not {length}"
        if self._llm.n_tokens > length:
            self._cut(length)
        return self._decoded(behind, sizes)

    def wrong(self, tokens: Sequence[int], behind: Sequence[int], sizes: Sequence[int]) -> Logits:
        """Logits behind other tokens, as many as `tokens`: what a state of the right length and wrong contents would give."""
        forget(self._llm)
        self._llm.eval(tokens)
        return self._decoded(behind, sizes)

    def _cut(self, length: int) -> None:
        memory = llama_cpp.llama_get_memory(self._llm.ctx)
        assert llama_cpp.llama_memory_seq_rm(memory, 0, length, -1), f"llama.cpp doesn't cut to {length}"
        self._llm.n_tokens = length

    def _load(self, end: int) -> None:
        forget(self._llm)
        state = self.captured(end, Form.WHOLE)
        taken = llama_cpp.llama_state_set_data(self._llm.ctx, state.ctypes.data_as(_BYTES), state.size)
        assert taken == state.size, f"llama.cpp took {taken} of {state.size} bytes of its own state"
        self._llm.n_tokens = end

    def _decoded(self, behind: Sequence[int], sizes: Sequence[int]) -> Logits:
        assert sum(sizes) == len(behind), f"batches of {sizes} for {len(behind)} tokens"
        at = 0
        for size in sizes:
            self._llm.eval(behind[at : at + size])
            at += size
        return logits(self._llm)
