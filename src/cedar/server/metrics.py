"""Figures for Prometheus; names are vLLM's where they mean the same.

Nothing here is global: every server has a registry of its own.
"""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from cedar.server.protocols import EngineLike, Output

__all__ = ["CONTENT_TYPE", "Metrics", "Timing"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_SECONDS: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_SECONDS += (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS: tuple[float, ...] = tuple(float(2**power) for power in range(0, 21, 2))
# The engine's reasons and what vLLM calls them.
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort"}


class Metrics:
    """What this server has done, and what its engine says of itself."""

    def __init__(self, engine: EngineLike, model: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineFigures(engine, model))
        self._model = model
        self._first = self._histogram("time_to_first_token_seconds", "Request to first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens.")
        self._whole = self._histogram("e2e_request_latency_seconds", "Request to last token.")
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for a slot.")
        self._prefill = self._histogram("request_prefill_time_seconds", "Slot to first token.")
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.")
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self._generated = self._histogram(
            "request_generation_tokens", "Generated tokens of a sample.", _TOKENS
        )
        self._answers = Counter(
            "cedar:http_responses",
            "Responses by route and status; 499 is a client that left.",
            ["route", "status"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        made = Histogram(
            f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
        )
        return made.labels(self._model)

    def answered(self, route: str, status: int) -> None:
        """A response, or 499 for a client that left before it had one."""
        self._answers.labels(route, str(status)).inc()

    def timing(self) -> "Timing":
        """Follows one HTTP request from now on."""
        return Timing(self)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class Timing:
    """When the tokens of one HTTP request came."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._latest: dict[tuple[int, int], float] = {}

    def saw(self, place: int, output: Output) -> None:
        """An output of the request at this place has come."""
        now, metrics = time.monotonic(), self._metrics
        key = (place, output.index)
        if output.tokens:
            before = self._latest.get(key)
            if before is None:
                metrics._first.observe(now - self._start)
            else:  # tokens of one pass come together
                for _ in output.tokens:
                    metrics._between.observe((now - before) / len(output.tokens))
            self._latest[key] = now
        if output.finish_reason in ("stop", "length"):
            usage = output.usage
            metrics._whole.observe(now - self._start)
            metrics._queue.observe(usage.queue_seconds)
            metrics._prefill.observe(usage.prefill_seconds)
            metrics._decode.observe(usage.decode_seconds)
            metrics._prompt.observe(usage.prompt_tokens)
            metrics._generated.observe(usage.generated_tokens)


class _EngineFigures(Collector):
    """The engine's own counts, read when somebody asks."""

    def __init__(self, engine: EngineLike, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        share = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Pages in use, 1 is all.", share)
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Generated tokens.", stats.generated_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens),
            ("vllm:num_preemptions", "Sequences that lost their pages.", stats.preemptions),
            ("vllm:spec_decode_num_draft_tokens", "Drafts verified.", sum(stats.drafted)),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts that held.", sum(stats.accepted)),
            ("cedar:computed_tokens", "Tokens that the model ran.", stats.computed_tokens),
            ("cedar:steps", "Passes of the model.", stats.steps),
            ("cedar:busy_seconds", "Time spent in passes.", stats.busy_seconds),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that held, by place in the block.",
            labels=["model_name", "position"],
        )
        for place, count in enumerate(stats.accepted):
            places.add_metric([self._model, str(place)], count)
        yield places
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Samples by how they ended.",
            labels=["model_name", "finished_reason"],
        )
        counts: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        for reason, count in stats.finished.items():
            counts[_REASONS.get(reason, "error")] += count
        for reason, count in counts.items():
            ended.add_metric([self._model, reason], count)
        yield ended
        yield self._gauge("cedar:cache_bytes_held", "Pages and slots in use.", stats.bytes_held)
        yield self._gauge("cedar:cache_bytes_reserved", "Pools and slots.", stats.bytes_reserved)
        yield self._gauge("cedar:engine_alive", "1 while it serves.", float(self._engine.alive))

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge
