"""A pre-training job with nothing left to decide: options, configuration, data, schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp4_plugin.config import find_section, parse_section
from fp4_plugin.integrations.deepspeed.ds_config import refuse_conflicts
from fp4_plugin.pretrain.dataset import DataSource, load_training_data
from fp4_plugin.pretrain.deepspeed_config import complete_config
from fp4_plugin.pretrain.dry_run import DryRun, dry_run
from fp4_plugin.pretrain.options import PretrainOptions
from fp4_plugin.pretrain.presets import PRESETS
from fp4_plugin.pretrain.sample_order import BatchLayout
from fp4_plugin.pretrain.schedule import WarmupCosine
from fp4_plugin.pretrain.token_cache import default_cache_dir
from fp4_plugin.pretrain.tokenizer import Tokenizer, load_tokenizer
from fp4_plugin.pretrain.training import TrainingPlan

__all__ = ["Job", "JobShape", "job_shape", "prepare_job"]

BF16_LABEL = "bf16"


@dataclass(frozen=True)
class JobShape:
    """What follows from options and configuration alone, without opening any data.

    `label` is the recipe of the `fp4` section, "bf16" where nothing is converted.
    """

    model_config: Any
    ds_config: dict[str, Any]
    label: str
    layout: BatchLayout
    schedule: WarmupCosine

    @property
    def tokens_per_step(self) -> int:
        return self.layout.global_batch * int(self.model_config.max_position_embeddings)

    def sizes(self) -> DryRun:
        """Parameters, bytes per device, tokens and steps: the answer of --dry-run."""
        return dry_run(self.model_config, self.ds_config, self.layout, self.schedule.total_steps)


@dataclass(frozen=True)
class Job:
    """A shape with its text; the same on every rank."""

    options: PretrainOptions
    shape: JobShape
    tokenizer: Tokenizer
    plan: TrainingPlan


def job_shape(options: PretrainOptions, world_size: int) -> JobShape:
    """Decide everything but the data. Raises ConfigError; touches no process group or weight."""
    preset = PRESETS[options.preset]
    ds_config, layout = complete_config(options, preset, world_size)
    label = _recipe(ds_config)
    model_config = preset.llama_config(vocab_size=options.vocab_size, seq_len=options.seq_len)
    tokens_per_step = layout.global_batch * model_config.max_position_embeddings
    budget = options.tokens or preset.training.budget_tokens
    total_steps = options.steps or max(1, -(-budget // tokens_per_step))
    warmup_steps = max(1, round(total_steps * preset.training.warmup_fraction))
    schedule = WarmupCosine(total_steps, warmup_steps, preset.training.min_lr_fraction)
    return JobShape(model_config, ds_config, label, layout, schedule)


def _recipe(ds_config: Mapping[str, Any]) -> str:
    """Check the `fp4` section before any process or weight exists; the name of its recipe."""
    section = find_section(ds_config)
    if section is None:
        return BF16_LABEL
    config = parse_section(section)
    refuse_conflicts(ds_config, config)
    return config.recipe if config.enabled else BF16_LABEL


def prepare_job(options: PretrainOptions, world_size: int) -> Job:
    """The whole job for `world_size` ranks. Raises ConfigError or DataError; starts no process."""
    shape = job_shape(options, world_size)
    tokenizer = load_tokenizer(options.tokenizer)
    source = DataSource(options.data, options.eval_data, options.cache_dir or default_cache_dir())
    data = load_training_data(
        source,
        tokenizer,
        vocab_size=shape.model_config.vocab_size,
        seq_len=shape.model_config.max_position_embeddings,
    )
    plan = TrainingPlan(
        data,
        shape.layout,
        shape.schedule.total_steps,
        options.seed,
        options.eval_interval,
        options.eval_sequences,
    )
    return Job(options, shape, tokenizer, plan)
