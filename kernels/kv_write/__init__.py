"""Slot `kv_write`: writes a step's new keys and values into one layer's paged cache."""
