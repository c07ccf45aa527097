"""Computes Gluon kernels on a CPU with PyTorch, tensor by tensor. For tests only.

Triton's interpreter knows no Gluon. What a kernel computes does not depend on layouts, so its
Python code runs here with a stand-in for the language: tensors without layouts, pointers as places
in known buffers, copies that are done at once. Loads and stores out of bounds, and two stores to
one place, are errors. Inline assembly is interpreted, with the pairs of values that share a
register side by side in the last dimension, as they are in the layouts of operands.

It proves indexing, masks and formulas; layouts, races and what hardware rounds are for the device.
"""

import re
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.experimental.gluon import language as gluon_language

__all__ = ["Pointer", "launch"]

_TYPES = {
    "int8": torch.int8, "int32": torch.int32, "int64": torch.int64, "int16": torch.int16,
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float8e4nv": torch.float8_e4m3fn,
}  # fmt: skip


class Value:
    """A tensor as kernels see it."""

    def __init__(self, raw: Any) -> None:
        self.raw = torch.as_tensor(raw)
        self.type = SimpleNamespace(layout=None)

    def to(self, kind: torch.dtype, bitcast: bool = False) -> "Value":
        return Value(self.raw.view(kind) if bitcast else self.raw.to(kind))

    def broadcast_to(self, shape: tuple[int, ...]) -> "Value":
        return Value(self.raw.broadcast_to(shape))

    def __getitem__(self, at: Any) -> "Value":
        return Value(self.raw[at])

    def __bool__(self) -> bool:
        return bool(self.raw)

    def __neg__(self) -> "Value":
        return Value(-self.raw)


def _operator(name: str, apply: Callable[[Any, Any], Any]) -> None:
    def forward(self: Value, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else Value(apply(self.raw, _raw(other)))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", lambda self, other: Value(apply(other, self.raw)))


for _name, _apply in {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b, "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "lshift": lambda a, b: a << b, "rshift": lambda a, b: a >> b,
}.items():  # fmt: skip
    _operator(_name, _apply)


class Pointer:
    """Places in buffers: which buffer, and how far into it."""

    buffers: ClassVar[list[Tensor]] = []

    def __init__(self, which: Tensor, offset: Tensor) -> None:
        self.which, self.offset = torch.broadcast_tensors(which, offset)

    @classmethod
    def to(cls, buffer: Tensor) -> "Pointer":
        """The first element of a buffer."""
        assert buffer.is_contiguous()
        cls.buffers.append(buffer.view(-1))
        return cls(torch.tensor(len(cls.buffers) - 1), torch.tensor(0))

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.buffers[int(self.which.flatten()[0])].dtype)

    def __add__(self, distance: Any) -> "Pointer":
        return Pointer(self.which, self.offset + _raw(distance))

    __radd__ = __add__

    def __sub__(self, distance: Any) -> "Pointer":
        return Pointer(self.which, self.offset - _raw(distance))

    def read(self, mask: Any, other: Any) -> Tensor:
        live = torch.broadcast_to(torch.as_tensor(_raw(mask)), self.offset.shape)
        found = None
        for number in self.which.unique().tolist():
            buffer, here = self.buffers[number], live & (self.which == number)
            _inside(self.offset[here], buffer)
            values = buffer[self.offset.where(here, 0)]
            found = torch.full_like(values, other) if found is None else found
            found = values.where(here, found)
        assert found is not None
        return found

    def write(self, values: Any, mask: Any) -> None:
        live = torch.broadcast_to(torch.as_tensor(_raw(mask)), self.offset.shape)
        buffer, at = self.buffers[int(self.which.flatten()[0])], self.offset[live]
        _inside(at, buffer)
        assert at.unique().numel() == at.numel(), "two stores to one place"
        buffer[at] = torch.broadcast_to(torch.as_tensor(_raw(values)), live.shape)[live].to(
            buffer.dtype
        )


