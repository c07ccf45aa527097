"""The real engine on the small float64 model: a catalogue of requests, and what each gives alone.

What a request gives is worked out without the engine: with every token through every layer, or,
for decoder replay, by a runner that holds nothing else and takes the prompt at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cedar.cache import DenseKV
from cedar.cache.layout import KVLayout
from cedar.cache.prefix import PrefixIndex
from cedar.checkpoint.locate import locate_checkpoint
from cedar.engine.assemble import EngineConfig, build_core
from cedar.engine.build import LoadedModel
from cedar.engine.core import EngineCore
from cedar.engine.images import ImageInput, image_types
from cedar.engine.params import SamplingParams
from cedar.engine.runner import Replay, Runner
from cedar.engine.runner_protocol import Work
from cedar.engine.sampler import Sampler
from cedar.inputs.tokenizer import Tokenizer
from cedar.model import Batch
from cedar.testing.tiny import random_tokens, tiny_model

__all__ = [
    "PAGE",
    "Entry",
    "Oracle",
    "catalogue",
    "drain",
    "exact",
    "expected",
    "index_of",
    "loaded_tiny",
    "make_core",
    "make_runner",
    "picture",
    "prefill",
    "replayed",
    "submit",
]

PAGE = 12
_MOST = 1000


@cache
def loaded_tiny() -> LoadedModel:
    """The small model; nobody may change it for good."""
    directory = locate_checkpoint("cedar-tiny")
    model = tiny_model().eval().requires_grad_(False)
    return LoadedModel(model, Tokenizer.from_file(directory), directory)


@dataclass(frozen=True, eq=False)
class Entry:
    """A request of the catalogue."""

    name: str
    tokens: tuple[int, ...]
    params: SamplingParams
    images: tuple[ImageInput, ...] = ()


def picture(start: int, seed: int) -> ImageInput:
    """A span of eight positions; other seeds, other pixels, equal token ids."""
    size = loaded_tiny().model.config.vision_patch_size
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(36, 3, size, size, generator=generator).to(torch.float64)
    digest = seed.to_bytes(32, "little")
    return ImageInput(start, (0, 1, 1, 2, 1, 1, 2, 3), patches, (6, 6), digest)


def with_image(text: Sequence[int], image: ImageInput) -> tuple[int, ...]:
    span = [loaded_tiny().model.config.image_token_id] * len(image.types)
    return (*text[: image.start], *span, *text[image.start :])


@cache
def catalogue() -> tuple[Entry, ...]:
    """Prefixes of many lengths, images across page ends, greedy and sampled, several samples."""
    config = loaded_tiny().model.config
    trunk = random_tokens(config, 60, seed=1)

    def tail(count: int, seed: int) -> list[int]:
        return random_tokens(config, count, seed=seed)

    def params(seed: int, most: int, **more: Any) -> SamplingParams:
        heat = 0.0 if seed % 2 == 0 else 0.8
        return SamplingParams(
            **{"temperature": heat, "seed": seed, "max_tokens": most, "ignore_eos": True} | more
        )

    pages = [12, 24, 36]
    images = [picture(9, seed=1), picture(9, seed=2), picture(24, seed=3)]
    return (
        Entry("one token", (5,), params(0, 20)),
        Entry("trunk 60", tuple(trunk), params(1, 12)),
        *(
            Entry(f"hit {n}", (*trunk[:n], *tail(3 + n % 5, n)), params(n + 1, 9 + n // 4))
            for n in pages
        ),
        Entry("hit inside a page", (*trunk[:31], *tail(15, 7)), params(2, 25)),
        Entry("exactly two pages", tuple(trunk[:24]), params(3, 14)),
        Entry("three samples", (*trunk[:24], *tail(7, 8)), params(5, 8, n=3)),
        Entry("two samples", tuple(tail(12, 9)), params(7, 13, n=2, top_k=20)),
        Entry("penalties", tuple(tail(17, 10)), params(9, 11, frequency_penalty=0.5)),
        *(
            Entry(
                f"image {k}",
                with_image(trunk[:33], image),
                params(20 + k, 12),
                (image,),
            )
            for k, image in enumerate(images)
        ),
    )


def entry(name: str) -> Entry:
    return next(each for each in catalogue() if each.name == name)


def _generate(params: SamplingParams, prompt: Sequence[int], sample: int, step: Any) -> list[int]:
    vocab = loaded_tiny().model.config.vocab_size
    sampler = Sampler(params, vocab, prompt, sample=sample)
    new = list(prompt)
    with torch.inference_mode():
        while len(sampler.history) < params.max_tokens:
            new = [sampler.choose(step(new))]
    return sampler.history


def exact(request: Entry, sample: int = 0) -> list[int]:
    """Every token through every layer, one after the other."""
    model = loaded_tiny().model
    store = DenseKV(model.config, dtype=torch.float64)

    def step(new: list[int]) -> Tensor:
        start = store.length(0)
        images = request.images if start == 0 else ()
        batch = Batch.pack(
            [new],
            image_types=[image_types(images, start, start + len(new))] if images else None,
            images=[image.patches for image in images],
            image_grids=[image.grid for image in images],
        )
        return model(batch, store, logits="last").logits[0]

    return _generate(request.params, request.tokens, sample, step)


def make_runner(replay: Replay = Replay.DECODER, *, draft: bool = False, pages: int = 60) -> Runner:
    loaded = loaded_tiny()
    layout = KVLayout.from_config(loaded.model.config, page_tokens=PAGE)
    return Runner(loaded, layout, num_pages=pages, num_slots=4, replay=replay, draft=draft)


def prefill(
    runner: Runner,
    slot: int,
    tokens: Sequence[int],
    start: int,
    count: int,
    prompt: int,
    *,
    pages: Sequence[int] | None = None,
    wants: str = "last",
    images: tuple[ImageInput, ...] = (),
) -> Work:
    """A piece of work on the slot's own pages."""
    stop = start + count
    return Work(
        slot=slot,
        tokens=tuple(tokens[start:stop]),
        start=start,
        pages=tuple(pages if pages is not None else range(slot * 10, slot * 10 + 10)),
        wants_logits=wants,  # type: ignore[arg-type]
        is_last_chunk=stop >= prompt,
        prompt_tokens=prompt,
        images=images,
    )


