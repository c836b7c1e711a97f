"""``lightning-indexer verify`` and ``bench``: cases, checks, timing, tables, pictures."""
