"""Put methods in front of those of one object, a `Llama` or its context, and take them away again."""

import weakref
from collections.abc import Callable
from typing import Any

from kvkeep.store.errors import UsageError

_MARK = "_kvkeep"


class Wrapping:
    """Instance attributes that shadow methods of one object.

    The originals are looked up on the class when they are called, so nothing here keeps the object alive: an object
    that holds a model's gigabytes must go when its last user lets it go, not when the garbage collector finds a cycle.

    Args:
        llm: the object.
        methods: name and replacement; a replacement is called with the object first.

    Raises:
        UsageError: the object is wrapped already.
    """

    def __init__(self, llm: Any, methods: dict[str, Callable[..., Any]]) -> None:
        if getattr(llm, _MARK, None) is not None:
            raise UsageError("this Llama already has a kvkeep cache attached: close() or detach() that one first")
        self._llm = weakref.ref(llm)
        self._before = {name: llm.__dict__[name] for name in methods if name in llm.__dict__}
        self._ours: dict[str, Any] = {}
        self._active = True
        setattr(llm, _MARK, True)
        for name, method in methods.items():
            self._ours[name] = _bound_weakly(self._llm, method)
            setattr(llm, name, self._ours[name])

    def original(self, llm: Any, name: str) -> Callable[..., Any]:
        """The method as it was before."""
        if name in self._before:
            found: Callable[..., Any] = self._before[name]
            return found
        bound: Callable[..., Any] = getattr(type(llm), name).__get__(llm)
        return bound

    @property
    def active(self) -> bool:
        """Whether the methods are still in front."""
        return self._active

    def undo(self) -> None:
        """Take the methods away. What somebody else put in front of ours since then is left in place."""
        llm = self._llm()
        active, self._active = self._active, False
        if llm is None or not active:
            return
        for name, ours in self._ours.items():
            if llm.__dict__.get(name) is not ours:
                continue
            if name in self._before:
                setattr(llm, name, self._before[name])
            else:
                delattr(llm, name)
        setattr(llm, _MARK, None)


def _bound_weakly(ref: "weakref.ref[Any]", method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(ref(), *args, **kwargs)

    return call
