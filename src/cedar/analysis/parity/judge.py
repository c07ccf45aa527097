"""Comparing tensors with the golden tensors of one file, key by key."""

from collections.abc import Callable

import torch
from torch import Tensor

from cedar.analysis.parity.report import Comparison, Kind
from cedar.analysis.parity.sets import GoldenFile

__all__ = ["BLOCK_RMS", "FLOAT32_LIMIT", "FP4_RMS", "FP8_RMS", "Judge"]

# Tolerances of the golden README, where each is measured.
FLOAT32_LIMIT = 1e-4  # absolute, with float32 activations
ROUNDING_LIMIT = 1e-6  # relative, absolute below 1
BLOCK_RMS = 3e-3  # relative root mean square of a bfloat16 block that is fed golden input
# One bfloat16 step before a quantiser can move its result by a whole code. A few moved codes stay
# below these limits; leaving out the FP8 rounding (2.6e-2) or the FP4 rounding (1e-1) does not.
FP8_RMS = 1e-2
FP4_RMS = 2e-2
BFLOAT16_STEP = 2.0**-7  # one step, relative to the numbers just above a power of two


class Judge:
    """Collects one `Comparison` per key; a key that nobody asks for becomes a failure.

    The methods take our tensor in the golden tensor's layout. ``golden`` replaces the tensor
    that is stored under the key (a part of it, say).
    """

    def __init__(self, golden: GoldenFile) -> None:
        self.golden = golden
        self.lines: list[Comparison] = []
        self.open = set(golden.tensors)

    def float32(
        self,
        key: str,
        ours: Tensor,
        *,
        golden: Tensor | None = None,
        limit: float = FLOAT32_LIMIT,
        kind: Kind = Kind.FLOAT32,
    ) -> None:
        """Absolute difference; equal infinities are equal."""
        self._elements(key, ours, golden, kind, limit, f"abs {limit:g}", lambda d, _: d)

    def rounding(self, key: str, ours: Tensor, *, limit: float = ROUNDING_LIMIT) -> None:
        """Relative difference, absolute where the golden number is below 1."""
        self._elements(
            key, ours, None, Kind.ROUNDING, limit, f"rel {limit:g}",
            lambda d, reference: d / reference.abs().clamp_min(1.0),
        )  # fmt: skip

    def bfloat16_step(self, key: str, ours: Tensor) -> None:
        """At most one bfloat16 step apart: float32 sums in another order, then rounded."""
        self._elements(
            key, ours, None, Kind.ROUNDING, BFLOAT16_STEP, "one bf16 step",
            lambda d, reference: d / reference.abs().clamp_min(2.0**-126),
        )  # fmt: skip

    def relative_rms(
        self, key: str, ours: Tensor, *, golden: Tensor | None = None, limit: float = BLOCK_RMS
    ) -> None:
        """Root mean square of the difference over that of the golden tensor."""
        reference = self._reference(key, golden)
        tolerance = f"rel rms {limit:g}"
        if self._misshapen(key, ours, reference, Kind.BFLOAT16, tolerance):
            return
        difference = _difference(ours, reference)
        finite = reference.to(torch.float64).masked_fill(reference.isinf(), 0.0)
        scale = finite.square().mean().sqrt().clamp_min(1e-30)
        error = float(difference.square().mean().sqrt() / scale) if len(difference) else 0.0
        where = _place(difference, ours, reference) if difference.numel() else "no elements"
        self._add(key, Kind.BFLOAT16, tolerance, error, where, error <= limit)

    def exact(self, key: str, ours: Tensor, *, golden: Tensor | None = None) -> None:
        """A discrete choice: every element, whatever the integer types."""
        self._equal(key, ours, golden, Kind.EXACT)

    def bits(self, key: str, ours: Tensor) -> None:
        """Every element equal, and of the same type."""
        reference = self._reference(key, None)
        if ours.dtype != reference.dtype:
            self.fail(key, f"type {ours.dtype}, golden {reference.dtype}", Kind.BITS)
            return
        if ours.dtype.itemsize == 1:  # float8 has no comparisons
            ours, reference = ours.view(torch.uint8), reference.view(torch.uint8)
        self._equal(key, ours, reference, Kind.BITS)

    def shown(self, key: str, ours: Tensor, *, golden: Tensor | None = None) -> None:
        """Show the difference without judging it."""
        reference = self._reference(key, golden)
        if self._misshapen(key, ours, reference, Kind.SHOWN, "-"):
            return
        if reference.is_floating_point():
            difference = _difference(ours, reference)
            worst = float(difference.max()) if difference.numel() else 0.0
            where = f"median {float(difference.median()):.3g}" if difference.numel() else ""
        else:
            different = ours.to(reference.dtype) != reference
            worst = float(different.sum())
            where = f"of {different.numel()} elements"
        self._add(key, Kind.SHOWN, "-", worst, where, True)

    def skip(self, *keys: str) -> None:
        """Inputs, and what is there for reference only."""
        self.open.difference_update(keys)

    def fail(self, tensor: str, message: str, kind: Kind = Kind.SET) -> None:
        """A line that fails without a number."""
        self.open.discard(tensor)
        self._add(tensor, kind, "-", None, message, False)

    def note(self, tensor: str, message: str) -> None:
        """A line that only says something."""
        self._add(tensor, Kind.SHOWN, "-", None, message, True)

    def finish(self) -> tuple[Comparison, ...]:
        """All lines; every key that was neither compared nor skipped has failed."""
        for key in sorted(self.open):
            self.fail(key, "unknown key: nothing of this implementation corresponds to it")
        return tuple(self.lines)

    # --- the pieces -----------------------------------------------------------------------

    def _reference(self, key: str, golden: Tensor | None) -> Tensor:
        self.open.discard(key)
        return self.golden.tensors[key] if golden is None else golden

    def _elements(
        self,
        key: str,
        ours: Tensor,
        golden: Tensor | None,
        kind: Kind,
        limit: float,
        tolerance: str,
        measure: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        reference = self._reference(key, golden)
        if self._misshapen(key, ours, reference, kind, tolerance):
            return
        if reference.numel() == 0:
            self._add(key, kind, tolerance, 0.0, "no elements", True)
            return
        error = measure(_difference(ours, reference), reference.to(torch.float64))
        # Equal infinities divide to NaN in a relative measure; different ones stay infinite.
        error = torch.where(ours == reference, 0.0, error)
        error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst = float(error.max())
        where = _place(error, ours, reference)
        beyond = int((error > limit).sum())
        if beyond:
            where += f"; {beyond} of {error.numel()} elements beyond"
        self._add(key, kind, tolerance, worst, where, beyond == 0)

    def _equal(self, key: str, ours: Tensor, golden: Tensor | None, kind: Kind) -> None:
        reference = self._reference(key, golden)
        if self._misshapen(key, ours, reference, kind, "equal"):
            return
        different = ours != reference
        count = int(different.sum())
        where = f"of {different.numel()} elements"
        if count:
            where = f"{_place(different.to(torch.float64), ours, reference)}; {where}"
        self._add(key, kind, "equal", float(count), where, count == 0)

    def _misshapen(
        self, key: str, ours: Tensor, reference: Tensor, kind: Kind, tolerance: str
    ) -> bool:
        if ours.shape == reference.shape:
            return False
        where = f"shape {list(ours.shape)}, golden {list(reference.shape)}"
        self._add(key, kind, tolerance, None, where, kind is Kind.SHOWN)
        return True

    def _add(
        self, key: str, kind: Kind, tolerance: str, worst: float | None, where: str, passed: bool
    ) -> None:
        self.lines.append(
            Comparison(
                set_name=self.golden.name,
                tensor=key,
                kind=kind,
                tolerance=tolerance,
                worst=worst,
                where=where,
                passed=passed,
            )
        )


def _difference(ours: Tensor, reference: Tensor) -> Tensor:
    """Absolute difference in float64; 0 where both are the same infinity, ∞ for a NaN."""
    a, b = ours.to(torch.float64), reference.to(torch.float64)
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _place(error: Tensor, ours: Tensor, reference: Tensor) -> str:
    """Index of the largest error, with both values."""
    if error.dim() == 0:
        return f"{ours.item():.6g}, golden {reference.item():.6g}"
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    a, b = ours[index].item(), reference[index].item()
    return f"{list(index)}: {a:.6g}, golden {b:.6g}"
