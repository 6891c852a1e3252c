"""Slot `block_copy`: copies whole blocks of one layer's cache onto other blocks."""
