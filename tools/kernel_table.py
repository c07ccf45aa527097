"""Write docs/performance.md from the measured lines in benchmarks/results."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILES = ("h200-ops.jsonl", "h200-ops-experts.jsonl")
HEAD = """# Kernels on one H200

Written by `python tools/kernel_table.py` from lines with commit and hardware in
[`h200-ops.jsonl`](../benchmarks/results/h200-ops.jsonl) and
[`h200-ops-experts.jsonl`](../benchmarks/results/h200-ops-experts.jsonl), which
`PYTHONPATH=src:. python3 -m benchmarks.ops.NAME` prints: released shapes, random inputs, cold L2,
CUDA-graph replay, medians in microseconds; every result was compared with float64 before it was
timed (the error is relative). R is floor over time, the floor being the larger of bytes / 4.3 TB/s
and FLOP / 790 TFLOP/s.

Kernels are not yet the default on a GPU: `select_ops(device, kernels=True)` chooses them, and
`cedar env` says so. Each was compared with its reference; whole models on them have not been run.
The kernels for training and prefill and the small fused ones (`sparse_attention/prefill.py`,
`mhc/backward_triton.py`, `kv_write`, `latent`, `engram_rows`) are tested in the interpreter and
compiled for Hopper; their benchmarks have not been run in their present form, so they are not here.
"""
TITLES = {
    "sparse_attention": "Sparse attention at decode: 64 heads of 512, 128 window and 512 main rows",
    "index_score": "Index scores from packed keys: 32 heads of 128",
    "select": "Selection, exact, ties to the lowest number",
    "mhc": "mHC, one sublayer boundary in one launch: 4 streams of 5120",
    "experts": "Routed experts on packed FP4 weights: 384 experts, 6 a token, 5120 x 2304",
}
CASES = ("kind", "sequences", "tokens", "queries", "entries", "rows", "width", "k", "block")
OTHERS = {"pytorch": "PyTorch", "copy": "a copy", "grouped_mm_bf16": "bf16 grouped product"}


def main() -> None:
    """All tables."""
    lines = [
        json.loads(line)
        for name in FILES
        for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()
    ]
    parts = [HEAD]
    for op, title in TITLES.items():
        parts.append(table(title, [line for line in lines if line["op"] == op]))
    (ROOT / "docs" / "performance.md").write_text("\n".join(parts), encoding="utf-8")


def table(title: str, lines: list[dict[str, Any]]) -> str:
    """One operation's lines, with the columns that tell them apart."""
    keys = [k for k in CASES if len({line.get(k) for line in lines}) > 1]
    others = [k for k in OTHERS if any(f"{k}_us" in line for line in lines)]
    names = [*keys, "floor", "ours", "R", *(OTHERS[k] for k in others), "error"]
    rows = [
        [
            *(str(line.get(k, "")) for k in keys),
            f"{line['floor_us']:g}",
            f"{line['ours_us']:g}",
            f"{line['floor_over_ours']:.2f}",
            *(f"{line[f'{k}_us']:g}" if f"{k}_us" in line else "" for k in others),
            f"{line['error']:.1e}",
        ]
        for line in lines
    ]
    head = [names, ["---:"] * len(names)]
    body = "\n".join("| " + " | ".join(row) + " |" for row in (*head, *rows))
    return f"## {title}\n\n{body}\n"


if __name__ == "__main__":
    main()
