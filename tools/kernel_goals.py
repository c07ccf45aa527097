"""Goals of the kernels, and the one place that says how each is read from measured lines.

A goal is judged by its worst case. None: nothing measured says anything about it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kernel_lines import Line, fraction, of, ours, teraflops, times

__all__ = ["GOALS", "Goal", "verdict"]

Find = Callable[[list[Line]], float | None]
LONG, MIDDLE = 1 << 20, 1 << 17


@dataclass(frozen=True)
class Goal:
    """``above``: a larger figure is better."""

    name: str
    what: str
    must: float
    aim: float
    unit: str
    find: Find
    above: bool = True


def verdict(goal: Goal, found: float | None) -> str:
    if found is None:
        return "not measured"
    sign = 1 if goal.above else -1
    if sign * found >= sign * goal.aim:
        return "aim met"
    return "met" if sign * found >= sign * goal.must else "missed"


def _least(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return min((v for v in known if v is not None), default=None) if None not in known else None


def _most(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return max((v for v in known if v is not None), default=None) if None not in known else None


def _mhc(op: str) -> Find:
    return lambda lines: _least(fraction(x) for x in of(lines, op, lambda x: x["tokens"] >= 2048))


def _mhc_few(lines: list[Line]) -> float | None:
    return _most(ours(x) for x in of(lines, "mhc", lambda x: x["tokens"] <= 128))


def _decode(lines: list[Line]) -> float | None:
    return _least(fraction(x) for x in _queries(lines, 32, 128))


def _decode_one(lines: list[Line]) -> float | None:
    return _most(ours(x) for x in _queries(lines, 1))


def _decode_peer(lines: list[Line]) -> float | None:
    return _least(_over(x, "flash_mla") for x in _queries(lines, 32, 128))


def _queries(lines: list[Line], *counts: int) -> list[Line]:
    return of(lines, "sparse_attention", lambda x: x.get("queries") in counts)


def _prefill(which: str) -> Find:
    def find(lines: list[Line]) -> float | None:
        found = of(
            lines,
            "sparse_prefill",
            # Rows in bfloat16, as the goal was set; packed rows have lines of their own.
            lambda x: (
                x["pass"] == which
                and x.get("width") == 512
                and x["case"] != "packed"
                and not x.get("deterministic")
            ),
        )
        return _least(teraflops(x) for x in found)

    return find


def _scan(lines: list[Line]) -> float | None:
    return _least(
        fraction(x)
        for x in of(
            lines,
            "index_score",
            lambda x: x["kind"] == "scan" and x["tokens"] == 1
            and x["sequences"] * x["entries"] >= LONG,
        )
    )  # fmt: skip


def _scan_to_indices(lines: list[Line]) -> float | None:
    """The scan with its best entries, their rows and the best blocks."""
    return _most(ours(x) for x in _indexed(lines, "full", LONG) if x["sequences"] == 1)


def _reindex(entries: int) -> Find:
    """The pool's scores with its best entries and their rows."""
    return lambda lines: _most(ours(x) for x in _indexed(lines, "reindex", entries))


def _reindex_flat(lines: list[Line]) -> float | None:
    long, short = _reindex(LONG)(lines), _reindex(MIDDLE)(lines)
    return long / short if long and short else None


def _indexed(lines: list[Line], kind: str, entries: int) -> list[Line]:
    def test(x: Line) -> bool:
        return bool((x["kind"], x["tokens"], x["entries"]) == (kind, 1, entries))

    return of(lines, "index_score", test)


def _top_k(lines: list[Line]) -> float | None:
    """Against torch.topk of the same bfloat16 scores."""
    found = of(
        lines, "select", lambda x: x.get("k") == 512 and x["width"] >= MIDDLE and not x["block"]
    )
    return _least(_over(x, "pytorch") for x in found)


def _over(line: Line, name: str) -> float | None:
    time, other = ours(line), times(line, [name]).get(name)
    return other / time if time and other else None


def _experts(lines: list[Line]) -> float | None:
    return _least(fraction(x) for x in _routed(lines) if 32 <= x["tokens"] <= 128)


def _experts_prefill(lines: list[Line]) -> float | None:
    return _least(teraflops(x) for x in _routed(lines) if x["tokens"] == 8192)


def _routed(lines: list[Line]) -> list[Line]:
    return of(lines, "experts", lambda x: not x.get("shared"))


def _step(lines: list[Line], batch: int, context: str) -> Line | None:
    def test(x: Line) -> bool:
        return bool((x["batch"], x["queries"], x["context"]) == (batch, 1, context))

    found = of(lines, "step", test)
    return found[-1] if found else None


