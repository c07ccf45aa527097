"""The Hopper kernel of mHC for few tokens, on a CPU: all programs at once, as they wait."""

import os
import threading
import time
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

import gluon_interpreter
from cedar.ops.mhc import MhcMix, hopper_few
from cedar.ops.mhc import reference as plain
from cedar.testing import assert_bitwise, assert_close
from gluon_interpreter import Pointer, Value
from kernel_cases import mhc_case

SETTINGS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}
THREAD = threading.local()
LIMIT = 20  # seconds for which a program waits for another


def raw(value: Any) -> Any:
    return getattr(value, "raw", value)


def read(at: Pointer, mask: Any = True, other: Any = 0, **_: Any) -> Value:
    """As the interpreter, with a mask that may hold nowhere and a value for what it leaves out."""
    live = torch.broadcast_to(torch.as_tensor(raw(mask)), at.offset.shape)
    buffer = Pointer.buffers[int(at.which.flatten()[0])]
    if not live.any():
        return Value(torch.full(at.offset.shape, int(raw(other)), dtype=buffer.dtype))
    return Value(at.read(live, int(raw(other))))


def write(at: Pointer, values: Any, mask: Any = True) -> None:
    """As the interpreter, into several buffers."""
    live = torch.broadcast_to(torch.as_tensor(raw(mask)), at.offset.shape)
    for number in at.which.unique().tolist():
        here = live & (at.which == number)
        Pointer(torch.tensor(number), at.offset).write(values, here)


def awaited(line: Pointer, known: Value, tag: Value) -> Value:
    """What the assembly does: words whose upper half is the number that is due."""
    due, end = int(tag.raw), time.monotonic() + LIMIT
    while True:
        words = read(line, known, due << 32).raw
        if (words >> 32 == due).all():
            low = words & 0xFFFFFFFF
            return Value(low.where(low < 2**31, low - 2**32).to(torch.int32).view(torch.float32))
        assert time.monotonic() < end, "a sum that nobody sends"
        time.sleep(0.01)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().bfloat16().view(torch.int16).to(torch.int32)


def halves(words: Tensor) -> Tensor:
    """The two bfloat16 of a word, in float64."""
    both = torch.stack([words << 16, words & -65536], -1)
    return both.contiguous().view(torch.float32).double()


def multiplied(z: Tensor, stream: Tensor, *lefts: Tensor) -> Tensor:
    """Two ``mma.m16n8k16`` in each warp: [warp, row, word]."""
    total = z.double()
    for place, left in enumerate(lefts):
        # A thread (g, q) has of rows g and g + 8 the near two channels, then the far two.
        a = halves(left.reshape(-1, 8, 4, 2, 2)).movedim(-2, 1).flatten(1, 2)
        b = halves(stream.reshape(-1, 8, 4, 2, 2)[..., place, :])
        c = torch.einsum("wrqke,wnqke->wrn", a, b).reshape(-1, 2, 8, 4, 2)
        total = total + c.permute(0, 2, 3, 1, 4).reshape(z.shape)
    return total.float()


def assembly(code: str, constraints: str, arguments: list[Value], *_: Any, **__: Any) -> Value:
    values = torch.broadcast_tensors(*(a.raw for a in arguments))
    if "cvt.rn.bf16x2" in code:
        return Value((bits(values[0]) & 0xFFFF) | bits(values[1]) << 16)
    if "rcp" in code:
        return Value(1 / values[0])
    assert "mma.sync" in code, code
    return Value(multiplied(*values))


def counted(*bounds: Any) -> list[Value]:
    return [
        Value(torch.tensor(n, dtype=torch.int32)) for n in range(*(int(raw(b)) for b in bounds))
    ]


