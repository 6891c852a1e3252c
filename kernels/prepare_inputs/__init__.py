"""Slot `prepare_inputs`: gathers a step's input ids, positions and cache slots from the request table."""
