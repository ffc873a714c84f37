"""Where a run stands, as plain JSON beside its checkpoint: what it is, and what it has seen.

    {"settings": {"seed": 0, "seq_len": 512, "optimizer.params.lr": 0.001, ...},
     "position": {"steps": 40, "samples": 320, "tokens": 163840},
     "history": {"steps": [[loss, lr, seconds], ...], "held_out": [[steps, loss], ...], ...}}

`settings` are all that has to be the same for a run to go on as if it had never stopped. The order
of the data is a function of seed and step, so the position is a number, and nothing has to be read
again to get there. JSON keeps every bit of a float.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp4_plugin.checkpoint import write_text
from fp4_plugin.errors import CheckpointError, ConfigError
from fp4_plugin.pretrain.job import Job
from fp4_plugin.pretrain.training import History, StepRecord

__all__ = ["RunRecord", "run_settings"]

_MODEL_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# Of the DeepSpeed configuration: what the losses depend on. Other keys may change (monitors, ...);
# the engine itself compares the "fp4" section when it loads.
_CONFIG_KEYS = ("optimizer", "scheduler", "gradient_clipping", "bf16", "fp16")


def run_settings(job: Job, label: str, ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Flat and as JSON would give it back; `label` and `ds_config` are those of one training."""
    plan, layout, schedule = job.plan, job.shape.layout, job.shape.schedule
    settings: dict[str, Any] = {
        "run": label,
        "seed": plan.seed,
        "data": plan.data.train.fingerprint(),
        "held-out data": plan.data.held_out.fingerprint(),
        "seq_len": plan.data.train.seq_len,
        "vocab_size": plan.data.train.vocab_size,
        **asdict(layout),
        "zero_optimization.stage": ds_config.get("zero_optimization", {}).get("stage", 0),
        **{f"model.{key}": getattr(job.shape.model_config, key) for key in _MODEL_KEYS},
    }
    if "scheduler" not in ds_config:
        # Ours bends to the length of the run: of another length, the steps done were other ones.
        settings |= asdict(schedule)
    for key in _CONFIG_KEYS:
        settings.update(_flat(key, ds_config.get(key)))
    result: dict[str, Any] = json.loads(json.dumps(settings))
    return result


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """("optimizer.params.lr", 0.001) and so on; nothing for None."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif value is not None:
        yield name, value


@dataclass(frozen=True)
class RunRecord:
    """`settings` and the course of the run so far. `facts` are those of a training that is over."""

    settings: Mapping[str, Any]
    history: History
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.history.steps)

    def write(self, path: Path) -> None:
        """Replace `path`, whole. Raises CheckpointError."""
        sequences = self.steps * self._global_batch()
        record = {
            "settings": self.settings,
            "position": {
                "steps": self.steps,
                "samples": sequences,
                "tokens": sequences * self.settings["seq_len"],
            },
            "facts": self.facts,
            "history": _history_to_json(self.history),
        }
        write_text(path, json.dumps(record) + "\n")

    def _global_batch(self) -> int:
        numbers = [self.settings[key] for key in ("micro_batch", "grad_accum", "world_size")]
        return int(numbers[0] * numbers[1] * numbers[2])

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Raises CheckpointError if there is no such file, or it is not one of ours."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return cls(record["settings"], _history_from_json(record["history"]), record["facts"])
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: fp4 pretrain writes it beside each checkpoint, with the "
                "position in the data and the losses so far; put it back, or resume another one"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); resume another one") from error

    def require(self, settings: Mapping[str, Any], total_steps: int, where: Path) -> None:
        """Raise ConfigError, which names each key that differs, unless this run can go on there."""
        keys = dict.fromkeys((*self.settings, *settings))
        differing = [
            f"{key} ({self.settings.get(key, 'not set')} there, {settings.get(key, 'not set')} now)"
            for key in keys
            if self.settings.get(key) != settings.get(key)
        ]
        if self.steps > total_steps:
            differing.append(f"steps ({self.steps} done there, {total_steps} in all now)")
        if differing:
            raise ConfigError(
                f"{where} is of another run: {'; '.join(differing)}. Resume with the settings it "
                "was saved with, or choose another --output for a new run"
            )


def _history_to_json(history: History) -> dict[str, Any]:
    return {
        "steps": [[record.loss, record.lr, record.seconds] for record in history.steps],
        "held_out": history.held_out,
        "skipped_steps": history.skipped_steps,
        "skipped_in_a_row": history.skipped_in_a_row,
    }


def _history_from_json(record: Mapping[str, Any]) -> History:
    return History(
        [StepRecord(index + 1, *numbers) for index, numbers in enumerate(record["steps"])],
        [(int(steps), float(loss)) for steps, loss in record["held_out"]],
        record["skipped_steps"],
        record["skipped_in_a_row"],
    )
