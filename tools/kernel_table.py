"""Write docs/performance.md from the measured lines in benchmarks/results.

`python tools/kernel_table.py` rewrites the page; with ``--picture`` the roofline picture, too
(that needs matplotlib, the extra ``plots``); with ``--check`` it only says whether the page is up
to date.
"""

import sys
from collections.abc import Sequence

from kernel_goals import GOALS, verdict
from kernel_lines import (
    BESIDE,
    PEERS,
    PLAIN,
    ROOT,
    Line,
    beside,
    case,
    fraction,
    of,
    ours,
    peers,
    read,
    times,
)

PAGE = ROOT / "docs" / "performance.md"
HEAD = """# Kernels on one H200

Written by `python tools/kernel_table.py` from the lines in
[`benchmarks/results`](../benchmarks/results), each with its commit, versions and hardware, which
`PYTHONPATH=src:. python3 -m benchmarks.ops.NAME` and `benchmarks.step` print.

Released shapes, random inputs, cold L2, CUDA-graph replay, medians in microseconds. Every result
was compared with float64 before it was timed (the error is relative; 0 where results are exact).
The floor is the larger of bytes / 4.3 TB/s (a copy, measured) and FLOP / 790 TFLOP/s (a bfloat16
product, measured); R is floor over time, the spread is from the fastest replay to the slowest.
"Best peer" is the fastest other library that ran; each reads its own format, and the notes say
what its time leaves out; its time stays in force until it is measured again. Plain PyTorch is the
faster of eager and `torch.compile`. The kernels are the default on a Hopper GPU with Triton:
`cedar env` prints which and why.
[What bounds the kernels](kernel-bounds.md) that miss a goal, with profiles, has a page of its own.

![Attained TFLOP/s of every case under the roofs of copy and product](images/roofline.png)
"""
TITLES = {
    "step": "A whole decode step: 40 layers, released shapes, four sets of experts shared by all",
    "sparse_attention": "Sparse attention at decode: 64 heads of 512, 128 window and 512 main rows",
    "sparse_prefill": "Sparse attention for prefill and training: 4096 queries, 64 heads of 512 "
    "over 128 window and 512 main rows (research: 16,384 queries, 8 heads of 128 over 128 and 128; "
    "blocks: 8192 queries, 64 heads of 128 over 8 blocks of 64)",
    "index_score": "Index scores from packed keys, 32 heads of 128; full, reindex: and selection",
    "index_prefill": "Index scores at prefill, 32 heads of 128, with maxima; select: and selection",
    "select": "Selection, exact, ties to the lowest number",
    "mhc": "mHC, one sublayer boundary in one launch: 4 streams of 5120",
    "mhc_backward": "mHC, gradients",
    "experts": "Experts on packed FP4 weights: 384 experts, 6 a token, 5120 x 2304",
    "experts_training": "Experts on bfloat16 weights, forward and backward",
    "mixture": "Router, experts and the shared expert: 384 experts, 6 a token, 5120 x 2304",
    "router": "Router: products, scores, choice, weights: 384 experts, 6 a token",
    "linear": "Linear layers on packed FP8 weights",
    "small": "Small fused operations",
    "engram": "Engram: rows and gate",
}
# Sizes that a title or another column tells already.
TOLD = {"sparse_prefill": {"queries", "heads", "width", "slots", "rows", "kernels"}}
NOTES = {
    "flash_mla": "FlashMLA (sgl-flash-mla 1.0.0, its Hopper kernels): at decode rows of 584 bytes"
    " where ours have 528 and 288; at prefill bfloat16 rows of one storage.",
    "deep_gemm": "DeepGEMM (sgl-deep-gemm 0.1.4.post1): FP8 keys of 132 bytes where ours have 68;"
    " writes float32 scores, no block maxima; its schedule is made before.",
    "deep_gemm_fp8": "DeepGEMM, FP8: the two grouped products alone, twice our weight bytes, on"
    " rows sorted, padded and quantised before: no SwiGLU, no second cast, no sum over experts.",
    "deep_gemm_flashinfer": "DeepGEMM + FlashInfer: those scores and the best 512 of them; no"
    " blocks, no physical rows, no promise on ties.",
    "flashinfer": "FlashInfer 0.6.14: top-k without a promise on ties or order; mHC in V4's order,"
    " with DeepGEMM's product, in four launches.",
    "flashinfer_ties": "FlashInfer, ties: its top-k that takes the lowest numbers of equal scores,"
    " as ours does, in no order.",
    "liger": "Liger 0.8.5: its Triton kernels for update, coefficients and collapse, DeepGEMM's"
    " product (its own unrolls 20,480 terms and compiles for many minutes), torch's norm; backward"
    " its own functions, the product's among them. With gradients its fused experts.",
    "liger_moe": "Liger, experts: bfloat16 weights, four times our bytes, no clamp, one fixed set"
    " of tile sizes (tuning takes minutes); it reads a size on the host, so launch gaps count.",
    "tile_kernels": "tile-kernels 1.0.0 on TileLang 0.1.9: DeepSeek V4's kernels; mHC in V4's order"
    " with a product that does not split its sum, torch's norm; the Engram gate after the product"
    " of its weights.",
    "fla": "fla 0.6.0, NSA: whole blocks of 64 rows, keys and values apart, no sink, 16 heads and"
    " more, at most 256 wide; tuned on the case.",
    "grouped_mm_bf16": "grouped_mm, bf16: `torch._grouped_mm` on bfloat16 weights, four times our"
    " bytes, with sorting and SwiGLU in plain PyTorch.",
    "cublas_bf16": "cuBLAS, bf16: `torch.matmul` on bfloat16 weights, twice our bytes, without norm"
    " and cast.",
}
ABSENT = (
    "Not compared: DeepSelect (no wheel), TileLang's sparse attention and index scores (examples,"
    " in no wheel), kernels for Blackwell alone (288- and 528-byte rows in FlashMLA and FlashInfer,"
    " Mega-mHC)."
)


