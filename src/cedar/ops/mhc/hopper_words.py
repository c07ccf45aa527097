"""Streams as kernels for Hopper read and write them: two bfloat16 channels in a word (Gluon)."""

# mypy: ignore-errors

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cedar.ops.mhc import MhcMix, MhcParameters

__all__ = ["high_of", "low_of", "tensors", "word_of"]


def tensors(
    x_TCD: Tensor,
    update: tuple[Tensor, MhcMix] | None,
    pre_TC: Tensor,
    parameters: MhcParameters,
    norm_weight: Tensor,
    x_out: Tensor,
    mix: MhcMix,
    h_TD: Tensor,
) -> tuple[Tensor | None, ...]:
    """What such a kernel takes first: inputs and results of a step, channels as words."""
    y, old = update if update is not None else (None, MhcMix(pre_TC, pre_TC, pre_TC))
    return (
        _words(x_TCD), None if y is None else _words(y.contiguous()),
        old.comb_TCC.contiguous(), old.post_TC.contiguous(), pre_TC.contiguous(),
        parameters.fn, parameters.base, parameters.scale, _words(norm_weight), _words(x_out),
        mix.pre_TC, mix.post_TC, mix.comb_TCC, _words(h_TD),
    )  # fmt: skip


def _words(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@gluon.jit
def low_of(word):
    """The first channel of a word as float32."""
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def high_of(word):
    """The second one."""
    return (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def word_of(low, high):
    """Two float32 to bfloat16 in a word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1
    )
