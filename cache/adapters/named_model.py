"""A model that somebody names as the one that states belong to, which were written without kvkeep."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.cache.adapters.context import Context, LiveContext
from kvkeep.cache.adapters.identity import identified
from kvkeep.cache.layout import Bytes, Layout
from kvkeep.cache.prefix_cache import Identity
from kvkeep.cache.state import SEQ_ID, Form, State, architecture, parse
from kvkeep.store.errors import LayoutError, StateRefused, UnknownLayout, UsageError
from kvkeep.store.repository import Repository

Tokens = npt.NDArray[np.int32]


class NamedModel:
    """Says whether bytes can be a state of a model: by their shape, and by having llama.cpp take them.

    That the weights are the same can't be seen in a state: for that the person's word is taken.

    Args:
        llm: the model, a `llama_cpp.Llama` with the settings of the program that is to find the states. Its context is
            empty afterwards.
        repository: where the digests of large files are remembered.
        identity: as in `attach`.

    Raises:
        NotIdentified, StoreError: it can't be said which model this is.
        UsageError: it remembers nothing, such as an embedding model.
    """

    def __init__(self, llm: Any, repository: Repository, identity: str = "") -> None:
        self._llm = llm
        self._live = LiveContext(llm)
        self._context = Context(lambda: llm._ctx.ctx)
        if not self._live.has_memory:
            raise UsageError("this model has no memory, so there are no states of it")
        self.identity: Identity = identified(llm, repository, self._live.memory, identity)
        self._arch = str(llm.metadata.get("general.architecture", ""))
        self._pattern = self._written()

    @property
    def n_ctx(self) -> int:
        """Tokens that the context has room for; a longer state can only be looked at, not tried."""
        return int(self._llm.n_ctx())

    def check(self, tokens: Tokens, data: Bytes, form: Form) -> None:
        """Look whether these bytes can be this model's state after these tokens.

        Args:
            tokens: what the state was decoded from.
            data: the state's bytes.
            form: which of llama.cpp's forms they have.

        Raises:
            LayoutError: they can't. The text says what is different.
            UsageError: a state that can be judged only by trying is longer than the context.
        """
        if len(tokens) == 0:
            raise UnknownLayout("a state of no tokens is of no use")
        if (tokens < 0).any() or (tokens >= self._llm.n_vocab()).any():
            raise UnknownLayout(f"it has tokens that this model doesn't know: its vocabulary has {self._llm.n_vocab()}")
        if form is Form.WHOLE and (found := architecture(data)) != self._arch:
            raise UnknownLayout(f"it is the state of a model of architecture {found!r}, this model is {self._arch!r}")
        if self._pattern is not None:
            self._compare(parse(data, form, self.identity.memory), self._pattern)
        elif len(tokens) > self.n_ctx:
            raise UsageError(f"it has {len(tokens)} tokens, the context {self.n_ctx}: give the model more, with n_ctx")
        if len(tokens) <= self.n_ctx:
            self._try(data, form, len(tokens))

    def _written(self) -> State | None:
        """A state that this model has just written, or None if its memory can't be parsed."""
        try:
            self._llm.reset()
            self._llm.eval([max(0, self._llm.token_bos())])
            return parse(self._context.copy(SEQ_ID), Form.SEQUENCE, self.identity.memory)
        except LayoutError:
            return None
        finally:
            self._clear()

    def _clear(self) -> None:
        self._llm.reset()
        self._live.clear(buffers=True)

    def _compare(self, found: State, pattern: State) -> None:
        """Raises UnknownLayout where the parts have other shapes."""
        ours, theirs = _layouts(pattern), _layouts(found)
        if ours != theirs:
            raise UnknownLayout(
                f"it is another model's, or was written with other settings: it has {_told(theirs)}; this model with these "
                f"settings has {_told(ours)}"
            )
        if pattern.recurrent is not None and found.recurrent is not None:
            sizes = pattern.recurrent.data.size, found.recurrent.data.size
            if sizes[0] != sizes[1]:
                raise UnknownLayout(f"its recurrent tensors have {sizes[1]} bytes, those of this model {sizes[0]}")

    def _try(self, data: Bytes, form: Form, length: int) -> None:
        try:
            if form is Form.SEQUENCE:
                self._live.load(data, length)
            else:
                self._context.put_whole(data)
                if self._live.pos_max() != length - 1:
                    raise StateRefused(f"it should end at position {length - 1} and ends at {self._live.pos_max()}")
        finally:
            self._clear()


def _layouts(state: State) -> list[Layout]:
    return [cells.layout for cells in (*state.caches, state.window) if cells is not None]


def _told(layouts: list[Layout]) -> str:
    order = {True: "transposed", False: "in rows"}
    return " and ".join(
        f"{layout.n_layer} layers of {layout.token_bytes} bytes a token with values {order[layout.v_trans]}"
        for layout in layouts
    )
