"""The reference job: pre-train a LLaMA under DeepSpeed from one JSON and one command.

presets, model       what is trained
corpus, megatron_index, tokenizer, token_cache, dataset, sample_order
                     text to batches: deterministic, memory-mapped, placed by the step number
options, arguments, deepspeed_config, job
                     what the user asked for, made explicit and checked before anything starts
launch, local_ranks, worker, run
                     the ranks and what each does
engine, schedule, training, progress
                     one training
phase, checkpoints, run_record
                     one training that may be stopped and go on in another process
report, curves, export, artifacts, dry_run
                     what is left to look at
"""

from __future__ import annotations

__all__: list[str] = []
