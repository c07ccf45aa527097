"""The small fused kernels at released shapes: norms, casts, rotations, cache rows, rings, Engram.

Columns: floor (bytes read and written once), ours, plain PyTorch (the reference, eager), and with
the argument ``compile`` torch.compile of the reference. Few tokens are bound by the launch: read
microseconds there, not fractions.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from benchmarks.ops.measure import Report, floor_us, need_gpu, relative_error, sets_for, timed
from torch import Tensor

from cedar.ops.cast import reference as plain_cast
from cedar.ops.cast import triton as cast
from cedar.ops.compress import Residues
from cedar.ops.compress import reference as plain_compress
from cedar.ops.compress import triton as compress
from cedar.ops.engram_gate import reference as plain_gate
from cedar.ops.engram_gate import triton as gate
from cedar.ops.engram_hash import History
from cedar.ops.engram_hash import reference as plain_hash
from cedar.ops.engram_hash import triton as hashing
from cedar.ops.engram_rows import reference as plain_rows
from cedar.ops.engram_rows import triton as rows
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write import reference as plain_write
from cedar.ops.kv_write import triton as write
from cedar.ops.latent import Append, InPlace
from cedar.ops.latent import reference as plain_latent
from cedar.ops.latent import triton as latent
from cedar.ops.norm import reference as plain_norm
from cedar.ops.norm import triton as norm
from cedar.ops.rope import reference as plain_rope
from cedar.ops.rope import triton as rope
from cedar.ops.window import reference as plain_window
from cedar.ops.window import triton as window_kernel
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW, quantize

DIM, HEADS, HEAD, KEY, RANK, COLUMNS = 5120, 64, 512, 128, 1280, 24
DECODE = 256  # tokens up to which the kernels of a decode step are timed


class Case(NamedTuple):
    """An operation and its reference on the same inputs, the bytes it has to move."""

    name: str
    moved: int
    inputs: Callable[[], tuple[Any, ...]]
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    wide: bool = False  # compared with the reference in float64, not in the same rounding steps
    host_reads: bool = False  # by the reference, which no graph can hold


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def angles(count: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(count, 32, device="cuda")
    return angle.cos(), angle.sin()


def ring(count: int) -> RowWrite:
    """Every row to the ring of a sequence of its own."""
    raw = torch.zeros(count, 192, 528, dtype=torch.uint8, device="cuda")
    sequence = torch.arange(count, device="cuda")
    return RowWrite(normal(count, HEAD), raw, FP8_ROW, None, sequence, sequence * 7)


def pages(count: int) -> tuple[RowWrite, RowWrite]:
    """Entries and keys of one source, one page a sequence."""
    number = torch.arange(count, device="cuda") % 64
    order = torch.randperm(count, device="cuda").int().unsqueeze(1)
    at = (order, torch.arange(count, device="cuda"), number)
    entries = torch.zeros(count, 64, 288, dtype=torch.uint8, device="cuda")
    keys = torch.zeros(count, 64, 68, dtype=torch.uint8, device="cuda")
    return (
        RowWrite(normal(count, HEAD), entries, FP4_MAIN, *at),
        RowWrite(normal(count, KEY), keys, FP4_ROW, *at),
    )


def written(op: Callable[..., None]) -> Callable[..., Tensor]:
    def call(*writes: RowWrite) -> Tensor:
        op(writes)
        return writes[0].raw

    return call


def window(op: Callable[..., None]) -> Callable[..., Tensor]:
    def call(one: RowWrite, weight: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        op(one, weight, 1e-6, rotary)
        return one.raw

    return call


def reuse(count: int) -> tuple[InPlace | Append, ...]:
    """Queries and window row: what every layer does before attention."""
    queries = InPlace(normal(count, HEADS, HEAD), None, angles(count))
    return queries, Append(ring(count), normal(HEAD), angles(count))


def full(count: int) -> tuple[InPlace | Append, ...]:
    """The same with entry and index key."""
    entries, keys = pages(count)
    more = Append(entries, None, angles(count)), Append(keys, normal(KEY), angles(count))
    return *reuse(count), *more


def several(op: Callable[..., None]) -> Callable[..., Tensor]:
    def call(*jobs: InPlace | Append) -> Tensor:
        op(jobs, 1e-6)
        return jobs[1].write.raw

    return call


def residues(count: int) -> tuple[Any, ...]:
    """Every second token finishes a group that began in an earlier call."""
    slot = torch.arange(count, device="cuda")
    both = torch.randn(2, count, HEAD, device="cuda")
    rings = torch.randn(count, 7, 2, HEAD, device="cuda")
    return Residues(both[0], both[1], rings, slot, slot + 9), 2, torch.bfloat16, normal(HEAD), 1e-6


def history(count: int) -> tuple[Any, ...]:
    slot = torch.arange(count, device="cuda")
    multipliers = torch.randint(2**45, (2, 4), device="cuda") * 2 + 1
    primes = torch.randint(15_000_000, 16_000_000, (2, 3, 8), device="cuda")
    offsets = primes.flatten(1).cumsum(1) - primes.flatten(1)
    held = torch.randint(99092, (count, 9), device="cuda")
    classes = torch.randint(99092, (count,), device="cuda")
    return History(classes, held, slot, slot + 5), multipliers, primes, offsets, 2


def gated(count: int) -> tuple[Any, ...]:
    keys, value = normal(count, 5 * DIM).split((4 * DIM, DIM), dim=1)
    weights = normal(4, DIM), normal(4, DIM)
    return normal(count, 4, DIM), keys.unflatten(1, (4, DIM)), value, *weights, 1e-6, None


def cases(count: int, table: tuple[Tensor, Tensor]) -> list[Case]:
    def ids() -> tuple[Any, ...]:
        found = torch.randint(0, len(table[0]), (count, COLUMNS), device="cuda")
        return *table, found, torch.bfloat16

    def turned(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return plain_latent.latent(x, None, 0.0, rotary, None)

    found = [
        Case(
            "norm", count * RANK * 4, lambda: (normal(count, RANK), normal(RANK), 1e-6),
            norm.rms_norm, plain_norm.rms_norm, wide=True,
        ),
        Case(
            "cast to fp8 per 32", count * DIM * 4, lambda: (normal(count, DIM), FP8_ROW),
            cast.cast, plain_cast.cast,
        ),
        Case(
            "rotate queries", count * HEADS * HEAD * 4,
            lambda: (normal(count, HEADS, HEAD), angles(count)),
            lambda x, rotary: latent.rotate(x, *rotary), turned,
        ),
        Case(
            "append entries and keys", count * (2 * HEAD + 288 + 2 * KEY + 68),
            lambda: pages(count), written(write.kv_write), written(plain_write.kv_write),
            host_reads=True,
        ),
        Case(
            "norm, rotate, append window row", count * (2 * HEAD + 528 + 256),
            lambda: (ring(count), normal(HEAD), angles(count)),
            window(latent.latent_write), window(plain_latent.latent_write), host_reads=True,
        ),
        Case(
            "rotate queries in place, append window row",
            count * (HEADS * 64 * 4 + 2 * HEAD + 528 + 512), lambda: reuse(count),
            several(latent.latents), several(plain_latent.latents), host_reads=True,
        ),
        Case(
            "the same, and entry and index key",
            count * (HEADS * 64 * 4 + 4 * HEAD + 816 + 1024 + 2 * KEY + 68), lambda: full(count),
            several(latent.latents), several(plain_latent.latents), host_reads=True,
        ),
        Case(
            "engram rows", count * COLUMNS * (264 + 512 + 8), ids, rows.engram_rows,
            plain_rows.engram_rows,
        ),
        Case(
            "engram gate", count * 13 * DIM * 2, lambda: gated(count), gate.engram_gate,
            plain_gate.engram_gate, wide=True,
        ),
    ]  # fmt: skip
    if count > DECODE:
        return found
    at = torch.arange(count, device="cuda")
    return [
        *found,
        Case(
            "residue ring, pooled and normed", count * HEAD * (16 + 2 + 4), lambda: residues(count),
            compress.compress_ring, plain_compress.compress_ring, host_reads=True,
        ),
        Case(
            "engram ids of two layers", count * 8 * (4 + 2 * COLUMNS), lambda: history(count),
            hashing.engram_ids, plain_hash.engram_ids, host_reads=True,
        ),
        Case(
            "window places", count * 128 * 4, lambda: (at, at * 3, at, 128, 134),
            window_kernel.window_places, plain_window.window_places,
        ),
        Case(
            "three rotary tables", count * 3 * 64 * 4,
            lambda: (at * 3, torch.rand(3, 32, device="cuda"), (0, 0, 1)),
            lambda *inputs: rope.rotary_tables(*inputs)[0],
            lambda *inputs: plain_rope.rotary_tables(*inputs)[0], host_reads=True,
        ),
    ]  # fmt: skip


def widened(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v.double() if isinstance(v, Tensor) else v for v in inputs)


def main() -> None:
    need_gpu()
    report = Report("small")
    filled = quantize(torch.randn(1 << 20, 256, device="cuda"), FP8_ROW)
    table = (filled.codes, filled.scale)
    for count in (1, 32, 128, 8192):
        for case in cases(count, table):
            sets = [case.inputs() for _ in range(sets_for(case.moved, least=2, most=24))]
            # The reference goes first: what is appended twice stays the same.
            want = case.plain(*(widened(sets[0]) if case.wide else sets[0])).clone()
            found = case.ours(*sets[0])
            others: dict[str, Any] = {
                "pytorch": lambda c=case, s=sets: timed([lambda: c.plain(*s[0])], replays=8)
            }
            if case.host_reads:
                others = {"pytorch": "not timed: waits for the host, which no graph can hold"}
            elif "compile" in sys.argv[1:]:
                fast = torch.compile(case.plain)
                others["compiled"] = lambda f=fast, s=sets: timed(
                    [lambda i=i: f(*i) for i in s], replays=8
                )
            report.line(
                {"case": case.name, "tokens": count},
                floor=floor_us(case.moved, 0),
                error=relative_error(found, want),
                bound=2e-2,
                ours=lambda c=case, s=sets: timed([lambda i=i: c.ours(*i) for i in s]),
                others=others,
                bytes=case.moved,
            )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
