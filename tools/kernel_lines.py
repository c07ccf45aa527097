"""Measured lines of benchmarks/results: which are in force, and what their columns are."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Line: TypeAlias = dict[str, Any]

PLAIN = {"pytorch": "eager", "pytorch_compiled": "compiled", "compiled": "compiled"}
BESIDE = {  # columns that are neither a peer nor plain PyTorch on the same input
    "copy": "a copy of the bytes",
    "portable": "our portable kernel",
    "apart": "both operations by themselves",
    "pytorch_float32": "torch.topk, float32",
    "pinned": "table in host memory",
    "pinned_in_line": "host memory, not prefetched",
    "device_table": "table on the device",
    "compiled_3_steps": "compiled, 3 Sinkhorn steps",
    "full": "all layers for all tokens",
}
PEERS = {
    "flash_mla": "FlashMLA",
    "deep_gemm": "DeepGEMM",
    "deep_gemm_flashinfer": "DeepGEMM + FlashInfer",
    "deep_gemm_fp8": "DeepGEMM, FP8",
    "flashinfer": "FlashInfer",
    "flashinfer_ties": "FlashInfer, ties",
    "liger": "Liger",
    "liger_moe": "Liger, experts",
    "tile_kernels": "tile-kernels",
    "fla": "fla, NSA",
    "grouped_mm": "grouped_mm",
    "grouped_mm_bf16": "grouped_mm, bf16",
    "cublas_bf16": "cuBLAS, bf16",
    "transformers": "transformers",
    "transformers_compiled": "transformers, compiled",
}
# What a line says that tells no case from another; figures (floats, and groups) never do.
_FACTS = {
    "op", "ours_us", "spread_us", "bytes", "flop", "launches", "kernels_per_reuse_layer",
    "commit", "command", "versions", "devices", "label", *PLAIN, *BESIDE, *PEERS,
}  # fmt: skip
_ENDINGS = ("_us", "_error", "_bytes")


def read(folder: Path = RESULTS) -> list[Line]:
    """Lines in force: of one case the last, in the place of the first; files by their names.

    A run has only some libraries beside it. Columns that it lacks stay in force from the lines
    before: ``kept`` then says of which commit.
    """
    found: dict[str, Line] = {}
    paths = [*folder.glob("h200-ops*.jsonl"), *folder.glob("h200-step*.jsonl")]
    for path in sorted(paths, key=lambda path: path.stem):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            key = json.dumps([line["op"], case(line)], sort_keys=True)
            old = found.get(key)
            found[key] = line if old is None else kept(old, line)
    return list(found.values())


def kept(old: Line, new: Line) -> Line:
    """``new`` with those columns of ``old`` that its run had no library or argument for."""
    joined, origin = dict(new), dict[str, str]()
    for name in (*PLAIN, *PEERS):
        column = f"{name}_us"
        absent = name not in new or "ModuleNotFoundError" in str(new[name])
        if column not in old or column in new or not absent:
            continue
        joined.pop(name, None)
        joined |= {key: old[key] for key in (column, *(name + e for e in _ENDINGS)) if key in old}
        origin[name] = old.get("kept", {}).get(name, old["commit"])
    return {**joined, "kept": origin} if origin else joined


def case(line: Line) -> dict[str, Any]:
    """What was measured: sizes and kinds."""
    columns = {key.removesuffix("_us") for key in line if key.endswith("_us")}
    return {
        key: value
        for key, value in line.items()
        if key not in _FACTS | columns
        and not key.endswith(_ENDINGS)
        and not isinstance(value, float | dict)
    }


def ours(line: Line) -> float | None:
    """Microseconds; None for what was not timed."""
    return _figure(line.get("ours_us"))


def fraction(line: Line) -> float | None:
    """R: floor over time."""
    time = ours(line)
    return line["floor_us"] / time if time else None


def teraflops(line: Line) -> float | None:
    time = ours(line)
    return line["flop"] / time / 1e6 if time and "flop" in line else None


def times(line: Line, names: Iterable[str]) -> dict[str, float]:
    """Microseconds of those columns that have any."""
    found = {name: _figure(line.get(f"{name}_us")) for name in names}
    return {name: time for name, time in found.items() if time is not None}


def peers(line: Line) -> dict[str, float]:
    """Microseconds by peer."""
    return times(line, PEERS)


def beside(line: Line) -> dict[str, float]:
    """Microseconds of every other column."""
    known = {"floor", "ours", *PLAIN, *PEERS}
    return times(line, [k[:-3] for k in line if k.endswith("_us") and k[:-3] not in known])


def of(lines: Iterable[Line], op: str, test: Callable[[Line], bool] | None = None) -> list[Line]:
    """Lines of one operation."""
    return [line for line in lines if line["op"] == op and (test is None or test(line))]


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