def main() -> None:
    """Page, picture or check."""
    lines = read()
    text = page(lines)
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE.name} is out of date: run python tools/kernel_table.py")
        return
    PAGE.write_text(text, encoding="utf-8")
    if "--picture" in sys.argv[1:]:
        from kernel_roofline import draw

        draw(lines, PAGE.parent / "images" / "roofline.png")


def page(lines: list[Line]) -> str:
    """All of it."""
    names = dict.fromkeys([*TITLES, *(line["op"] for line in lines if "floor_us" in line)])
    tables = [table(name, of(lines, name)) for name in names if of(lines, name)]
    ends = contexts(lines), end_to_end(lines), silent(lines)
    parts = [HEAD, goals(lines), faster(lines), *tables, *ends]
    return "\n".join([part for part in parts if part] + [made(lines)])


def goals(lines: list[Line]) -> str:
    """What was asked, what was found."""
    rows = []
    for goal in GOALS:
        found = goal.find(lines)
        sign = ">=" if goal.above else "<="
        asked = (f"{sign} {value:g}{goal.unit}" for value in (goal.must, goal.aim))
        said = "" if found is None else f"{found:.3g}{goal.unit}"
        rows.append([goal.name, goal.what, *asked, said, verdict(goal, found)])
    text = markdown(
        ["", "goal, judged by its worst case", "must", "aim", "found", ""], rows, left=2
    )
    return f"## Goals\n\n{text}\n"


def faster(lines: list[Line]) -> str:
    """Where our time is not the best one of the line."""
    rows = []
    for line in lines:
        time = ours(line)
        if time is None:
            continue
        for name, other in sorted({**peers(line), **times(line, PLAIN)}.items()):
            if other < time:
                about = ", ".join(f"{key} {value}" for key, value in case(line).items())
                label = PEERS.get(name, PLAIN.get(name) and f"PyTorch, {PLAIN[name]}") or name
                ratio = f"{time / other:.2f}x"
                rows.append([line["op"], about, label, us(time), us(other), ratio])
    head = ["operation", "case", "peer", "ours", "peer's", "faster by"]
    text = markdown(head, rows, left=3) if rows else "Nowhere, in the lines measured so far."
    notes = "\n".join(f"- {note}" for note in NOTES.values())
    return f"## Where a peer is faster\n\n{text}\n\n{notes}\n- {ABSENT}\n"


