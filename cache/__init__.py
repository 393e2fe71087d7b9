"""Tokens and llama.cpp states: what may be reused, where it is cut, and how it is put together again.

    from kvkeep.cache import attach

    llm = Llama(model_path, n_ctx=8192)
    keep = attach(llm)

or, in place of llama-cpp-python's own caches, with nothing but the import changed:

    from kvkeep.cache import LlamaDiskCache, LlamaRAMCache

The names below are loaded on first use, so that tools that only read a store never import llama_cpp.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.cache.adapters.attach import Attached, attach
    from kvkeep.cache.adapters.base_cache import BaseLlamaCache
    from kvkeep.cache.adapters.checkpoint_cache import HybridCheckpoint, HybridCheckpointCache
    from kvkeep.cache.adapters.disk_cache import LlamaDiskCache
    from kvkeep.cache.adapters.llama_cache import PersistentLlamaCache
    from kvkeep.cache.adapters.memory_caches import LlamaCache, LlamaRAMCache, LlamaTrieCache
    from kvkeep.cache.match import Match, Reason, Source
    from kvkeep.cache.report import Parting, Report, Stats

__all__ = [
    "Attached",
    "BaseLlamaCache",
    "HybridCheckpoint",
    "HybridCheckpointCache",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaRAMCache",
    "LlamaTrieCache",
    "Match",
    "Parting",
    "PersistentLlamaCache",
    "Reason",
    "Report",
    "Source",
    "Stats",
    "attach",
]

_HOMES = {
    "Attached": "kvkeep.cache.adapters.attach",
    "attach": "kvkeep.cache.adapters.attach",
    "BaseLlamaCache": "kvkeep.cache.adapters.base_cache",
    "HybridCheckpoint": "kvkeep.cache.adapters.checkpoint_cache",
    "HybridCheckpointCache": "kvkeep.cache.adapters.checkpoint_cache",
    "LlamaCache": "kvkeep.cache.adapters.memory_caches",
    "LlamaDiskCache": "kvkeep.cache.adapters.disk_cache",
    "LlamaRAMCache": "kvkeep.cache.adapters.memory_caches",
    "LlamaTrieCache": "kvkeep.cache.adapters.memory_caches",
    "PersistentLlamaCache": "kvkeep.cache.adapters.llama_cache",
    "Match": "kvkeep.cache.match",
    "Reason": "kvkeep.cache.match",
    "Source": "kvkeep.cache.match",
    "Parting": "kvkeep.cache.report",
    "Report": "kvkeep.cache.report",
    "Stats": "kvkeep.cache.report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
