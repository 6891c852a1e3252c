"""Slot `sample`: turns logits into tokens and writes them into the request table."""
