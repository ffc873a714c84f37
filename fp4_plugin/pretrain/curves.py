"""The picture of a run: training loss step by step, held-out loss as dots, the twin beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fp4_plugin.errors import UnsupportedError
from fp4_plugin.pretrain.training import History

__all__ = ["draw_curves", "require_matplotlib"]

SMOOTHING_STEPS = 10


def require_matplotlib() -> None:
    """Raise UnsupportedError, with the command that helps, before hours of training are spent."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "the picture of the loss curves needs matplotlib: pip install 'fp4-plugin[plot]'"
        ) from error


def draw_curves(path: Path, histories: Sequence[tuple[str, History]]) -> None:
    """A PNG: raw losses faint, their running mean bold, held-out losses marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The canvas is made by hand: pyplot would pick a backend for the whole process.
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="optimiser step", ylabel="loss (nats per token)")
    for index, (label, history) in enumerate(histories):
        color = f"C{index}"
        steps = [record.step for record in history.steps]
        losses = np.array([record.loss for record in history.steps])
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, _running_mean(losses), color=color, label=f"{label}, train")
        done, held_out = zip(*history.held_out, strict=True) if history.held_out else ((), ())
        axes.plot(done, held_out, "o", color=color, label=f"{label}, held out")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last SMOOTHING_STEPS values, fewer at the start. (S,) -> (S,)"""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - SMOOTHING_STEPS)
    return (sums[ends] - sums[starts]) / (ends - starts)
