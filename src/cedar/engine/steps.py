"""What the scheduler wants done in one step: plain numbers, no tensors."""

from dataclasses import dataclass
from enum import StrEnum

from cedar.engine.request import Sequence

__all__ = ["Admission", "Item", "ItemKind", "StepPlan"]


class ItemKind(StrEnum):
    """PREFILL: tokens of the prompt. RECOMPUTE: tokens that were generated before a preemption.
    DECODE: the newest token. VERIFY: the newest token and drafts behind it.
    """

    PREFILL = "prefill"
    RECOMPUTE = "recompute"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Item:
    """Run ``tokens`` of a sequence at positions ``[start, start + count)``.

    is_last_chunk: the prompt ends with these tokens, or lies behind.
    wants_logits: something is to be sampled after these tokens: after the last of them, or, for
    VERIFY, after each. Recomputed tokens were sampled before and are not sampled again.
    """

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    kind: ItemKind
    is_last_chunk: bool
    wants_logits: bool

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Admission:
    """``sequence`` now has ``slot``, which starts empty.

    The first ``hit_tokens`` tokens lie in its pages already, from the prefix cache; ``hit_key``
    is the name of the last of those pages.
    """

    sequence: Sequence
    slot: int
    hit_tokens: int
    hit_key: bytes | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """To be carried out in this order: copies, slot_copies, admitted, items.

    copies: pairs (from, to) of pages; slot_copies: pairs (from, to) of slots, ``to`` being new.
    Their sources are untouched since the fork: pages and slots are cleared by whoever gets them
    next, never by whoever leaves them.
    preempted: lost pages and slot and wait again. expired: ended by their deadline.
    """

    items: tuple[Item, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    slot_copies: tuple[tuple[int, int], ...] = ()
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    expired: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)
