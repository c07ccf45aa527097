"""How the tokens of a step are divided among those that run."""

from collections.abc import Sequence as Seq

from cedar.engine.pool import PagePool
from cedar.engine.request import RequestState, Sequence
from cedar.engine.steps import Item, ItemKind

__all__ = ["plan_items", "share_budget"]


def plan_items(
    pool: PagePool, running: Seq[Sequence], budget: int, *, batch_invariant: bool = False
) -> list[Item]:
    """Generating sequences first, a token each; then drafts; then prompts share the rest.

    running: by rank; each has the pages for its known tokens. budget: at least ``len(running)``.
    batch_invariant: one prompt at a time, cut where it would be alone, at multiples of the budget.
    """
    chunk = budget
    decoding = [s for s in running if s.state is RequestState.DECODE]
    storing = [s for s in running if s.state is RequestState.PREFILL]
    budget -= len(decoding)
    drafts = budget - max(len(storing), budget // 2) if storing else budget
    items = []
    for sequence in decoding:
        _trim_drafts(pool, sequence, drafts)
        drafts -= len(sequence.drafts)
        budget -= len(sequence.drafts)
        tokens = (*sequence.slice(sequence.computed, sequence.length), *sequence.drafts)
        kind = ItemKind.VERIFY if sequence.drafts else ItemKind.DECODE
        items.append(Item(sequence, sequence.computed, tokens, kind, True, True))
    needs = [_chunk_end(sequence) - sequence.computed for sequence in storing]
    if batch_invariant:
        storing, needs = storing[:1], needs[:1]
        shares = [min(need, chunk - storing[0].computed % chunk) for need in needs]
    else:
        shares = share_budget(needs, budget)
    for sequence, size in zip(storing, shares, strict=True):
        start, prompt = sequence.computed, sequence.prompt_length
        stop = start + size
        kind = ItemKind.PREFILL if start < prompt else ItemKind.RECOMPUTE
        tokens = sequence.slice(start, stop)
        items.append(Item(sequence, start, tokens, kind, stop >= prompt, stop == sequence.length))
    return items


def _chunk_end(sequence: Sequence) -> int:
    """A chunk ends with the prompt: what was generated since is run like generated tokens."""
    prompt = sequence.prompt_length
    return prompt if sequence.computed < prompt else sequence.length


def _trim_drafts(pool: PagePool, sequence: Sequence, budget: int) -> None:
    """Keep the drafts that fit into budget, max_tokens and pages; nobody is preempted."""
    new = sequence.request.params.max_tokens - len(sequence.generated)
    size = min(len(sequence.drafts), new - 1, budget)
    room = len(sequence.pages) * pool.page_tokens - sequence.length
    while room < size and pool.grow(sequence, sequence.length + room + 1):
        room += pool.page_tokens
    size = min(size, room)
    sequence.drafts = sequence.drafts[: max(size, 0)]


def share_budget(needs: list[int], budget: int) -> list[int]:
    """Divide a step's tokens among prompts, by rank.

    Each gets half of what those before it left, so that a short prompt does not wait for a long
    one to end, but one token at least (``budget`` suffices for that); what nobody behind needs
    goes to the first.
    """
    shares = []
    for place, need in enumerate(needs):
        behind = len(needs) - place - 1
        share = min(need, budget - behind, max(1, budget // 2) if behind else budget)
        shares.append(share)
        budget -= share
    for place, need in enumerate(needs):
        more = min(need - shares[place], budget)
        shares[place] += more
        budget -= more
    return shares