class Shared:
    """Shared memory, poisoned."""

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    def index(self, slot: Any) -> "Shared":
        return Shared(self.raw[int(_raw(slot))])

    def slice(self, start: int, length: int, axis: int) -> "Shared":
        return Shared(self.raw.narrow(axis, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.raw.permute(order))

    def load(self, layout: Any) -> Value:
        return Value(self.raw.clone())

    def store(self, value: Value) -> None:
        self.raw.copy_(value.raw)

    def _reinterpret(self, kind: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.raw.view(kind).view(shape))

    def copy(self, source: Pointer, mask: Any = True) -> None:
        poison = torch.nan if self.raw.is_floating_point() else -1
        self.raw.copy_(source.read(mask, poison))


def launch(kernel: Any, grid: tuple[int, ...], *, warps: int, **arguments: Any) -> None:
    """Run every program of a launch; tensors become pointers to their first element."""
    given = {
        name: Pointer.to(value) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    run = _namespace(kernel.fn.__globals__, {})[kernel.fn.__name__]
    for y in range(grid[1]):
        for x in range(grid[0]):
            _LANGUAGE.program, _LANGUAGE.grid = (x, y), grid
            _LANGUAGE.warps = warps
            run(**given)


def _namespace(names: dict[str, Any], known: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A module's names with functions that see the stand-ins instead of the language."""
    if id(names) in known:
        return known[id(names)]
    found = known[id(names)] = dict(names)
    for name, value in names.items():
        function = getattr(value, "fn", None)
        if isinstance(function, FunctionType):
            home = _namespace(function.__globals__, known)
            found[name] = FunctionType(
                function.__code__, home, name, function.__defaults__, function.__closure__
            )
        elif isinstance(value, gluon_language.constexpr):
            found[name] = value.value
        elif name in _STAND_INS:
            found[name] = _STAND_INS[name]
        elif callable(value) and name.endswith("_layout"):
            found[name] = lambda *a: None
    return found


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, (Value, Shared)) else value


def _inside(at: Tensor, buffer: Tensor) -> None:
    assert not at.numel() or 0 <= int(at.min()) <= int(at.max()) < len(buffer), "out of bounds"


def _where(condition: Any, a: Any, b: Any) -> Any:
    chosen = _raw(condition)
    if isinstance(a, Pointer):
        which = torch.where(chosen, a.which, b.which)
        return Pointer(which, torch.where(chosen, a.offset, b.offset))
    return Value(torch.where(chosen, _raw(a), _raw(b)))


def _multiplied(a: Any, b: Any, acc: Any, is_async: bool = False) -> Value:
    return Value(acc.raw + (_raw(a).double() @ _raw(b).double()).float())


def _split(value: Value) -> tuple[Value, Value]:
    return Value(value.raw[..., 0]), Value(value.raw[..., 1])


def _extreme(name: str) -> Callable[[Any, Any], Value]:
    function = getattr(torch, name)

    def apply(a: Any, b: Any) -> Value:
        a, b = torch.as_tensor(_raw(a)), torch.as_tensor(_raw(b))
        return Value(function(a, b.to(a.dtype)))

    return apply


def _assembly(
    code: str, constraints: str, arguments: list[Value], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """Two values a call, side by side; a tuple of pairs of bfloat16."""
    outputs = constraints.count("=")
    if not isinstance(dtype, tuple):
        return None  # an instruction without a result
    registers: dict[str, Tensor] = {}
    for number, argument in enumerate(arguments):
        pairs = argument.raw.unflatten(-1, (-1, 2)).to(torch.int64)
        for place in range(2):
            registers[f"${outputs + 2 * number + place}"] = pairs[..., place]
    for text in re.findall(r"(\w[\w.]+)\s+([^;]+);", re.sub(r"\.reg[^;]+;", "", code)):
        _instruction(text[0], re.split(r",\s*(?![^{]*\})", text[1].strip()), registers)
    found = []
    for number in range(outputs):
        halves = torch.stack([registers[f"${number}"] & 0xFFFF, registers[f"${number}"] >> 16], -1)
        found.append(Value(_bfloat16(halves).flatten(-2)))
    return tuple(found)


def _bfloat16(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def _instruction(name: str, operands: list[str], registers: dict[str, Tensor]) -> None:
    into = operands[0]
    values = [registers[o] if o in registers else int(o, 0) for o in operands[1:]]
    if name == "mov.b64":
        low, high = into.strip("{}").split(", ")
        registers[low], registers[high] = values[0] & 0xFFFFFFFF, values[0] >> 32 & 0xFFFFFFFF
        return
    a, b = (v & 0xFFFFFFFF for v in values[:2])
    if name == "and.b32":
        out = a & b
    elif name == "shr.u32":
        out = a >> b
    elif name == "mul.lo.u32":
        out = a * b & 0xFFFFFFFF
    elif name == "lop3.b32":
        assert values[3] == 0xEA
        out = (a & b) | values[2]
    elif name == "prmt.b32":
        both = a | b << 32
        out = sum((both >> 8 * (values[2] >> 4 * n & 7) & 255) << 8 * n for n in range(4))
    else:
        assert name == "mul.rn.bf16x2", name
        halves = [_bfloat16(a >> n & 0xFFFF) * _bfloat16(b >> n & 0xFFFF) for n in (0, 16)]
        low, high = (h.view(torch.int16).to(torch.int64) & 0xFFFF for h in halves)
        out = low | high << 16
    registers[into] = out


def _atomic_add(at: Pointer, value: int, sem: str | None = None) -> Value:
    """Of one number: what was there before."""
    old = at.read(True, 0)
    at.write(old + value, True)
    return Value(old)


class _Language(SimpleNamespace):
    program: tuple[int, ...] = (0, 0)
    grid: tuple[int, ...] = (1, 1)
    warps = 4


_LANGUAGE = _Language(
    **_TYPES,
    constexpr=lambda value: value,
    num_warps=lambda: _LANGUAGE.warps,
    program_id=lambda axis: Value(torch.tensor(_LANGUAGE.program[axis], dtype=torch.int32)),
    num_programs=lambda axis: _LANGUAGE.grid[axis],
    atomic_add=_atomic_add,
    arange=lambda a, b, layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
    zeros=lambda shape, kind, layout=None: Value(torch.zeros(shape, dtype=kind)),
    full=lambda shape, value, kind, layout=None: Value(torch.full(shape, value, dtype=kind)),
    static_range=range,
    convert_layout=lambda value, layout, assert_trivial=False: value,
    reshape=lambda value, shape: Value(value.raw.reshape(shape)),
    permute=lambda value, order: Value(value.raw.permute(order)),
    expand_dims=lambda value, axis: Value(value.raw.unsqueeze(axis)),
    split=_split,
    where=_where,
    minimum=_extreme("minimum"),
    maximum=_extreme("maximum"),
    max=lambda value, axis: Value(value.raw.amax(axis)),
    exp=lambda value: Value(value.raw.exp()),
    load=lambda at, mask=True, other=0, **hints: Value(at.read(mask, other)),
    store=lambda at, value, mask=True: at.write(value, mask),
    inline_asm_elementwise=_assembly,
    allocate_shared_memory=lambda kind, shape, layout: Shared(
        torch.full(shape, torch.nan if kind.is_floating_point else -1, dtype=kind)
    ),
    **dict.fromkeys(
        (
            "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMASharedLayout",
            "NVMMADistributedLayout", "SliceLayout", "SwizzledSharedLayout",
        ),
        lambda *a, **k: None,
    ),
)  # fmt: skip
_STAND_INS: dict[str, Any] = {
    "gl": _LANGUAGE,
    "mma_v2": _multiplied,
    "_barrier": lambda: None,
    "tl": SimpleNamespace(constexpr=object),
    "hopper": SimpleNamespace(
        warpgroup_mma=_multiplied,
        warpgroup_mma_wait=lambda count, deps: deps[0] if len(deps) == 1 else deps,
        fence_async_shared=lambda: None,
    ),
    "async_copy": SimpleNamespace(
        async_copy_global_to_shared=lambda into, source, mask=True: into.copy(source, mask),
        commit_group=lambda: None,
        wait_group=lambda count: None,
    ),
}
