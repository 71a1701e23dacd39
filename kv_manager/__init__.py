"""Paged KV: who holds which page, which pages may be shared, and the tensors behind them.

`manager` and what it builds on keep books in plain Python and numpy; only `storage` knows tensors, and it is not
imported here, so that a scheduler can be run on these books without torch.
"""

from specdec.kv_manager.manager import KVManager, KVStats, Storage

__all__ = ["KVManager", "KVStats", "Storage"]
