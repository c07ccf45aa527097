"""The roofline picture of docs/performance.md."""

from pathlib import Path

from matplotlib.figure import Figure

from kernel_lines import Line, of, ours

COPY, GEMM = 4.3e12, 7.9e14
NAMES = {
    "sparse_attention": "sparse attention, decode",
    "sparse_prefill": "sparse attention, prefill and training",
    "index_score": "index scores, decode",
    "index_prefill": "index scores, prefill",
    "experts": "experts, packed weights",
    "experts_training": "experts, training",
    "linear": "linear layers",
    "mhc": "mHC",
    "mhc_backward": "mHC, gradients",
}
MARKS = "os^Dv<>P*X"


def size(line: Line) -> str:
    """What a reader would ask first."""
    for key in ("queries", "tokens", "entries"):
        if key in line and line.get("kind") != "scan":
            return f"{key} {line[key]:,}"
    return f"entries {line['entries']:,}"


def draw(lines: list[Line], target: Path) -> None:
    """Attained FLOP/s over FLOP a byte; the slowest case has its size beside it."""
    figure = Figure(figsize=(9, 5.5), dpi=130, facecolor="white", layout="tight")
    axes = figure.add_subplot()
    roof = [0.5, GEMM / COPY, 3000]
    axes.plot(roof, [min(v * COPY, GEMM) / 1e12 for v in roof], color="black", linewidth=1.5)
    axes.text(
        4, 20, "4.3 TB/s", fontsize=10, ha="left", va="bottom",
        rotation=35, rotation_mode="anchor",
    )  # fmt: skip
    axes.text(2800, 840, "790 TFLOP/s", fontsize=10, ha="right", va="bottom")
    for (op, label), mark in zip(NAMES.items(), MARKS, strict=False):
        found = [
            (line["flop"] / line["bytes"], line["flop"] / time / 1e6, size(line))
            for line in of(lines, op)
            if (time := ours(line)) and line.get("flop") and line.get("bytes")
        ]
        if not found:
            continue
        right, up, _ = zip(*found, strict=True)
        axes.scatter(right, up, marker=mark, s=42, label=label, alpha=0.85)
        x, y, text = min(found, key=lambda f: f[1])
        axes.annotate(text, (x, y), (7, -3), textcoords="offset points", fontsize=8, color="0.3")
    axes.set(
        xscale="log", yscale="log", xlim=(0.5, 3000), ylim=(0.05, 2000),
        xlabel="FLOP per byte that has to be moved", ylabel="TFLOP/s attained",
        title="One H200: measured cases under the roofs",
    )  # fmt: skip
    axes.grid(visible=True, which="major", color="0.9")
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", fontsize=9, frameon=True)
    figure.savefig(target)
