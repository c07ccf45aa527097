"""Computes Gluon kernels on a CPU whose groups of warps and programs wait for each other.

For tests only. As `gluon_interpreter`: tensors without layouts, copies that are done at once. Here
all programs ``(0, y, z), (1, y, z), ...`` run together, every group of their warps in a thread;
pointers may be reinterpreted, so buffers are bytes; inline assembly computes single 32-bit words.
Loads and stores out of bounds, and two stores of one instruction to one place, are errors.

It proves indexing, masks and formulas; layouts, races and what hardware rounds are for the device.
"""

import operator
import re
import threading
import time
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gluon_language

__all__ = ["launch"]

_THREAD = threading.local()
_MOST_SECONDS = 30  # that anything waits
_WORD = 0xFFFFFFFF
_TYPES = {
    "int32": torch.int32, "int64": torch.int64, "float16": torch.float16,
    "float32": torch.float32, "bfloat16": torch.bfloat16,
}  # fmt: skip


class Value:
    """A tensor, in registers or in shared memory."""

    def __init__(self, raw: Any, *, sliced: bool = False) -> None:
        self.raw = torch.as_tensor(raw)
        self.sliced = sliced
        self.type = SimpleNamespace(layout=None)
        self.shape = self.raw.shape

    def to(self, kind: torch.dtype, bitcast: bool = False) -> "Value":
        return Value(self.raw.view(kind) if bitcast else self.raw.to(kind))

    def __getitem__(self, at: Any) -> "Value":
        return Value(self.raw[at])

    def __neg__(self) -> "Value":
        return Value(-self.raw)

    def __bool__(self) -> bool:
        return bool(self.raw)

    def index(self, number: int) -> "Value":
        return Value(self.raw[number])

    def slice(self, start: int, length: int, dim: int = 0) -> "Value":
        return Value(self.raw.narrow(dim, start, length), sliced=True)

    def permute(self, order: tuple[int, ...]) -> "Value":
        return Value(self.raw.permute(order))

    def store(self, value: Any) -> None:
        self.raw.copy_(_raw(value))

    def load(self, layout: Any) -> "Value":
        return Value(self.raw.clone())

    def _reinterpret(self, kind: torch.dtype, shape: list[int], layout: Any) -> "Value":
        # A compiler would take the slice for all of its memory, and place it as if it were.
        assert not self.sliced, "a slice of shared memory is reinterpreted"
        return Value(self.raw.view(kind).view(shape))


def _operator(name: str) -> None:
    apply = getattr(operator, name)

    def forward(self: Value, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else Value(apply(self.raw, _raw(other)))

    setattr(Value, f"__{name.strip('_')}__", forward)
    setattr(Value, f"__r{name.strip('_')}__", lambda self, other: Value(apply(other, self.raw)))


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "ge", "gt", "eq", "and_", "or_",
    "lshift", "rshift",
):  # fmt: skip
    _operator(_name)


class Barriers:
    """How many have to arrive at each, and how many have."""

    def __init__(self, count: int) -> None:
        self.needed, self.arrived = [0] * count, [0] * count

    def index(self, number: int) -> tuple["Barriers", int]:
        return self, number


def _arrive(at: tuple[Barriers, int], count: int) -> None:
    with _THREAD.lock:
        at[0].arrived[at[1]] += count


def _await(at: tuple[Barriers, int], phase: int) -> None:
    assert phase == 0
    _until(lambda: at[0].arrived[at[1]] == at[0].needed[at[1]])


def _until(done: Any) -> None:
    late = time.monotonic() + _MOST_SECONDS
    while not done():
        assert time.monotonic() < late, "waits for what does not come"
        time.sleep(0.001)


