"""At which places of a text to keep a snapshot of the encoder's windows, and which one serves.

A prefix hit gives the entries of a prefix, but not the windows at its end. A snapshot gives those
too, so that nothing of the prefix has to run again. It serves only where everything that the
decoder has to see, the last window of the prompt, lies behind it. So each place where texts are
likely to go on has two: at the last page boundary before it, and one window earlier.

- the end of a prompt, for the same prompt and for another answer;
- the place where a prompt leaves what is cached, for the next prompt with that beginning;
- the end of a text, for the next turn of a chat. Where a text ends is not known before, so windows
  are kept at every boundary that it crosses, a window apart, and the last two stay.
"""

from collections.abc import Mapping
from typing import Any

from cedar.cache.prefix import Match, PrefixIndex
from cedar.engine.request import Sequence
from cedar.engine.steps import Item, ItemKind

__all__ = ["Snapshots"]

_KEPT = 2


class Snapshots:
    """Snapshots are opaque here; they are attached to the pages of the prefix index.

    window: tokens that the decoder has to see. reach: how far before its end a prefix runs again
    where no snapshot serves; one that would take much more is left alone.
    """

    def __init__(self, index: PrefixIndex, *, window: int, reach: int) -> None:
        self._index = index
        self._page = index.page_tokens
        self._window = window
        self._stride = -(-window // self._page) * self._page
        # Two strides more are cheap, and where the replay is approximate a snapshot is better.
        self._most = max(reach, _KEPT * self._stride)

    @property
    def held(self) -> int:
        """How many the prefix index holds."""
        return self._index.num_snapshots

    def wanted(self, item: Item) -> tuple[int, ...]:
        """Where the pass of an item should take one. Drafts may still be rejected; see `keep`."""
        sequence = item.sequence
        if item.kind is ItemKind.PREFILL:
            ends = (sequence.prompt_length, sequence.match_tokens)
            places = {at - at % self._page for end in ends for at in (end, end - self._window)}
            # The first pass after a hit runs some of the prefix again.
            begin = 0 if item.start == sequence.hit_tokens else item.start
        else:
            newest = item.stop - item.stop % self._stride
            places = {newest - back * self._stride for back in range(_KEPT)}
            begin = item.start
        return tuple(
            at for at in sorted(places) if begin < at <= item.stop and not self._known(sequence, at)
        )

    def _known(self, sequence: Sequence, at: int) -> bool:
        keys, place = sequence.hit_keys, at // self._page
        return place <= len(keys) and self._index.snapshot(keys[place - 1]) is not None

    def keep(self, sequence: Sequence, found: Mapping[int, object], computed: int) -> None:
        """Hold what a pass took until the pages are cached; ``computed`` tokens are stored."""
        kept = sequence.snapshots
        kept.update({at: snapshot for at, snapshot in found.items() if at <= computed})
        generated = sorted(at for at in kept if at > sequence.prompt_length)
        for at in generated[:-_KEPT]:
            del kept[at]

    def serving(self, sequence: Sequence) -> Any:
        """For a sequence that has just been admitted with a hit; None if it has to run again."""
        last = min(sequence.hit_tokens, sequence.prompt_length - self._window)
        return self._last(sequence.hit_keys, last, last - self._most)[1]

    def exact_hit(self, sequence: Sequence, match: Match) -> int:
        """A `LimitHit`: as much of a match as needs no replay, that is, up to a snapshot."""
        last = min(match.tokens, sequence.prompt_length - self._window)
        return self._last(match.keys, last, 0)[0]

    def _last(self, keys: tuple[bytes, ...], last: int, first: int) -> tuple[int, Any]:
        """The latest place in ``[first, last]`` with a snapshot, and that."""
        for at in range(last - last % self._page, max(first, self._page) - 1, -self._page):
            snapshot = self._index.snapshot(keys[at // self._page - 1])
            if snapshot is not None:
                return at, snapshot
        return 0, None
