"""Engram at decode: look-up from a table on the device and from one in host memory, and the gate.

`lookup` times the look-up of one layer alone; `pinned_gb_per_s` is what crosses the bus. `layer`
puts look-up and gate behind a layer: with the table in host memory its rows are fetched while the
layer runs. The layer is a stand-in, one kernel that moves as many bytes as the layer has to read at
least (routed and shared experts, projections); a real one takes longer and hides more. `over_layer`
is what look-up and gate add to it. `gate` is the gate alone, beside DeepSeek's own TileLang kernel
if it can be imported.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.ops.measure import (
    Report,
    floor_us,
    need_gpu,
    relative_error,
    sets_for,
    timed,
)
from benchmarks.ops.peers import tile_kernels
from torch import Tensor

from cedar.memory import PinnedTable
from cedar.ops.engram_gate import reference as plain_gate
from cedar.ops.engram_gate.triton import engram_gate
from cedar.ops.engram_rows import reference as plain_rows
from cedar.ops.engram_rows.triton import engram_rows
from cedar.quant import FP8_ROW, quantize

DIM, STREAMS, WIDTH, COLUMNS = 5120, 4, 256, 24
ROWS = 1 << 22
TOKENS = (1, 8, 32, 128)
EXPERTS, ACTIVE = 384, 6

Table = tuple[Tensor, Tensor]


def layer_bytes(tokens: int) -> int:
    """The least that a layer reads: the experts of so many tokens, the shared one, projections."""
    expert = 3 * DIM * 2304 * 17 // 32
    touched = EXPERTS * (1 - (1 - ACTIVE / EXPERTS) ** tokens)
    return int(touched * expert + 35.4e6 + 3.9e6 + 126.6e6)


def tables() -> tuple[Table, PinnedTable]:
    """The same rows twice: packed on the device, and in host memory."""
    packed = torch.empty(ROWS, WIDTH + WIDTH // 32, dtype=torch.uint8, device="cuda")
    for part in packed.split(1 << 20):
        filled = quantize(torch.randn(len(part), WIDTH, device="cuda"), FP8_ROW)
        part[:, :WIDTH] = filled.codes.view(torch.uint8)
        part[:, WIDTH:] = filled.scale
    codes, scale = packed[:, :WIDTH].view(torch.float8_e4m3fn), packed[:, WIDTH:]
    host = PinnedTable((ROWS, WIDTH), engram_rows, "cuda")
    host.fill(0, codes, scale)
    return (codes, scale), host


def lookup(report: Report, tokens: int, table: Table, host: PinnedTable) -> None:
    sets = [torch.randint(ROWS, (tokens, COLUMNS), device="cuda") for _ in range(24)]
    want = plain_rows.engram_rows(*table, sets[0], torch.bfloat16)
    found = engram_rows(*table, sets[0], torch.bfloat16)
    same = torch.equal(host.rows(sets[0]), want)
    away = timed([lambda ids=ids: host.rows(ids) for ids in sets], replays=12)
    rows = tokens * COLUMNS
    report.line(
        {"case": "lookup", "tokens": tokens},
        floor=floor_us(rows * (264 + 512 + 8), 0),
        error=relative_error(found, want) if same else float("nan"),
        bound=0.0,
        ours=lambda: timed([lambda i=i: engram_rows(*table, i, torch.bfloat16) for i in sets]),
        others={
            "pinned": lambda: away,
            "pytorch": lambda: timed(
                [lambda i=i: plain_rows.engram_rows(*table, i, torch.bfloat16) for i in sets[:2]],
                replays=8,
            ),
        },
        pinned_gb_per_s=round(rows * 264 / away[0] / 1e3, 1),
        table_bytes=ROWS * 264,
    )


def gate_inputs(tokens: int) -> tuple[Any, ...]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    keys, value = normal(tokens, 5 * DIM).split((STREAMS * DIM, DIM), dim=1)
    weights = normal(STREAMS, DIM), normal(STREAMS, DIM)
    return normal(tokens, STREAMS, DIM), keys.unflatten(1, (STREAMS, DIM)), value, *weights


def gate(report: Report, tokens: int) -> None:
    sets = [gate_inputs(tokens) for _ in range(sets_for(tokens * 13 * DIM * 2, least=2))]
    wide = plain_gate.engram_gate(*(v.double() for v in sets[0]), 1e-20, None)
    peers = tile_kernels.engram_gate(sets, 1e-20)
    moved = tokens * 13 * DIM * 2

    def sample(function: Callable[..., Tensor]) -> tuple[float, float, float]:
        return timed([lambda s=s: function(*s, 1e-20, None) for s in sets], replays=12)

    report.line(
        {"case": "gate", "tokens": tokens},
        floor=floor_us(moved, 0),
        error=relative_error(engram_gate(*sets[0], 1e-20, None), wide),
        bound=2**-8,
        ours=lambda: sample(engram_gate),
        others={**peers.others, "pytorch": lambda: sample(plain_gate.engram_gate)},
        bytes=moved,
        **peers.more,
    )


def layer(report: Report, tokens: int, table: Table, host: PinnedTable) -> None:
    weights = torch.randint(1 << 31, (layer_bytes(tokens) // 8,), device="cuda").int()
    moved = torch.empty_like(weights)
    sets = [(torch.randint(ROWS, (tokens, COLUMNS), device="cuda"), gate_inputs(tokens))
            for _ in range(8)]  # fmt: skip

    def alone(ids: Tensor, inputs: tuple[Any, ...]) -> None:
        torch.bitwise_not(weights, out=moved)

    def on_device(ids: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        torch.bitwise_not(weights, out=moved)
        engram_rows(*table, ids, torch.bfloat16)
        return engram_gate(*inputs, 1e-20, None)

    def hidden(ids: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        host.prefetch(ids)
        torch.bitwise_not(weights, out=moved)
        host.rows(ids)
        return engram_gate(*inputs, 1e-20, None)

    def in_line(ids: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        torch.bitwise_not(weights, out=moved)
        host.rows(ids)
        return engram_gate(*inputs, 1e-20, None)

    def sample(call: Callable[..., Any]) -> tuple[float, float, float]:
        return timed([lambda s=s: call(*s) for s in sets], replays=12)

    ids, inputs = sets[0]
    torch.cuda.synchronize()  # what follows runs on other streams
    wide = plain_gate.engram_gate(*(v.double() for v in inputs), 1e-20, None)
    base, fetched, device = sample(alone), sample(hidden), sample(on_device)
    extra = tokens * (COLUMNS * (264 + 512 + 8) + 13 * DIM * 2)
    report.line(
        {"case": "layer", "tokens": tokens},
        floor=floor_us(layer_bytes(tokens) + extra, 0),
        error=relative_error(hidden(ids, inputs), wide),
        bound=2**-8,
        ours=lambda: fetched,
        others={
            "layer_alone": lambda: base,
            "device_table": lambda: device,
            "pinned_in_line": lambda: sample(in_line),
        },
        over_layer=round(fetched[0] / base[0] - 1, 4),
        over_layer_device_table=round(device[0] / base[0] - 1, 4),
    )


def main() -> None:
    need_gpu()
    report = Report("engram")
    for tokens in (*TOKENS, 8192):
        gate(report, tokens)
    if sys.argv[1:] == ["gate"]:
        return
    table, host = tables()
    for tokens in (*TOKENS, 8192):
        lookup(report, tokens, table, host)
    for tokens in TOKENS:
        layer(report, tokens, table, host)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
