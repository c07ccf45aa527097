"""Compiles kernels for Hopper without a GPU, as their wrappers would launch them.

Triton brings the whole tool chain. A wrapper is called with tensors of the meta device while its
kernels are replaced by recorders, so what is compiled is what it launches, specialised as Triton
would specialise it.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

__all__ = ["Compiled", "Launch", "recorded"]

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPTIONS = ("num_warps", "num_stages", "maxnreg")
_TYPES = {
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What the assembler made of a kernel; bytes of stack are registers spilled.

    overwritten: instructions that write to the left operand of a product still in flight.
    """

    registers: int
    stack: int
    shared: int
    operations: Counter[str]
    overwritten: tuple[str, ...] = ()

    def uses(self, *names: str) -> bool:
        """Whether an instruction whose name begins with one of ``names`` occurs."""
        return any(operation.startswith(names) for operation in self.operations)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch: the kernel, the grid, the arguments by name, the options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    def compile(self) -> Compiled:
        """Compile for compute capability 9.0."""
        types: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for place, (parameter, name) in enumerate(
            zip(self.kernel.params, self.kernel.arg_names, strict=True)
        ):
            value = self.arguments[name]
            if parameter.is_constexpr or value is None or value is True or value is False:
                types[name], constants[name] = "constexpr", value
                continue
            if isinstance(value, int) and value == 1:
                types[name], constants[name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                types[name], aligned = f"*{_TYPES[value.dtype]}", value.storage_offset() == 0
            elif isinstance(value, int):
                types[name], aligned = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
            else:
                types[name], aligned = "fp32", False
            if aligned:
                attributes[(place,)] = [["tt.divisibility", 16]]
        build = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = build(self.kernel, types, constexprs=constants, attrs=attributes)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(self.options))
        return _inspect(built.asm["cubin"], built.metadata.shared)


@dataclass(slots=True)
class _Recorder:
    kernel: Any
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **named: Any) -> None:
            options = {k: named.pop(k) for k in _OPTIONS if k in named}
            options = {k: v for k, v in options.items() if v is not None}
            arguments = dict(zip(self.kernel.arg_names, values, strict=False)) | named
            self.launches.append(
                Launch(kernel=self.kernel, grid=grid, arguments=arguments, options=options)
            )

        return launch


@contextmanager
def recorded(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Every launch of a kernel of ``modules``, instead of running it."""
    launches: list[Launch] = []
    kernels = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
    ]
    try:
        for module, name, kernel in kernels:
            setattr(module, name, _Recorder(kernel, launches))
        yield launches
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def _inspect(cubin: bytes, shared: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("cuobjdump", "-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    operations = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)", code)
    return Compiled(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=shared,
        operations=Counter(operations),
        overwritten=tuple(_overwritten(code)),
    )


def _overwritten(code: str) -> Iterator[str]:
    """Writes to registers that a product reads, from its begin to the next wait, in text order."""
    flying: set[int] = set()
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?(.*?) ;", code):
        name = instruction.split()[0]
        left = re.search(r"[HQ]GMMA\S+ R\d+, R(\d+), gdesc", instruction)
        written = re.match(r"\S+ R(\d+)", instruction)
        if left is not None:
            flying.update(range(int(left[1]), int(left[1]) + 4))
        elif name.startswith("WARPGROUP.DEPBAR"):
            flying.clear()
        elif written is not None and not name.startswith(("ST", "LDGSTS", "RED", "HGMMA", "QGMMA")):
            width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            if not flying.isdisjoint(range(int(written[1]), int(written[1]) + width)):
                yield instruction


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
