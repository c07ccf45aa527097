"""Images: planned grids, patches, tower, aligner, and prefill and decoding with spans."""

import re
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from cedar.analysis.parity.cases import Case, run_case
from cedar.analysis.parity.exact import ExactProducts
from cedar.analysis.parity.judge import FLOAT32_LIMIT, Judge
from cedar.analysis.parity.report import Kind
from cedar.analysis.parity.sets import Golden, GoldenSet
from cedar.config.model import ModelConfig
from cedar.errors import CedarError, DataError
from cedar.inputs.images import (
    GridPlan,
    ImageSettings,
    SpanType,
    open_image,
    plan_grid,
    preprocess,
    span_types,
)
from cedar.model import Model

__all__ = ["compare_grids", "compare_vision"]

# bfloat16, absolute: what a valid implementation differs by, about twice (golden README).
_TOWER_LIMIT = 0.08
_ALIGNER_LIMIT = 0.04


def compare_grids(judge: Judge, golden: Golden) -> None:
    """Every row of ``image_grids.json``, field by field; the keys are the image sizes."""
    settings, rows = judge.golden.sidecar.get("settings"), judge.golden.sidecar.get("rows")
    if not isinstance(settings, dict) or not isinstance(rows, list):
        raise DataError(f'{judge.golden.name}.json: expected "settings" and "rows".')
    planner = ImageSettings(
        **{name.removeprefix("vision_"): value for name, value in settings.items()}
    )
    for row in rows:
        plan = plan_grid(row["width"], row["height"], planner)
        known = {
            "n_llm_h": plan.rows,
            "n_llm_w": plan.cols,
            "best_height": plan.canvas_height,
            "best_width": plan.canvas_width,
            "n_tokens": plan.num_tokens,
        }
        wanted = {name: value for name, value in row.items() if name not in ("width", "height")}
        key = f"{row['width']} x {row['height']}"
        if unknown := wanted.keys() - known.keys():
            judge.fail(key, f"unknown fields {sorted(unknown)}")
            continue
        ours = torch.tensor([known[name] for name in wanted])
        judge.exact(key, ours, golden=torch.tensor(list(wanted.values())))


def compare_vision(judge: Judge, golden: Golden, which: GoldenSet) -> None:
    """The image pipeline in both types, and the text model around the spans."""
    tensors = judge.golden.tensors
    judge.skip("input_ids", "decode_ids", "engram_token_map")
    base = f"{which.base}_bf16" if which.base else "bf16"
    if not golden.has(f"{base}.weights") and golden.has(f"{which.base}.weights"):
        base = which.base
    config = golden.config(f"{base}.weights", which.name)
    numbers = sorted({int(m[1]) for key in tensors if (m := re.match(r"image(\d+)\.", key))})
    plans = {number: _compare_image(judge, config, number) for number in numbers}
    _compare_types(judge, list(plans.values()))
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if not any(key.startswith(f"{kind}.") for key in judge.open):
            continue
        model = golden.model(base, judge.golden, dtype)
        for number, plan in plans.items():
            _compare_tower(judge, model, kind, number, plan)
        _compare_text(judge, model, kind, plans)


def _compare_image(judge: Judge, config: ModelConfig, number: int) -> GridPlan:
    """The patches of one image, from its file; returns its layout."""
    key, source = f"image{number}.patches", f"image{number}.png_bytes"
    judge.skip(source)
    settings = ImageSettings.from_config(config)
    stated = _stated(judge, number)
    try:
        image = open_image(bytes(judge.golden.tensors[source].tolist()))
        patches, plan = preprocess(image, settings)
    except CedarError as error:
        # Without Pillow the rest can be compared all the same, if the sidecar tells the size.
        judge.fail(key, str(error), Kind.BITS)
        if "size_wh" not in stated:
            raise
        width, height = stated["size_wh"]
        plan = plan_grid(width, height, settings)
    else:
        judge.bits(key, patches)
    fields = {
        "n_vit_h": plan.patch_rows,
        "n_vit_w": plan.patch_cols,
        "n_llm_h": plan.rows,
        "n_llm_w": plan.cols,
    }
    wanted = [name for name in fields if name in stated]
    if wanted:
        judge.exact(
            f"image{number} grid",
            torch.tensor([fields[name] for name in wanted]),
            golden=torch.tensor([stated[name] for name in wanted]),
        )
    return plan


def _stated(judge: Judge, number: int) -> dict[str, Any]:
    images = judge.golden.sidecar.get("images")
    return images[number] if isinstance(images, list) and number < len(images) else {}


def _compare_types(judge: Judge, plans: list[GridPlan]) -> None:
    """Every span, from our grids, at the places where the golden spans start."""
    types = judge.golden.tensors["token_types"]
    ours = torch.full_like(types, int(SpanType.TEXT))
    starts = (types == int(SpanType.START)).nonzero().tolist()
    for (row, start), plan in zip(starts, plans, strict=False):
        span = torch.tensor(span_types(plan))[: types.shape[1] - start]
        ours[row, start : start + len(span)] = span
    judge.exact("token_types", ours)


def _compare_tower(judge: Judge, model: Model, kind: str, number: int, plan: GridPlan) -> None:
    tensors = judge.golden.tensors
    patches = tensors[f"image{number}.patches"].to(model.compute_dtype)
    with ExactProducts() if kind == "fp32" else nullcontext():
        features = model.vision(patches, plan.patch_grid)
        aligned = model.aligner(features, plan.patch_grid)
    outputs = {"vit_out": (features, _TOWER_LIMIT), "aligner_out": (aligned, _ALIGNER_LIMIT)}
    for name, (ours, limit) in outputs.items():
        key = f"{kind}.image{number}.{name}"
        if key in tensors and kind == "fp32":
            judge.float32(key, ours, limit=FLOAT32_LIMIT)
        elif key in tensors:
            judge.float32(key, ours, limit=limit, kind=Kind.BFLOAT16)


def _compare_text(judge: Judge, model: Model, kind: str, plans: dict[int, GridPlan]) -> None:
    tensors = judge.golden.tensors
    prompt: Tensor = tensors["input_ids"]
    following = judge.golden.find("decode_ids")
    run_case(
        judge,
        model,
        Case(
            prefix=f"{kind}.",
            tokens_BT=prompt if following is None else torch.cat((prompt, following), dim=1),
            prompt=prompt.shape[1],
            image_types_BT=tensors["token_types"],
            images=tuple(tensors[f"image{number}.patches"] for number in plans),
            image_grids=tuple(plan.patch_grid for plan in plans.values()),
            exact_only=kind != "fp32",
        ),
    )
