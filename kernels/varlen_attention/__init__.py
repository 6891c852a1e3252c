"""Slot `varlen_attention`: causal attention over the paged cache for rows with any number of query tokens."""
