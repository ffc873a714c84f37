"""The trained model as a plain Hugging Face folder, and the proof that it loads.

    config.json, model*.safetensors    weights in the compute dtype, gathered from all ranks
    tokenizer.json, ...                the tokenizer that made the training tokens

Nothing of this package is needed to load it: converted linears keep their parameters and names.
The loaded model computes in the weights' own precision (BF16), not in FP4, and its loss is another
one: weights learn to be rounded. `convert_to_fp4` on the loaded model gives the trained loss back,
which is how the export is checked.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp4_plugin.activation import activate
from fp4_plugin.errors import MismatchError
from fp4_plugin.pretrain.engine import Ranks
from fp4_plugin.pretrain.model import gathered, meta_model
from fp4_plugin.pretrain.tokenizer import Tokenizer
from fp4_plugin.pretrain.training import sequence_losses

__all__ = ["ExportCheck", "check_export", "export_model", "gather_weights"]

# Relative. On another device attention rounds otherwise, and a few FP4 codes near a tie flip.
MAX_LOSS_DIFFERENCE = 0.01


def gather_weights(engine: Any, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Whole weights by name on the CPU of rank 0, empty elsewhere. Collective; any ZeRO stage."""
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with gathered([parameter]), torch.no_grad():
            if ranks.is_first:
                weights[name] = parameter.detach().to("cpu", copy=True).contiguous()
    return weights


def export_model(
    folder: Path, model_config: Any, weights: dict[str, torch.Tensor], tokenizer: Tokenizer
) -> None:
    """Write the folder aside and rename it, so that a half-written export is never found.

    Raises OSError if it cannot be written.
    """
    import transformers
    from safetensors import SafetensorError

    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    # save_pretrained writes the dtype of the module into config.json, not that of `weights`.
    model = meta_model(model_config).to(next(iter(weights.values())).dtype)
    backend = tokenizer.for_export()
    model.config.eos_token_id = backend.eos_token_id
    model.generation_config.eos_token_id = backend.eos_token_id
    transformers.utils.logging.disable_progress_bar()
    try:
        model.save_pretrained(aside, state_dict=dict(weights))  # it empties the dict it is given
    except SafetensorError as error:
        raise OSError(str(error)) from error  # a full disk, above all
    backend.save_pretrained(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


@dataclass(frozen=True)
class ExportCheck:
    """What the loaded model is measured against: weights, and a loss on `sequences` ((B, L + 1)).

    `section` is the `fp4` section that was active when the engine measured `trained_loss`, or None.
    """

    weights: dict[str, torch.Tensor]
    sequences: torch.Tensor
    trained_loss: float
    section: Mapping[str, Any] | None


def check_export(folder: Path, expected: ExportCheck) -> float:
    """Load the folder with plain transformers; returns its loss before any conversion.

    Raises MismatchError if a weight is not bit-equal, or if the loaded model, converted with the
    section of the run, has not the loss of the run.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    _require_equal_weights(folder, model.state_dict(), expected.weights)
    plain_loss = loss = _mean_loss(model, expected.sequences)
    if expected.section is not None:
        activate(model, expected.section)
        loss = _mean_loss(model, expected.sequences)
    if not math.isclose(loss, expected.trained_loss, rel_tol=MAX_LOSS_DIFFERENCE):
        raise MismatchError(
            f"the export {folder} has loss {loss:.4f} where the trained model has "
            f"{expected.trained_loss:.4f}, in the same arithmetic"
        )
    return plain_loss


def _require_equal_weights(
    folder: Path, loaded: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> None:
    differing = [
        name
        for name, weight in weights.items()
        if name not in loaded or not torch.equal(loaded[name], weight)
    ]
    differing += sorted(loaded.keys() - weights.keys())
    if differing:
        raise MismatchError(f"the export {folder} differs from the trained weights in {differing}")


@torch.no_grad()
def _mean_loss(model: Any, sequences: torch.Tensor) -> float:
    return float(sequence_losses(model, sequences).mean())