@pytest.fixture(autouse=True)
def language(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these kernels use and the interpreter lacks."""
    add: dict[str, Any] = {
        "program_id": lambda axis: Value(torch.tensor(THREAD.program, dtype=torch.int32)),
        "inline_asm_elementwise": assembly,
        "load": read,
        "store": write,
        "join": lambda a, b: Value(torch.stack([a.raw, b.raw], -1)),
        "sum": lambda value, axis: Value(value.raw.sum(axis)),
        "rsqrt": lambda value: Value(value.raw.rsqrt()),
        "uint32": torch.uint32,
    }
    for name, value in add.items():
        monkeypatch.setattr(gluon_interpreter._LANGUAGE, name, value, raising=False)
    monkeypatch.setitem(gluon_interpreter._STAND_INS, "tl", gluon_interpreter._LANGUAGE)
    monkeypatch.setattr(Value, "__index__", lambda self: int(self.raw), raising=False)
    namespace = gluon_interpreter._namespace

    def extended(names: dict[str, Any], known: dict[int, dict[str, Any]]) -> dict[str, Any]:
        found = namespace(names, known)
        found["range"] = counted
        if "_awaited" in found:
            found["_awaited"] = awaited
        return found

    monkeypatch.setattr(gluon_interpreter, "_namespace", extended)


def launched(kernel: Any, programs: int, **arguments: Any) -> None:
    """Every program in a thread of its own."""
    Pointer.buffers.clear()
    given = {k: Pointer.to(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    given["count"] = Value(torch.tensor(arguments["count"], dtype=torch.int32))
    names = gluon_interpreter._namespace(kernel.fn.__globals__, {})
    run: FunctionType = names[kernel.fn.__name__]
    failed: list[Exception] = []

    def program(number: int) -> None:
        THREAD.program = number
        try:
            run(**given)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=program, args=(n,)) for n in range(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def poison(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize(("count", "width"), [(1, 128), (8, 256), (11, 640)])
def test_few(count: int, width: int, update: bool) -> None:
    """Three launches on the same places: whole and odd tiles, one slice and several."""
    x, (y, old), pre, parameters, weight = mhc_case(
        seed=count, count=count, width=width, dtype=torch.bfloat16
    )
    slices, tiles = width // 128, -(-count // 8)
    words = torch.int32
    places = {
        "parts": torch.zeros(tiles * 8 * slices * 32, dtype=torch.int64),
        "squares": torch.zeros(tiles * 8 * slices, dtype=torch.int64),
        "launches": torch.zeros(tiles * (slices + 8), dtype=words),
    }
    first = None
    for _ in range(3):
        out = torch.full_like(x, torch.nan) if update else x.clone()
        mix, h = (poison(count, 4), poison(count, 4), poison(count, 4, 4)), torch.full_like(y, -7)
        launched(
            hopper_few.few, tiles * (slices + 8), x=x.view(words),
            y=y.view(words) if update else None, comb=old.comb_TCC, post=old.post_TC, pre=pre,
            fn=parameters.fn, base=parameters.base, scale=parameters.scale,
            weight=weight.view(words), x_out=out.view(words), pre_out=mix[0], post_out=mix[1],
            comb_out=mix[2], h=h.view(words), **places, count=count, norm_eps=1e-20, hc_eps=1e-6,
            D=width, UPDATE=update, ITERATIONS=20,
        )  # fmt: skip
        if update:
            wide = MhcMix(*(v.double() for v in old))
            assert_close(out, plain.mhc_expand(x.double(), y.double(), wide), "bfloat16 op")
        _, want, want_h = plain.mhc_step(
            out.double(), None, pre.double(), parameters, weight, **SETTINGS
        )
        for found, expected in zip(mix, want, strict=True):
            assert (found - expected).abs().max() < 1e-5
        assert (h - want_h).abs().max() <= 2**-7 * want_h.abs().max()
        first = first or (out, *mix, h)
        for a, b in zip((out, *mix, h), first, strict=True):
            assert_bitwise(a, b)
    assert places["launches"].unique().tolist() == [3]


def test_a_sum_that_nobody_sends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a program that is not there stops the others."""
    monkeypatch.setattr(f"{__name__}.LIMIT", 0.2)
    count, width = 1, 256
    x, (y, old), pre, parameters, weight = mhc_case(
        seed=1, count=count, width=width, dtype=torch.bfloat16
    )
    words = torch.int32
    with pytest.raises(AssertionError, match="nobody sends"):
        launched(
            hopper_few.few, 1, x=x.view(words), y=y.view(words), comb=old.comb_TCC,
            post=old.post_TC, pre=pre, fn=parameters.fn, base=parameters.base,
            scale=parameters.scale, weight=weight.view(words),
            x_out=torch.empty_like(x).view(words), pre_out=poison(count, 4),
            post_out=poison(count, 4), comb_out=poison(count, 4, 4),
            h=torch.empty_like(y).view(words), parts=torch.zeros(8 * 64, dtype=torch.int64),
            squares=torch.zeros(16, dtype=torch.int64), launches=torch.zeros(10, dtype=words),
            count=count, norm_eps=1e-20, hc_eps=1e-6, D=width, UPDATE=True, ITERATIONS=20,
        )  # fmt: skip
