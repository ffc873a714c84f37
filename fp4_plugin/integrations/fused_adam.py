"""AdamW kernels of NVIDIA apex and Transformer Engine, offered to FP16StateAdamW.

Both have multi_tensor_adam(chunk_size, noop_flag, [grads, weights, exp_avgs, exp_avg_sqs], lr,
beta1, beta2, eps, step, mode, bias_correction, weight_decay). What `fp4_plugin.optim.fused` makes
of an offer, it decides by trying. No GPU has run this so far: it follows the signature that both
libraries publish, and a kernel that computes something else is refused by that trial.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from fp4_plugin.optim.arithmetic import Hyperparameters
from fp4_plugin.optim.fused import BACKENDS, Backend
from fp4_plugin.optim.workspace import Workspace

__all__ = ["offer_fused_adam", "wrong_apex_reason"]

_CHUNK_SIZE = 1 << 16
_DECOUPLED_DECAY = 1
_BIAS_CORRECTION = 1


def offer_fused_adam() -> list[str]:
    """Register both kernels, once; returns their names. Imports neither library yet."""
    for name, load in _OFFERS.items():
        if name not in BACKENDS:
            BACKENDS.register(name, _backend(load))
    return list(_OFFERS)


def wrong_apex_reason() -> str | None:
    """Why the installed `apex` is not NVIDIA's: PyPI serves a Pyramid toolkit by that name."""
    try:
        version: str | None = metadata.version("apex")
        summary = metadata.metadata("apex")["Summary"] or ""
    except metadata.PackageNotFoundError:
        version, summary = None, ""
    if "pyramid" in summary.lower():
        return f"apex {version} is described as {summary!r}"
    try:
        if importlib.util.find_spec("apex.multi_tensor_apply") is None:
            return "it has no apex.multi_tensor_apply"
        getattr(importlib.import_module("apex.optimizers"), "FusedAdam")  # noqa: B009
    # The wrong package fails in whatever way its own dependencies do.
    except Exception as error:
        return f"importing it raises {type(error).__name__}: {error}"
    return None


class _Unavailable(Exception):
    """Its text is the reason."""


@functools.cache
def _apex() -> Any:
    if importlib.util.find_spec("apex") is None:
        raise _Unavailable("apex is not installed")
    wrong = wrong_apex_reason()
    if wrong:
        raise _Unavailable(f"not NVIDIA's apex: {wrong}; pip uninstall apex")
    applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    if not applier.available:
        raise _Unavailable("apex was built without --cpp_ext --cuda_ext")
    return importlib.import_module("amp_C").multi_tensor_adam


@functools.cache
def _transformer_engine() -> Any:
    if importlib.util.find_spec("transformer_engine_torch") is None:
        raise _Unavailable("transformer_engine_torch is not installed")
    try:
        importlib.import_module("transformer_engine.pytorch")  # loads what the next one links to
        return importlib.import_module("transformer_engine_torch").multi_tensor_adam
    # It fails in whatever way its shared libraries do.
    except Exception as error:
        raise _Unavailable(f"importing it raises {type(error).__name__}: {error}") from error


def _backend(load: Callable[[], Any]) -> Backend:
    def update(
        weight: torch.Tensor,
        grad: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        coefficients: Hyperparameters,
        workspace: Workspace,
    ) -> None:
        c = coefficients
        noop_flag = torch.zeros(1, dtype=torch.int32, device=weight.device)
        load()(
            _CHUNK_SIZE, noop_flag, [[grad], [weight], [m], [v]], c.lr, *c.betas, c.eps, c.step,
            _DECOUPLED_DECAY, _BIAS_CORRECTION, c.weight_decay,
        )  # fmt: skip

    def unavailable(device: torch.device) -> str | None:
        if device.type != "cuda":
            return "runs on CUDA devices only"
        try:
            load()
        except _Unavailable as reason:
            return str(reason)
        return None

    return Backend(update, unavailable)


_OFFERS: dict[str, Callable[[], Any]] = {"apex": _apex, "transformer engine": _transformer_engine}
