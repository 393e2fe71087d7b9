"""Tokens and llama.cpp states: what may be reused, where it is cut, and how it is put together again.

    from kvkeep.cache import attach

    llm = Llama(model_path, n_ctx=8192)
    keep = attach(llm)

The names below are loaded on first use, so that tools that only read a store never import llama_cpp.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.cache.adapters.attach import Attached, attach
    from kvkeep.cache.adapters.checkpoint_cache import HybridCheckpoint, HybridCheckpointCache
    from kvkeep.cache.adapters.llama_cache import PersistentLlamaCache
    from kvkeep.cache.match import Match, Reason, Source

__all__ = [
    "Attached",
    "HybridCheckpoint",
    "HybridCheckpointCache",
    "Match",
    "PersistentLlamaCache",
    "Reason",
    "Source",
    "attach",
]

_HOMES = {
    "Attached": "kvkeep.cache.adapters.attach",
    "attach": "kvkeep.cache.adapters.attach",
    "HybridCheckpoint": "kvkeep.cache.adapters.checkpoint_cache",
    "HybridCheckpointCache": "kvkeep.cache.adapters.checkpoint_cache",
    "PersistentLlamaCache": "kvkeep.cache.adapters.llama_cache",
    "Match": "kvkeep.cache.match",
    "Reason": "kvkeep.cache.match",
    "Source": "kvkeep.cache.match",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
