"""The indexer over several devices, by ``torch.distributed``: keys sharded (decode context parallelism) or rows
(prefill context parallelism). Results are bitwise those of one device; docs/distributed.md has the calls and times.
"""

from lightning_indexer.distributed.collectives import CollectiveError
from lightning_indexer.distributed.keys import paged_top_k_of_sharded_keys, top_k_of_sharded_keys
from lightning_indexer.distributed.rows import top_k_of_sharded_rows
from lightning_indexer.distributed.sharding import KeySharding, LocalWindows

__all__ = [
    "CollectiveError",
    "KeySharding",
    "LocalWindows",
    "paged_top_k_of_sharded_keys",
    "top_k_of_sharded_keys",
    "top_k_of_sharded_rows",
]
