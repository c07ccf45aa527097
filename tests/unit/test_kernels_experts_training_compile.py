"""Experts for training compile for Hopper as their wrappers launch them: no spills, TMA, HGMMA."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels; this process interprets them", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from cedar.ops.experts import training as t  # noqa: E402
from cedar.ops.experts import training_gluon as hopper  # noqa: E402
from cedar.ops.experts import training_plan as plans  # noqa: E402
from cedar.ops.experts import training_swiglu as swiglus  # noqa: E402
from cedar.ops.experts import training_triton as products  # noqa: E402
from triton_compile import _TYPES, Compiled, Launch, _inspect, recorded  # noqa: E402


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(launch: Launch) -> Compiled:
    """As `Launch.compile`, of a kernel that takes tensor descriptors."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            types[name], constants[name] = "constexpr", value
        elif hasattr(value, "block_shape"):
            layout = f",{value.layout!r}" if launch.kernel.is_gluon() else ""
            types[name] = f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}{layout}>"
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            tensor = isinstance(value, Tensor)
            types[name] = f"*{_TYPES[value.dtype]}" if tensor else "i32"
            if tensor or value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    build = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = build(launch.kernel, types, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options))
    return _inspect(built.asm["cubin"], built.metadata.shared)


def launches(tokens: int, dim: int, inner: int, count: int, active: int) -> list[Launch]:
    """Of a forward and a backward pass."""
    tiling = t.tiling(dim, inner)
    w1, w2, w3 = empty(count, inner, dim), empty(count, dim, inner), empty(count, inner, dim)
    routing = empty(tokens * active, dtype=torch.float32)
    with recorded(plans, products) as found:
        plan = plans.plan_visits(empty(tokens, active, dtype=torch.int64), count, tiling.per_tile)
        x = plans.gather_rows(empty(tokens, dim), plan, active)
        hidden, gate, up = products.hidden_rows(x, routing, w1, w3, plan, 10.0, tiling, save=True)
        down = products.product_rows(hidden, w2, plan, tiling, along=True)
        plans.sum_visits(down, plan, active, empty(tokens, dim), torch.bfloat16)
        grad = products.product_rows(x, w2, plan, tiling, along=False)
        products.swiglu_gradient(grad, routing, gate, up, plan, 10.0)
        products.input_gradient(gate, up, w1, w3, plan, tiling)
    return found


PRODUCTS = {"_hidden": 1, "_rows": 2, "_input_gradient": 1}


@pytest.mark.parametrize(
    ("shape", "programs"),
    [((8192, 5120, 2304, 384, 6), 1), ((32768, 512, 256, 64, 6), 2)],
)
def test_passes(shape: tuple[int, ...], programs: int) -> None:
    """programs: that a multiprocessor holds, by registers and by shared memory."""
    names = []
    for launch in launches(*shape):
        kernel = compiled(launch)
        name = launch.kernel.__name__
        assert kernel.stack == 0, name
        names.append(name)
        if name in PRODUCTS:
            assert kernel.uses("HGMMA"), name
            assert kernel.uses("UTMALDG"), name
            assert programs * (kernel.shared + 1024) <= 228 << 10, name
            warps = launch.options["num_warps"]
            assert programs * kernel.registers * 32 * warps <= 65536, name
    assert {name: names.count(name) for name in PRODUCTS} == PRODUCTS


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_gradients(by_hand: bool, pair: bool, dtype: torch.dtype) -> None:
    left = (empty(4096, 512), empty(4096, 512) if pair else None)
    with recorded(products, hopper) as found:
        t.weight_gradients(
            left, empty(4096, 256), empty(17, dtype=torch.int32), dtype, splits=1, by_hand=by_hand
        )
    (launch,) = found
    kernel = compiled(launch)
    assert kernel.stack == 0
    # Two products of 16 rows at a time, for the 64 rows of a step.
    assert sum(n for name, n in kernel.operations.items() if name.startswith("HGMMA")) == 8
    assert kernel.uses("UTMALDG")
    programs = 1 if by_hand else 3
    assert programs * (kernel.shared + 1024) <= 228 << 10


def test_swiglu() -> None:
    values = [empty(8192, 2304) for _ in range(3)]
    with recorded(swiglus) as found:
        context = type("Context", (), {"save_for_backward": lambda *_: None})()
        swiglus._Swiglu.forward(context, *values[:2], 10.0)
        context.saved_tensors = values[:2]
        swiglus._Swiglu.backward(context, values[2])
    assert len(found) == 2
    for launch in found:
        assert launch.compile().stack == 0


def test_a_spill_would_be_seen() -> None:
    """Negative control: the large tile does not fit the registers of four warps."""
    tiling = products.Tiling(more=64, columns=128, warps=4, stages=2)
    with recorded(products) as found, recorded(plans):
        plan = plans.plan_visits(empty(512, 2, dtype=torch.int64), 4, tiling.per_tile)
        w2 = empty(4, 512, 256)
        products.product_rows(empty(1024, 256), w2, plan, tiling, along=True)
    assert compiled(found[0]).stack > 0