def replayed(request: Entry, sample: int = 0) -> list[int]:
    """Decoder replay by a runner alone that takes the prompt at once."""
    runner = make_runner()
    runner.open(0)
    text: list[int] = []

    def step(new: list[int]) -> Tensor:
        start = len(text)
        text.extend(new)
        work = prefill(runner, 0, text, start, len(new), len(request.tokens), images=request.images)
        (result,) = runner.execute([work])
        assert result.logits is not None
        return result.logits[-1]

    return _generate(request.params, request.tokens, sample, step)


@cache
def expected(replay: str, name: str) -> tuple[list[int], ...]:
    """All samples of a request of the catalogue."""
    request = entry(name)
    how: Callable[[Entry, int], list[int]] = exact if replay == "off" else replayed
    return tuple(how(request, k) for k in range(request.params.n))


def make_core(loaded: LoadedModel | None = None, **options: Any) -> EngineCore:
    settings = {"page_tokens": PAGE, "pool_tokens": 600, "token_budget": 40, "check": True}
    return build_core(loaded or loaded_tiny(), EngineConfig(**settings | options))


def submit(core: EngineCore, request: Entry, id: str, **more: Any) -> str:
    made = core.request(request.tokens, request.params, id=id, images=request.images, **more)
    return core.submit(made)


def index_of(core: EngineCore) -> PrefixIndex | None:
    return core._scheduler._pool.index


@dataclass
class Seen:
    """What became of one sample."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    error: Exception | None = None


def drain(
    core: EngineCore,
    found: dict[tuple[str, int], Seen] | None = None,
    *,
    steps: int | None = None,
) -> dict[tuple[str, int], Seen]:
    """Step (until nothing is left), adding to ``found``."""
    found = {} if found is None else found
    for _ in range(_MOST if steps is None else steps):
        if not core.has_work:
            return found
        for output in core.step():
            seen = found.setdefault((output.id, output.index), Seen())
            assert seen.reason is None, "an output after the end"
            seen.tokens += output.tokens
            seen.reason, seen.error = output.finish_reason, output.error
    assert steps is not None, "the engine does not come to an end"
    return found


class Oracle:
    """Drafts what the text will be, spoilt at chosen places: accepted and rejected at will.

    Random weights agree with a random draft head on nothing, so rejections alone would be seen.
    The head drafts all the same, so that what it reads and keeps is exercised.
    """

    def __init__(self, core: EngineCore, replay: str, wrong: Callable[[], bool]) -> None:
        drafter = core._drafter
        assert drafter is not None
        self._real = drafter.propose
        self._wrong = wrong
        self._vocab = core.limits.vocab_size
        self._replay = replay
        self._names = {each.params.seed: each.name for each in catalogue()}
        self._most = drafter._most
        drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(
        self, slots: Sequence[int], first: Sequence[int], samplers: Sequence[Sampler]
    ) -> list[tuple[int, ...]]:
        self._real(slots, first, samplers)
        return [self._draft(sampler) for sampler in samplers]

    def _draft(self, sampler: Sampler) -> tuple[int, ...]:
        at = sampler.position
        text = expected(self._replay, self._names[sampler.seed])[sampler._sample]
        return tuple(
            (token + 1) % self._vocab if self._wrong() else token
            for token in text[at : at + self._most]
        )
