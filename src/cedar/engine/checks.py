"""What callers of the scheduler may hand in."""

from cedar.engine.steps import Item, ItemKind
from cedar.errors import ConfigError

__all__ = ["check_commit", "check_settings"]


def check_settings(
    page_tokens: int, num_slots: int, token_budget: int, max_waiting: int, aging_seconds: float
) -> None:
    """Raise `ConfigError` naming every setting that cannot work."""
    problems = []
    for name, value in (
        ("page_tokens", page_tokens),
        ("num_slots", num_slots),
        ("max_waiting", max_waiting),
    ):
        if value < 1:
            problems.append(f"{name} is {value}; expected 1 or more")
    if token_budget < num_slots:
        problems.append(
            f"token_budget is {token_budget}; expected at least num_slots = {num_slots}, one "
            "token for everything that runs"
        )
    if not 0 <= aging_seconds < float("inf"):
        problems.append(f"aging_seconds is {aging_seconds}; expected 0 or more, finite")
    if problems:
        raise ConfigError("scheduler: " + "; ".join(problems) + ".")


def check_commit(item: Item, new_tokens: tuple[int, ...], computed: int) -> None:
    """Raise ``ValueError`` unless an item can have given this; see `Scheduler.commit`."""
    sequence = item.sequence
    name = f"commit of {sequence.id!r}"
    if not item.wants_logits:
        if new_tokens or computed != item.stop:
            raise ValueError(f"{name}: expected no token and computed = {item.stop}")
        return
    length = sequence.length + len(new_tokens)
    lowest = item.start + 1 if item.kind is ItemKind.VERIFY else item.stop
    if not lowest <= computed <= item.stop or computed not in (length - 1, length):
        raise ValueError(
            f"{name}: computed is {computed} after tokens {item.start} to {item.stop} and "
            f"{len(new_tokens)} new ones; expected start + len(new_tokens)"
        )
    if len(sequence.generated) + len(new_tokens) > sequence.request.params.max_tokens:
        raise ValueError(f"{name}: more than max_tokens = {sequence.request.params.max_tokens}")
    kept = computed - sequence.length
    if kept > 0 and new_tokens[:kept] != sequence.drafts[:kept]:
        raise ValueError(f"{name}: the stored drafts are not the tokens that were accepted")