def table(op: str, lines: list[Line]) -> str:
    """One operation's lines, with the columns that tell them apart."""
    cases = [case(line) for line in lines]
    keys = [
        key
        for key in dict.fromkeys(key for each in cases for key in each)
        if len({str(each.get(key)) for each in cases}) > 1 and key not in TOLD.get(op, ())
    ]
    others = list(dict.fromkeys(name for line in lines for name in beside(line)))
    counts = [k for k in ("kernels_per_reuse_layer", "launches") if any(k in x for x in lines)]
    several = len({line["commit"] for line in lines}) > 1
    rows = []
    for line, each in zip(lines, cases, strict=True):
        known = peers(line)
        best = min(known, key=known.__getitem__, default="")
        peer = f"{us(known[best])} ({PEERS.get(best, best)})" if best else ""
        plain = min(times(line, PLAIN).values(), default=None)
        rows.append(
            [
                *(shown(each.get(key, "")) for key in keys),
                us(line["floor_us"]),
                us(ours(line)) or "not timed",
                "" if fraction(line) is None else f"{fraction(line):.2f}",
                spread(line),
                peer,
                us(plain),
                *(us(beside(line).get(name)) for name in others),
                *(str(line.get(key, "")) for key in counts),
                f"{line['error']:.1e}" if "error" in line else "",
                line["commit"][:7] if several else "",
            ]
        )
    head = [
        *keys, "floor", "ours", "R", "spread", "best peer", "plain PyTorch",
        *(BESIDE.get(name, words(name)) for name in others), *map(words, counts), "error", "commit",
    ]  # fmt: skip
    used = [n for n, name in enumerate(head) if any(row[n] for row in rows) or name == "best peer"]
    text = markdown([head[n] for n in used], [[row[n] for n in used] for row in rows])
    return f"## {TITLES.get(op, words(op).capitalize())}\n\n{text}\n"


def contexts(lines: list[Line]) -> str:
    """A long prompt through the whole engine, if one was measured."""
    columns = {
        "tokens": "tokens", "prefill_s": "prefill, s", "prefill_tokens_per_s": "tokens a second",
        "decode_us": "each further token", "decode_us_after_8K": "after 8K",
    }  # fmt: skip
    rows = [[f"{line[key]:,}" for key in columns] for line in of(lines, "long_context")]
    if not rows:
        return ""
    text = markdown(list(columns.values()), rows)
    return f"## A long context end to end: the bundled model, greedy, one sequence\n\n{text}\n"


def end_to_end(lines: list[Line]) -> str:
    """Beside another library's whole model, if it was measured."""
    columns = {
        "ours": "Cedar", "full": "Cedar, all layers for all tokens", "transformers": "transformers",
        "transformers_compiled": "transformers, all but attention compiled",
    }  # fmt: skip
    found = of(lines, "end_to_end")
    if not found:
        return ""
    rows = [
        [line["pass"], f"{line['tokens']:,}", *(us(measured.get(name)) for name in columns)]
        for line, measured in ((line, times(line, columns)) for line in found)
    ]
    about = found[-1]
    millions = {name: f"{count / 1e6:.0f}M" for name, count in about["parameters"].items()}
    sizes = ", ".join(f"{count} parameters in {name}" for name, count in millions.items())
    version = about["versions"].get("transformers")
    text = markdown(["pass", "tokens", *columns.values()], rows, left=1)
    return (
        f"## End to end beside transformers {version}, deepseek_v4: {about['label']}\n\n"
        "Random weights, ten layers of width 1024, 16 heads of 128, 16 experts of which 2, batch 1,"
        f" greedy; {sizes}. Microseconds to the first token of the prompt, and of each further\n"
        f"token after it.\n\n{text}\n"
    )


def silent(lines: list[Line]) -> str:
    """Peers that a benchmark asked and that gave no time, with their reason."""
    said: dict[str, None] = {}
    for line in lines:
        for name, label in PEERS.items():
            if isinstance(line.get(name), str):
                said[f"- {line['op']}, {label}: {line[name]}"] = None
    text = "\n".join(said) or "None."
    return f"## Peers without a time\n\n{text}\n"


def made(lines: list[Line]) -> str:
    """Commits and machines of all lines."""
    origins = {each for line in lines for each in (line["commit"], *line.get("kept", {}).values())}
    commits = sorted({str(each).rstrip("+")[:9] for each in origins})
    machines = sorted({line["devices"].get("cuda:0", "") for line in lines})
    versions = sorted(
        {f"torch {v['torch']}, Triton {v['triton']}" for v in (x["versions"] for x in lines)}
    )
    text = f"{'; '.join(machines)}. {'; '.join(versions)}. Commits {', '.join(commits)}."
    return f"## Measured on\n\n{text}\n"


def us(value: float | None) -> str:
    """Microseconds with three digits or so."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(line: Line) -> str:
    time, ends = ours(line), line.get("spread_us")
    return f"{100 * (ends[1] - ends[0]) / time:.0f} %" if time and ends else ""


def words(name: str) -> str:
    return name.replace("_", " ")


def shown(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """A table; the first ``left`` columns are text."""
    bars = ["---" if n < left else "---:" for n in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, bars, *rows))


if __name__ == "__main__":
    main()
