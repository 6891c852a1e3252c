"""Slot `decode_attention`: attention over the paged cache for rows with exactly one query token."""