def _step_fraction(lines: list[Line]) -> float | None:
    found = of(lines, "step", lambda x: x["batch"] == x["queries"] == 1)
    return _least(fraction(x) for x in found)


def _step_kernels(lines: list[Line]) -> float | None:
    found = of(lines, "step", lambda x: x["batch"] == x["queries"] == 1)
    return _most(float(x["kernels_per_reuse_layer"]) for x in found)


def _contexts(lines: list[Line], batch: int) -> Iterator[tuple[Line, Line]]:
    """The step at 1M beside those at 8K and at 128K, both, so that a slow one of these does not
    make a long context look cheap."""
    long = _step(lines, batch, "1M")
    for name in ("8K", "128K"):
        short = _step(lines, batch, name)
        if long and short and ours(long) and ours(short):
            yield long, short


def _step_flat(batch: int) -> Find:
    def find(lines: list[Line]) -> float | None:
        pairs = _contexts(lines, batch)
        return _most(long["ours_us"] / short["ours_us"] for long, short in pairs)

    return find


def _step_scans(lines: list[Line]) -> float | None:
    """What a long context adds over what its scans must read, batch 1."""
    return _most(
        (long["ours_us"] - short["ours_us"]) / (long["floor_us"] - short["floor_us"])
        for long, short in _contexts(lines, 1)
    )


def _engram(lines: list[Line]) -> float | None:
    """Percent that look-up from host memory and gate add to a layer's time."""
    found = of(lines, "engram", lambda x: "over_layer" in x and x["tokens"] <= 128)
    return _most(100 * x["over_layer"] for x in found)


def _engram_step(lines: list[Line]) -> float | None:
    """The same of both layers to a whole step's time."""
    found = of(lines, "step", lambda x: "engram_share" in x and x["batch"] <= 128)
    return _most(100 * x["engram_share"] for x in found)


GOALS = (
    Goal("G1", "mHC forward, 2048 tokens and more, R", 0.80, 0.90, "", _mhc("mhc")),
    Goal("G2", "mHC backward, 2048 tokens and more, R", 0.60, 0.75, "", _mhc("mhc_backward")),
    Goal("G3", "mHC, up to 128 tokens", 8, 5, " us", _mhc_few, above=False),
    Goal("G4", "decode attention, 32 and 128 queries, R", 0.35, 0.55, "", _decode),
    Goal("G5", "decode attention, one query", 12, 8, " us", _decode_one, above=False),
    Goal("G6", "decode attention over FlashMLA's speed", 0.8, 1.0, "x", _decode_peer),
    Goal("G7", "sparse prefill forward", 315, 475, " TFLOP/s", _prefill("forward")),
    Goal("G8", "sparse attention backward", 80, 115, " TFLOP/s", _prefill("backward")),
    Goal("G9", "index scan with block maxima, 1M positions and more, R", 0.55, 0.75, "", _scan),
    Goal("G10", "scan of 1M entries to indices", 60, 35, " us", _scan_to_indices, above=False),
    Goal("G11", "reindex at 1M with its top 512", 25, 15, " us", _reindex(LONG), above=False),
    Goal("", "... over the same at 128K", 1.05, 1.02, "x", _reindex_flat, above=False),
    Goal("G12", "top 512 of 128K and more over torch.topk", 4, 8, "x", _top_k),
    Goal("G13", "MoE decode, 32 to 128 tokens, R", 0.50, 0.70, "", _experts),
    Goal("G14", "MoE prefill, 8192 tokens", 355, 475, " TFLOP/s", _experts_prefill),
    Goal("G15", "whole step, batch 1, experts aliased, R", 0.40, 0.60, "", _step_fraction),
    Goal("", "... kernels in a Reuse layer", 14, 14, "", _step_kernels, above=False),
    Goal(
        "G16", "step at 1M over 8K and 128K, batch 1", 1.05, 1.03, "x", _step_flat(1), above=False
    ),
    Goal("", "... batch 32", 1.12, 1.08, "x", _step_flat(32), above=False),
    Goal(
        "G17",
        "step at 1M minus 8K and 128K over the scans' floor",
        1.8,
        1.35,
        "x",
        _step_scans,
        above=False,
    ),
    Goal("G19", "Engram, added to a layer, batch up to 128", 3, 1.5, " %", _engram, above=False),
    Goal("", "... added to a whole step", 3, 1.5, " %", _engram_step, above=False),
)