class Pointer:
    """Places in a buffer, in bytes."""

    def __init__(self, buffer: Tensor, offset: Tensor, kind: torch.dtype) -> None:
        self.buffer, self.offset, self.kind = buffer, offset, kind

    def __add__(self, distance: Any) -> "Pointer":
        moved = self.offset + torch.as_tensor(_raw(distance)).long() * self.kind.itemsize
        return Pointer(self.buffer, moved, self.kind)

    __radd__ = __add__

    def __getitem__(self, at: Any) -> "Pointer":
        return Pointer(self.buffer, self.offset[at], self.kind)

    def to(self, kind: torch.dtype) -> "Pointer":
        """Of another type; as a number it stays what it is."""
        return self if kind is torch.int64 else Pointer(self.buffer, self.offset, kind)

    def _bytes(self, offset: Tensor) -> Tensor:
        size = self.kind.itemsize
        if offset.numel():
            assert int(offset.min()) >= 0, "out of bounds"
            assert int(offset.max()) + size <= len(self.buffer), "out of bounds"
            assert not (offset % size).any(), "not aligned"
        return offset.unsqueeze(-1) + torch.arange(size)

    def read(self, mask: Any = True, other: Any = 0) -> Tensor:
        live = torch.as_tensor(_raw(mask)).expand(self.offset.shape)
        found = self.buffer[self._bytes(self.offset.where(live, 0))].view(self.kind)
        return found.squeeze(-1).where(live, torch.tensor(other, dtype=self.kind))

    def write(self, values: Any, mask: Any = True) -> None:
        raw = torch.as_tensor(_raw(values))
        shape = torch.broadcast_shapes(self.offset.shape, raw.shape)
        live = torch.as_tensor(_raw(mask)).expand(shape)
        at = self.offset.expand(shape)[live]
        assert at.unique().numel() == at.numel(), "two stores to one place"
        held = raw.expand(shape)[live].to(self.kind).contiguous()
        self.buffer[self._bytes(at)] = held.view(torch.uint8).view(-1, self.kind.itemsize)


