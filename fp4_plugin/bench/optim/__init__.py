"""Optimiser states of 16 and 8 bits against float32 ones: bytes, time, loss."""
