"""The loss curve of a run as a picture."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from cedar.errors import BackendUnavailable, TrainingError
from cedar.train.report import read_log

__all__ = ["draw_curve", "need_matplotlib"]


def need_matplotlib() -> None:
    """Raise BackendUnavailable when matplotlib is missing; called before a run begins."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable(
            "Drawing the loss curve needs matplotlib, which is not installed. "
            'Install it with: pip install "cedar-lm[plots]", or pass curve=false.'
        )


def draw_curve(log: Path, picture: Path) -> None:
    """Draw training and held-out losses of `log.jsonl` to a PNG file.

    Raises:
        BackendUnavailable: matplotlib is missing.
        TrainingError: nothing has been logged yet.
    """
    need_matplotlib()
    # The object interface needs no display and no global state, unlike pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_log(log)
    train = [r for r in records if r["kind"] == "train"]
    held_out = [r for r in records if r["kind"] in ("eval", "final")]
    if not train:
        raise TrainingError(f"{log} holds no training record, so there is no curve to draw.")
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    upper.plot([r["step"] for r in train], [r["lm"] for r in train], lw=1, label="training")
    for key, label in (
        ("loss_per_token", "held out"),
        ("loss_per_token_without_engram", "held out, Engram off"),
    ):
        points = [(r["step"], r[key]) for r in held_out if key in r]
        if points:
            upper.plot(*zip(*points, strict=True), marker="o", ms=3, label=label)
    upper.set_ylabel("loss per token (nats)")
    for key, label in (
        ("index", "indexer KL"),
        ("draft_ce", "draft cross-entropy"),
        ("draft_tv", "draft total variation"),
        ("draft_confidence", "draft confidence"),
    ):
        points = [(r["step"], r[key]) for r in train if key in r]
        if points:
            lower.plot(*zip(*points, strict=True), lw=1, label=label)
    lower.set_ylabel("other losses")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    part = picture.with_name(picture.name + ".part")
    figure.savefig(part, format="png", dpi=120)
    os.replace(part, picture)
