"""How products on an H200 are cut, by their sizes: rules that reproduce what was measured best."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MANY_TOKENS", "Plan", "plan_for"]

MANY_TOKENS = 64  # of a program of `cedar.ops.linear.hopper_many`, at most
_PROCESSORS = 132
_TURNS = 24  # longer loops are split, since they are unrolled
_STEPS = 16  # the same of `hopper_many`
_HELD = 24 << 10  # bytes of eight tokens that are better kept than read again
_MOST_HELD = 160 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How products are cut.

    rows: of a tile; warps: of a program; programs: on a multiprocessor (None: one for each tile);
    splits: programs that part the channels; ahead, x_ahead: turns that loads of weights and of
    tokens run ahead. hold: tokens stay in shared memory; else they are read and cast again for
    every tile. many: by `cedar.ops.linear.hopper_many`.
    """

    rows: int
    warps: int
    programs: int | None = None
    splits: int = 1
    ahead: int = 2
    x_ahead: int = 2
    registers: int | None = None
    hold: bool = False
    many: bool = False


def plan_for(width: int, rows: Sequence[int], tokens: int, fp8: bool) -> Plan | None:
    """A plan for weights of so many ``rows`` each; None if PyTorch serves them better.

    For up to eight tokens a sum is split in the same way, however many there are.
    """
    if fp8 and tokens > 8 and width % 128 == 0 and all(n % 64 == 0 for n in rows):
        return _many(width // 128, sum(rows) // 64, tokens)
    if tokens > 32 or (not fp8 and sum(rows) > 4096):
        return None
    return _few(-(-width // (64 if fp8 else 32)), sum(rows), tokens, fp8)


def _few(pieces: int, rows: int, tokens: int, fp8: bool) -> Plan:
    """``pieces`` of 64 bytes a row."""
    few = tokens <= 4
    piece = (1 << (tokens - 1).bit_length()) * (128 if fp8 else 64)  # bytes of tokens
    tiles = rows // 16
    # Many tiles are best served by many small programs.
    warps, splits = (4 if pieces <= 40 or tiles >= 512 else 8), 1
    warps = min(warps, 1 << (pieces.bit_length() - 1))
    if fp8 and tiles <= _PROCESSORS and pieces >= 64:
        warps, splits = 4, 4
    elif not fp8 and pieces >= 80:
        warps, splits = 4, 10 if tiles <= 48 else 5
    while pieces > _TURNS * warps * splits:
        splits += 1
    hold = few or pieces // splits * piece <= _HELD or tokens > 8
    while tokens > 8 and -(-pieces // (warps * splits)) * warps * piece > _MOST_HELD:
        splits += 1
    long = pieces >= 128 and not few
    if fp8 and (long or (rows >= 16384 and (pieces <= 40 or not few))):
        return Plan(
            rows=32, warps=warps, programs=16 // warps if hold else None, splits=splits,
            registers=128, hold=hold,
        )  # fmt: skip
    if warps == 8 and not hold:  # three of these fit on a multiprocessor
        return Plan(rows=16, warps=8, splits=splits, ahead=3, x_ahead=1, registers=80)
    return Plan(
        rows=16, warps=warps, programs=16 // warps if hold else None, splits=splits,
        ahead=6 if hold else 4, x_ahead=4 if hold else 2, registers=128, hold=hold,
    )  # fmt: skip


def _many(steps: int, tiles: int, tokens: int) -> Plan:
    """As few splits as keep the loops short and the multiprocessors busy."""
    blocks = -(-tokens // MANY_TOKENS)
    found = [n for n in range(1, steps + 1) if steps % n == 0 and steps // n <= _STEPS]
    busy = [n for n in found if tiles * blocks * n >= 1.6 * _PROCESSORS]
    return Plan(rows=64, warps=4, splits=(busy or found[-1:])[0], many=True)
