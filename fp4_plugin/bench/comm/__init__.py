"""FP8 gradient reductions against `torch.distributed`: bytes, time, error, and whether it pays."""
