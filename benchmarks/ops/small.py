"""The small fused kernels at released shapes: casts, rotations, appends of cache rows, Engram.

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
from cedar.ops.engram_gate import reference as plain_gate
from cedar.ops.engram_gate import triton as gate
from cedar.ops.engram_rows import reference as plain_rows
from cedar.ops.engram_rows import triton as rows
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write import reference as plain_write
from cedar.ops.kv_write import triton as write
from cedar.ops.latent import reference as plain_latent
from cedar.ops.latent import triton as latent
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW, quantize

DIM, HEADS, HEAD, KEY = 5120, 64, 512, 128


class Case(NamedTuple):
    """An operation and its reference on the same inputs, the bytes it has to move."""

    name: str
    moved: int
    inputs: Callable[[], tuple[Any, ...]]
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]


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


def gated(count: int) -> tuple[Any, ...]:
    keys, value = normal(count, 5 * DIM).split((4 * DIM, DIM), dim=1)
    weights = normal(4, DIM), normal(4, DIM)
    return normal(count, 4, DIM), keys.unflatten(1, (4, DIM)), value, *weights, 1e-6, None


def cases(count: int, table: tuple[Tensor, Tensor]) -> list[Case]:
    def ids() -> tuple[Any, ...]:
        found = torch.randint(0, len(table[0]), (count, 48), device="cuda")
        return *table, found, torch.bfloat16

    def turned(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return plain_latent.latent(x, None, 0.0, rotary, None)

    return [
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
        ),
        Case(
            "norm, rotate, append window row", count * (2 * HEAD + 528 + 256),
            lambda: (ring(count), normal(HEAD), angles(count)),
            window(latent.latent_write), window(plain_latent.latent_write),
        ),
        Case(
            "engram rows", count * 48 * (264 + 512 + 8), ids, rows.engram_rows,
            plain_rows.engram_rows,
        ),
        Case(
            "engram gate", count * 13 * DIM * 2, lambda: gated(count), gate.engram_gate,
            plain_gate.engram_gate,
        ),
    ]  # fmt: skip


def main() -> None:
    need_gpu()
    report = Report("small")
    filled = quantize(torch.randn(1 << 20, 256, device="cuda"), FP8_ROW)
    table = (filled.codes, filled.scale)
    for count in (1, 128, 4096):
        for case in cases(count, table):
            sets = [case.inputs() for _ in range(sets_for(case.moved, least=2, most=24))]
            # The reference goes first: what is appended twice stays the same.
            want = case.plain(*sets[0]).clone()
            found = case.ours(*sets[0])
            others: dict[str, Any] = {
                "pytorch": lambda c=case, s=sets: timed([lambda: c.plain(*s[0])], replays=8)
            }
            if "append" in case.name:
                others = {"pytorch": "not timed: indexing by a mask reads on the host"}
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
