"""One launch from a sublayer's output to the next one's input, for many tokens on Hopper (Gluon).

Same mathematics as `cedar.ops.mhc.triton`, for 4 bfloat16 streams. Every program stays on its
multiprocessor for the whole launch:

* a *slice* program owns ``CH`` channels of all streams and keeps their part of fn, cut into two
  bfloat16 parts, in shared memory. It goes through tiles of 64 tokens: X and y are read and X' is
  written once, z and both sums of squares are added up, the collapsed input waits in shared memory;
* a *finish* program adds up the parts of a tile in their order, sends the slice programs the
  reciprocal RMS of the collapsed input, and turns z into the next coefficients. So Sinkhorn costs
  the programs that move the streams no time;
* two tiles later a slice program normalises what waits and writes it, once.

Slice programs of a group take the tiles ``group, group + GROUPS, ...``; parts lie in a ring of 4
tiles a group, which stays in L2. The reciprocal RMS of a token and the number of times its place
was used are one word of 64 bits, so that either is seen with the other.

Bytes: ``T x 10 D x 2``, once, and fn once a group; 104 bytes a token and slice, written and read,
stay in L2. FLOP: ``T x 4 D x 24 x 2 x 2``. Programs wait for one another, so all of them have to
run at the same time: two on a multiprocessor, and one launch at a time.
"""

# mypy: ignore-errors

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cedar.ops.devices import is_hopper, multiprocessors
from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.mhc.hopper_finish import RING, ROWS, finish_tiles
from cedar.ops.mhc.hopper_slice import slice_tiles
from cedar.ops.mhc.hopper_words import tensors

__all__ = ["Persistent", "step"]

_CHANNELS = 64  # of a slice
_MANY = 256  # tokens from which on it is faster than programs that come and go


@gluon.jit(do_not_specialize=["count"])
def step(
    x, y, comb, post, pre, fn, base, scale, weight, x_out, pre_out, post_out, comb_out, h,
    kept, rates, parts, arrivals, ready, count, norm_eps, hc_eps,
    D: gl.constexpr, CH: gl.constexpr, GROUPS: gl.constexpr, FINISH: gl.constexpr,
    UPDATE: gl.constexpr, KEEP: gl.constexpr, ITERATIONS: gl.constexpr,
):  # fmt: skip
    """Programs: GROUPS times the slices of D, then GROUPS times FINISH. X, y, h and the norm
    weight as words of two channels. KEEP: also write what the way back wants, z and both
    reciprocal RMS, ``kept [25, T]`` and ``rates [T]``."""
    if gl.program_id(0) < GROUPS * (D // CH):
        slice_tiles(
            x, y, comb, post, pre, fn, weight, x_out, h, parts, arrivals, ready, count, D, CH,
            GROUPS, FINISH, UPDATE,
        )  # fmt: skip
    else:
        finish_tiles(
            base, scale, pre_out, post_out, comb_out, kept, rates, parts, arrivals, ready, count,
            norm_eps, hc_eps, D, CH, GROUPS, FINISH, KEEP, ITERATIONS,
        )  # fmt: skip


class Persistent:
    """Launches `step`. Holds the ring of parts and its counters, on which a launch goes on where
    the one before it ended: launches that may overlap need instances of their own.

    The first call on a device allocates, so it must not be captured in a graph.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def takes(self, x_TCD: Tensor, norm_weight: Tensor) -> bool:
        """Whether it should run here: many tokens in bfloat16, whole slices, enough programs."""
        return (
            len(x_TCD) >= _MANY
            and x_TCD.dtype is torch.bfloat16
            and norm_weight.dtype is torch.bfloat16
            and norm_weight.is_contiguous()
            and x_TCD.shape[2] % _CHANNELS == 0
            and (x_TCD.is_meta or is_hopper(x_TCD.device))  # or compiled for one
            and _groups(x_TCD.device, x_TCD.shape[2] // _CHANNELS)[0] > 0
        )

    def launch(
        self,
        x_TCD: Tensor,
        update: tuple[Tensor, MhcMix] | None,
        pre_TC: Tensor,
        parameters: MhcParameters,
        norm_weight: Tensor,
        x_out: Tensor,
        mix: MhcMix,
        h_TD: Tensor,
        keep: tuple[Tensor, Tensor] | None = None,
        *,
        norm_eps: float,
        hc_eps: float,
        sinkhorn_iters: int,
    ) -> None:
        """Run the kernel.

        keep: where z with the reciprocal RMS of X' goes, and that of h before its norm:
        float32 ``[25, T]`` and ``[T]``.
        """
        count, _, width = x_TCD.shape
        slices = width // _CHANNELS
        groups, finish = _groups(x_TCD.device, slices)
        step[(groups * (slices + finish),)](
            *tensors(x_TCD, update, pre_TC, parameters, norm_weight, x_out, mix, h_TD),
            *(keep or (None, None)), *self._buffers(x_TCD.device, groups, slices), count,
            norm_eps, hc_eps,
            D=width, CH=_CHANNELS, GROUPS=groups, FINISH=finish, UPDATE=update is not None,
            KEEP=keep is not None, ITERATIONS=sinkhorn_iters, num_warps=4,
        )  # fmt: skip

    def _buffers(
        self, device: torch.device, groups: int, slices: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Parts, arrivals of slices at the places of the ring, and its words."""
        held = self._held.get((device, groups, slices))
        if held is None:
            places = groups * RING.value
            held = (
                torch.empty((places, slices, ROWS.value, 64), device=device),
                torch.zeros(places, dtype=torch.int32, device=device),
                torch.zeros((places, 64), dtype=torch.int64, device=device),
            )
            self._held[device, groups, slices] = held
        return held


@functools.cache
def _groups(device: torch.device, slices: int) -> tuple[int, int]:
    """Groups of slice programs, and finish programs of each, two on a multiprocessor."""
    programs = multiprocessors(device)
    finish = 8 if slices >= 64 else 4 if slices >= 32 else 2 if slices >= 16 else 1
    return 2 * programs // (slices + finish), finish
