"""What the server needs of an engine; `cedar.cli.served.ServedEngine` is one, tests have others."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cedar.engine.output import Output
from cedar.engine.stats import EngineStats
from cedar.inputs.chat import Constraint
from cedar.inputs.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["EngineLike", "EngineStats", "ModelInfo", "Output", "Prompt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """Facts of the served model and its engine that do not change.

    vocab_size, bos, eos: of its tokens. max_positions: the longest sequence; pool_tokens: what the
    cache holds, all requests together. max_running, max_waiting: requests that run and queue.
    bytes_per_token: cache of one more token of context, slot_bytes: of a sequence besides;
    full_bytes_per_token: bfloat16 keys and values of all ``heads`` in every layer would take this.
    window_tokens: how far back every layer sees besides what it selects. longest_token: bytes of
    the longest token, so that text of more than ``room`` times as many is too long.
    """

    vocab_size: int
    bos: int
    eos: int
    max_positions: int
    pool_tokens: int
    max_running: int
    max_waiting: int
    accepts_images: bool
    bytes_per_token: float
    slot_bytes: int
    full_bytes_per_token: int
    heads: int
    window_tokens: int
    longest_token: int

    @property
    def room(self) -> int:
        """The most tokens of one sequence, prompt and answer."""
        return min(self.max_positions, self.pool_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Tokens as the model reads them; images: what the engine made of the pictures among them."""

    tokens: tuple[int, ...]
    images: tuple[Any, ...] = ()


class EngineLike(Protocol):
    """Generates tokens. Coroutines belong to one event loop; the rest may be called in threads."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to the model's tokens and back."""

    @property
    def alive(self) -> bool:
        """False once it can take no request any more."""

    async def submit(
        self,
        prompt: Prompt,
        params: Mapping[str, Any],
        *,
        masks: Callable[[], Any] | None = None,
        watch: bool = False,
    ) -> str:
        """Queue a request; returns its id.

        params: as for `cedar.engine.params.SamplingParams.from_mapping`. masks: makes the grammar
        of each sample. watch: outputs carry the selection of the indexer. Raises `RequestError`
        for what cannot be served and `CapacityError` if too many requests wait.
        """

    def stream(self, id: str) -> AsyncGenerator[Output, None]:
        """Outputs of a request until all its samples have ended; leaving it cancels the request."""

    def stats(self) -> EngineStats:
        """Figures as they were after the last step."""

    def place(self, tokens: Sequence[int], pictures: Sequence["Image"]) -> Prompt:
        """Put pictures where the image tokens stand. Blocks; raises `RequestError`."""

    def masks(
        self, constraint: Constraint, *, thinking: bool, starts_in_tools: bool
    ) -> Callable[[], Any]:
        """The grammars of a constraint, one for each sample. Blocks.

        thinking: the answer begins inside the reasoning, where everything is allowed. Raises
        `RequestError` naming what cannot be enforced.
        """