def launch(kernel: Any, grid: tuple[int, int, int], **arguments: Any) -> None:
    """Run every program of a launch; contiguous tensors become pointers to their first element."""
    given = {
        name: Pointer(value.view(torch.uint8).view(-1), torch.tensor(0), value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in arguments.items()
    }
    run = _namespace(kernel.fn.__globals__, {})[kernel.fn.__name__]
    for z in range(grid[2]):
        for y in range(grid[1]):
            lock = threading.Lock()
            places = [((x, y, z), lock) for x in range(grid[0])]
            _together([(place, lambda: run(**given)) for place in places])


def _together(runs: list[tuple[Any, Any]]) -> None:
    """Run functions in threads, each for its program; the first failure is raised."""
    failures: list[BaseException] = []

    def held(place: Any, run: Any) -> None:
        _THREAD.program, _THREAD.lock = place
        try:
            run()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=held, args=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _specialized(parts: list[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    place = (_THREAD.program, _THREAD.lock)
    _together([(place, lambda f=run, a=given: f(*a)) for run, given in parts])


def _namespace(names: dict[str, Any], known: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A module's names with functions that see the stand-ins instead of the language."""
    if id(names) in known:
        return known[id(names)]
    found = known[id(names)] = dict(names)
    for name, value in names.items():
        function = getattr(value, "fn", None)
        if name in _STAND_INS:
            found[name] = _STAND_INS[name]
        elif callable(value) and name.endswith("_layout"):
            found[name] = lambda *a: None
        elif isinstance(function, FunctionType):
            home = _namespace(function.__globals__, known)
            found[name] = FunctionType(
                function.__code__, home, name, function.__defaults__, function.__closure__
            )
        elif isinstance(value, gluon_language.constexpr):
            found[name] = value.value
    return found


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, Value) else value


def _pairwise(function: Any) -> Any:
    def apply(a: Any, b: Any) -> Value:
        a = torch.as_tensor(_raw(a))
        return Value(function(a, torch.as_tensor(_raw(b)).to(a.dtype)))

    return apply


def _multiplied(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Value:
    product = (_raw(a).double() @ _raw(b).double()).float()
    return Value(product + acc.raw if use_acc else product)


def _added(at: Pointer, value: Any, sem: str) -> None:
    with _THREAD.lock:
        at.write(at.read() + value)


def _shared(kind: torch.dtype, shape: list[int], layout: Any) -> Any:
    if layout is Barriers:
        return Barriers(shape[0])
    return Value(torch.full(shape, torch.nan if kind.is_floating_point else -1, dtype=kind))


def _assembly(
    code: str, constraints: str, given: list[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """A word, a float32 value or a tuple of those; of a load, its word."""
    if "ld.acquire" in code:
        time.sleep(0.001)
        return Value(given[0].read())
    if not given:
        return None
    outputs = constraints.count("=")
    held = {f"${outputs + n}": value.raw for n, value in enumerate(given)}
    for name, operands in re.findall(r"(\w[\w.]+)\s+([^;]+);", re.sub(r"\.reg[^;]+;", "", code)):
        into, *names = re.split(r",\s*", operands.strip())
        held[into] = _instruction(name, [held[n] if n in held else int(n, 0) for n in names])
    found = tuple(Value(held[f"${n}"]) for n in range(outputs))
    return found if isinstance(dtype, tuple) else found[0]


def _instruction(name: str, values: list[Any]) -> Tensor:
    if name.startswith("mov"):
        return torch.as_tensor(values[0]).view(torch.float32)
    if name.endswith("f32"):
        a, b = values[:2]
        if name.startswith("cvt"):
            return _word(*(x.bfloat16() for x in (b, a)))
        return {"mul": torch.mul, "add": torch.add, "sub": torch.sub}[name[:3]](a, b)
    a, b = (torch.as_tensor(v).long() & _WORD for v in values[:2])
    if name == "mul.rn.bf16x2":
        low, high = (_half(a, n) * _half(b, n) for n in (0, 16))
        return _word(low, high)
    if name == "prmt.b32":
        both, order = a | b << 32, int(values[2])
        out = sum((both >> 8 * (order >> 4 * n & 7) & 255) << 8 * n for n in range(4))
    elif name == "lop3.b32":
        assert values[3] == 0xEA
        out = (a & b) | (torch.as_tensor(values[2]).long() & _WORD)
    else:
        kind = name.split(".")[0]
        out = {"and": a & b, "shr": a >> b, "shl": a << b, "mul": a * b}[kind]
    return _signed(torch.as_tensor(out))


def _signed(word: Tensor) -> Tensor:
    return ((word & _WORD).add(2**31) % 2**32 - 2**31).int()


def _half(word: Tensor, shift: int) -> Tensor:
    return (word >> shift & 0xFFFF).int().short().view(torch.bfloat16)


def _word(low: Tensor, high: Tensor) -> Tensor:
    bits = [x.view(torch.int16).long() & 0xFFFF for x in (low, high)]
    return _signed(bits[0] | bits[1] << 16)


_LANGUAGE = SimpleNamespace(
    **_TYPES,
    constexpr=lambda value: value,
    program_id=lambda axis: Value(torch.tensor(_THREAD.program[axis], dtype=torch.int32)),
    arange=lambda a, b, layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
    zeros=lambda shape, kind, layout=None: Value(torch.zeros(shape, dtype=kind)),
    full=lambda shape, value, kind, layout=None: Value(
        torch.as_tensor(_raw(value)).to(kind).expand(shape)
    ),
    static_range=range,
    pointer_type=lambda kind: kind,
    convert_layout=lambda value, layout, assert_trivial=False: value,
    reshape=lambda value, shape: Value(value.raw.reshape(shape)),
    permute=lambda value, order: Value(value.raw.permute(order)),
    split=lambda value: (Value(value.raw[..., 0]), Value(value.raw[..., 1])),
    join=lambda a, b: Value(torch.stack((a.raw, b.raw), -1)),
    where=lambda chosen, a, b: Value(torch.where(chosen.raw, _raw(a), _raw(b))),
    minimum=_pairwise(torch.minimum),
    maximum=_pairwise(torch.maximum),
    max=lambda value, axis: Value(value.raw.amax(axis)),
    sum=lambda value, axis: Value(value.raw.sum(axis)),
    exp2=lambda value: Value(value.raw.exp2()),
    load=lambda at, mask=True, other=0, **hints: Value(at.read(mask, other)),
    store=lambda at, value, mask=True: at.write(value, mask),
    atomic_add=_added,
    warp_specialize=_specialized,
    inline_asm_elementwise=_assembly,
    allocate_shared_memory=_shared,
    **dict.fromkeys(
        (
            "BlockedLayout", "DistributedLinearLayout", "NVMMASharedLayout",
            "NVMMADistributedLayout", "SliceLayout", "SwizzledSharedLayout",
        ),
        lambda *a, **k: None,
    ),
)  # fmt: skip
_STAND_INS: dict[str, Any] = {
    "gl": _LANGUAGE,
    "barrier": lambda: None,
    "warpgroup_mma": _multiplied,
    "warpgroup_mma_wait": lambda count, deps: deps[0],
    "fence_async_shared": lambda: None,
    "mbarrier": SimpleNamespace(
        MBarrierLayout=lambda: Barriers,
        init=lambda at, count: at[0].needed.__setitem__(at[1], count),
        arrive=_arrive,
        wait=_await,
    ),
    "async_copy": SimpleNamespace(
        async_copy_global_to_shared=lambda into, source: into.store(Value(source.read())),
        commit_group=lambda: None,
        wait_group=lambda count: None,
    ),
}
