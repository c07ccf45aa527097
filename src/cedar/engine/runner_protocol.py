"""What the engine's loop asks of whoever runs the model.

The loop knows tokens, slots and pages; the runner alone knows tensors, the store and the device.
A test may put a pure function of the token sequence in its place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

__all__ = ["Proposal", "Result", "RunnerProtocol", "Work"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Some new tokens of one sequence.

    start: how many of its tokens are stored already; the new ones follow.
    pages: of the whole sequence, enough for ``start + len(tokens)`` tokens.
    wants_logits: "last" gives one row, "all" one a token (and takes every token through every
        layer), "none" no row.
    is_last_chunk: the prompt ends with these tokens, or lies behind.
    prompt_tokens: the length of the prompt, that is, where generated tokens begin. Decoder
        replay starts one window before it, also when generated tokens are computed again.
    images: those of the request.
    watch: report what the indexer selected, see `Result.selected_KE`.
    snapshots: page boundaries at which the encoder's windows are wanted, see `Result.snapshots`.
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    wants_logits: Literal["last", "all", "none"]
    is_last_chunk: bool
    prompt_tokens: int
    images: tuple[Any, ...] = ()
    watch: bool = False
    snapshots: tuple[int, ...] = ()


class Result(Protocol):
    """logits: ``[k, V]``, the scores after each token asked for; None for "none".

    selected_KE: of watched work with logits, for each of those tokens the first positions of the
    entries that the last index source selected: int64 ``[k, E]`` ascending, −1 padded; else None.
    snapshots: by position, for `RunnerProtocol.restore`; of the wanted ones those that the pass
    went through with windows as in a cold run.
    """

    @property
    def logits(self) -> Tensor | None: ...
    @property
    def selected_KE(self) -> Tensor | None: ...
    @property
    def snapshots(self) -> Mapping[int, Any]: ...


class Proposal(Protocol):
    """Drafted tokens ``[N, block]`` and raw confidences (no sigmoid) ``[N, block]``."""

    @property
    def tokens_NB(self) -> Tensor: ...
    @property
    def confidence_NB(self) -> Tensor: ...


class RunnerProtocol(Protocol):
    """The model, its store, and a slot for every running sequence."""

    def execute(self, work: Sequence[Work]) -> Sequence[Result]:
        """Run all of it in one pass. One that fails, wherever and by whatever, leaves no trace."""
        ...

    def open(self, slot: int) -> None:
        """Begin an empty sequence."""
        ...

    def close(self, slot: int) -> None:
        """Forget the sequence; its pages belong to the scheduler."""
        ...

    def restore(
        self,
        slot: int,
        pages: Sequence[int],
        tokens: int,
        tail_tokens: Sequence[int],
        snapshot: Any = None,
    ) -> None:
        """Begin a sequence whose first ``tokens`` tokens lie in ``pages`` already.

        tail_tokens: all of those tokens, from which windows and history are rebuilt. snapshot: of
        an earlier pass over the same tokens (`Result.snapshots`), from which they are taken.
        """
        ...

    def copy_slot(self, source: int, target: int) -> None:
        """Give the opened slot ``target`` the rings, residues and history of ``source``."""
        ...

    def copy_page(self, source: int, target: int) -> None: ...

    def mark(self, slot: int) -> None:
        """Remember the sequence as it is before drafts are verified."""
        ...

    def rollback(self, slot: int, tokens: int) -> None:
        """Since the mark, keep only what the first ``tokens`` tokens of the sequence stored."""
        ...

    def draft(
        self, slots: Sequence[int], first: Sequence[int], choose: Callable[[Tensor], Tensor]
    ) -> Proposal:
        """Draft a block after the newest token of each sequence, which is not stored yet.

        choose: called once for every place of the block with logits ``[N, V]``, gives ``[N]``.
        """
        ...

    def nbytes(self) -> int:
        """Bytes of pools and slots together."""
        ...
