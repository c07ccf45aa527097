"""The large launch of mHC's gradients for Hopper, computed on a CPU: equal to its formulas."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

import gluon_interpreter
from cedar.ops.mhc import backward_gluon
from gluon_interpreter import Pointer, Shared, Value, launch

WIDTH = 128


@pytest.fixture(autouse=True)
def language(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this kernel needs beside what those of the experts do."""

    def seen_as(self: Shared, kind: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.raw.view(kind).view(shape))

    def counted(first: Any, stop: Any, step: int = 1) -> list[Value]:
        steps = range(int(first), int(stop), step)
        return [Value(torch.tensor(n, dtype=torch.int32)) for n in steps]

    members: dict[type, dict[str, Any]] = {
        Value: {
            "__index__": lambda self: int(self.raw),
            "shape": property(lambda self: self.raw.shape),
        },
        Shared: {
            "store": lambda self, value: self.raw.copy_(value.raw),
            "slice": lambda self, a, n, dim=0: Shared(self.raw.narrow(dim, a, n)),
            "_reinterpret": seen_as,
            # Masked copies of this width fill with zeros.
            "copy": lambda self, source, mask=True: self.raw.copy_(source.read(mask, 0)),
        },
    }
    for kind, functions in members.items():
        for name, function in functions.items():
            monkeypatch.setattr(kind, name, function, raising=False)
    words: dict[str, Any] = {
        "join": lambda a, b: Value(torch.stack([a.raw, b.raw], -1)),
        "sum": lambda value, axis: Value(value.raw.sum(axis)),
        # Rounds to bfloat16, or gives back its argument.
        "inline_asm_elementwise": lambda code, constraints, arguments, dtype, **_: (
            Value(arguments[0].raw.bfloat16()) if "bf16" in code else arguments[0]
        ),
    }
    for name, function in words.items():
        monkeypatch.setattr(gluon_interpreter._LANGUAGE, name, function, raising=False)
    monkeypatch.setitem(gluon_interpreter._STAND_INS, "barrier", lambda: None)
    monkeypatch.setitem(gluon_interpreter._STAND_INS, "range", counted)
    monkeypatch.setattr(backward_gluon, "range", counted, raising=False)


def inputs(count: int) -> tuple[dict[str, Tensor], Tensor]:
    """The kernel's inputs; and of every token what its table says, and its ζ: ``[count, 64]``."""
    g = torch.Generator().manual_seed(count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    rows = -(-count // 32) * 32
    said, zeta = normal(rows, 32), normal(rows, 32)
    zeta[:, 24:] = 0.0
    high = zeta.bfloat16()
    cut = torch.stack([high.view(-1, 16, 32), (zeta - high.float()).bfloat16().view(-1, 16, 32)], 1)
    values = {
        "x": normal(count, 4, WIDTH).bfloat16(), "y": normal(count, WIDTH).bfloat16(),
        "fn": normal(24, 4 * WIDTH), "weight": normal(WIDTH).bfloat16(),
        "table": said.view(-1, 16, 8, 4).transpose(1, 2).contiguous(), "cut": cut,
        "dx_new": normal(count, 4, WIDTH).bfloat16(), "dh": normal(count, WIDTH).bfloat16(),
    }  # fmt: skip
    return values, torch.cat([said, zeta], 1)[:count]


def formulas(values: dict[str, Tensor], said: Tensor) -> dict[str, Tensor]:
    """Of `cedar.ops.mhc.backward_triton`, in float64."""
    v = {name: value.double() for name, value in values.items()}
    said = said.double()
    rate, share, kappa = said[:, :1], said[:, 1:2], said[:, 2:3, None]
    pre, post, comb = said[:, 4:8], said[:, 8:12], said[:, 12:28].view(-1, 4, 4)
    zeta, fn = said[:, 32:56], v["fn"].view(24, 4, WIDTH)
    new = torch.einsum("tji,tjd->tid", comb, v["x"]) + post[..., None] * v["y"][:, None]
    c = (pre[..., None] * new).sum(1)
    dc = rate * v["weight"] * v["dh"] - share * c
    g = v["dx_new"] + pre[..., None] * dc[:, None] - kappa * new
    g = g + torch.einsum("tk,kid->tid", zeta, fn)
    sums = (
        torch.einsum("td,tid->ti", dc, new), torch.einsum("td,tid->ti", v["y"], g),
        torch.einsum("tjd,tid->tji", v["x"], g).flatten(1),
    )  # fmt: skip
    return {
        "dx": torch.einsum("tji,tid->tjd", comb, g), "dy": (post[..., None] * g).sum(1),
        "sums": torch.cat(sums, 1),
        "fn_parts": torch.einsum("tk,tid->kid", zeta, new).flatten(1),
        "weight_parts": (rate * c * v["dh"]).sum(0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("count", "times", "tail", "extra", "each"),
    [(5, 1, 5, 0, 1), (75, 2, 75, 0, 1), (100, 2, 64, 1, 2), (133, 1, 48, 2, 1)],
)
def test_equals_the_formulas(count: int, times: int, tail: int, extra: int, each: int) -> None:
    """Odd numbers of tokens, several times and programs for the rest; outputs poisoned."""
    values, said = inputs(count)
    slices, parts, blocks = WIDTH // 64, times + (extra > 0), -(-count // 32)
    shapes = {
        "dx": (count, 4, WIDTH), "dy": (count, WIDTH), "sums": (slices, blocks, 24, 32),
        "fn_parts": (parts, 24, 4 * WIDTH), "weight_parts": (parts, WIDTH),
    }  # fmt: skip
    found = {
        name: torch.full(
            shape, torch.nan, dtype=torch.bfloat16 if name in ("dx", "dy") else torch.float32
        )
        for name, shape in shapes.items()
    }
    numbers = {"count": count, "tail": tail, "per_program": -(-tail // times // 16) * 16}
    launch(
        backward_gluon.kernel, (slices * times + extra, 1), warps=4, **values, **found,
        **{name: Value(torch.tensor(n, dtype=torch.int32)) for name, n in numbers.items()},
        D=WIDTH, TIMES=times, EACH=each, PDL=False,
    )  # fmt: skip
    Pointer.buffers.clear()
    sums = found["sums"].sum(0).transpose(1, 2).flatten(0, 1)[:count]
    got = found | {"sums": sums} | {n: found[n].sum(0) for n in ("fn_parts", "weight_parts")}
    for name, want in formulas(values, said).items():
        error = float((got[name].double() - want).norm() / want.norm())
        # fn, ζ and the new streams are rounded to bfloat16 where tensor cores multiply them.
        assert error < 4e-3, (name, error)
