"""What Prometheus sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynaexq.control import ControlLoop
from dynaexq.engine import Engine, FinishEvent, StepReport
from dynaexq.runtime import ExpertRuntime
from dynaexq.server.cache_metrics import describe_cache
from dynaexq.server.pace import Pace
from dynaexq.server.schedule_metrics import describe_scheduling

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """An engine's observer: counters and histograms of requests, tokens and steps."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.pace = Pace()

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"dynaexq_{name}", text, labels, registry=self.registry)

        def measure(name: str, text: str) -> Histogram:
            return Histogram(f"dynaexq_{name}_seconds", text, buckets=SECONDS, registry=self.registry)

        self._finished = count("requests", "Sequences that ended, by reason", "reason")
        self._prompt = count("prompt_tokens", "Prompt tokens of sequences that ended")
        self._reused = count("reused_tokens", "Prompt tokens that a slot held already")
        self._generated = count("generated_tokens", "Tokens generated")
        self._step_tokens = count("step_tokens", "Tokens computed, by kind", "kind")
        self._queue = measure("queue", "From submission to a slot")
        self._ttft = measure("ttft", "From submission to the first token")
        self._tpot = measure("tpot", "Between tokens after the first, mean of a sequence")
        self._whole = measure("request", "From submission to the end")
        self._step = measure("step", "One engine step")
        self._model = measure("step_model", "The model's part of a step")

    def watch(self, engine: Engine, runtime: ExpertRuntime) -> None:
        """Report on these from now on."""
        self.registry.register(_State(engine, runtime))

    def on_step(self, report: StepReport) -> None:
        """A step is done."""
        self._step.observe(report.seconds)
        self._model.observe(report.model_seconds)
        self._step_tokens.labels("prompt").inc(report.prompt_tokens)
        self._step_tokens.labels("decode").inc(report.decoded_tokens)
        self.pace.on_step(report)

    def on_finish(self, event: FinishEvent) -> None:
        """A sequence has ended."""
        self._finished.labels(event.reason.value).inc()
        self._prompt.inc(event.prompt_tokens)
        self._reused.inc(event.reused_tokens)
        self._generated.inc(event.generated_tokens)
        self._queue.observe(event.queue_seconds)
        self._whole.observe(event.seconds)
        if event.ttft_seconds is not None:
            self._ttft.observe(event.ttft_seconds)
        if event.tpot_seconds is not None:
            self._tpot.observe(event.tpot_seconds)
        self.pace.on_finish(event)


class _State(Collector):
    """What is asked for at each scrape: queue, slots, memory, versions."""

    def __init__(self, engine: Engine, runtime: ExpertRuntime) -> None:
        self._engine, self._runtime = engine, runtime

    def collect(self) -> Iterator[Metric]:
        counts, runtime = self._engine.counts(), self._runtime
        limit, used = runtime.budget.limit, runtime.budget.used
        yield _gauge("waiting", "Requests that wait for a slot", counts.waiting)
        yield _gauge("running", "Sequences in slots", counts.running)
        yield _gauge("slots_free", "Slots without a sequence", counts.slots_free)
        yield _gauge("budget_bytes", "The memory limit", limit)
        yield _gauge("budget_used_bytes", "Reserved of it", used)
        yield _gauge("budget_free_bytes", "Not reserved", limit - used)
        yield _by_label("memory_bytes", "The plan by part", "part", runtime.budget.parts)
        yield _gauge("hi_hit_share", "Share of routed traffic that ran above the lowest tier", runtime.hot_share_high)
        for name, value in vars(runtime.counters).items():
            yield CounterMetricFamily(f"dynaexq_{name}", "Transitions of expert versions", value=float(value))
        if cache := runtime.describe_cache():
            yield from describe_cache(cache)
        if self._engine.scheduler:
            yield from describe_scheduling(self._engine.scheduler.describe())
        yield from self._resident()
        if (shares := runtime.shares) is not None:
            tiers = (fmt.name for fmt in runtime.experts.formats)
            yield _by_label(
                "traffic_share", "Of routed traffic, by tier", "tier", dict(zip(tiers, shares.by_tier, strict=True))
            )
            by_layer = dict(enumerate(shares.raised_by_layer))
            yield _by_label("layer_hi_hit_share", "Share above the lowest tier by layer", "layer", by_layer)
        if runtime.control:
            yield from _describe_moves(runtime.control)

    def _resident(self) -> Iterator[Metric]:
        labels = ["layer", "tier"]
        resident = GaugeMetricFamily("dynaexq_resident_experts", "By layer and tier", labels=labels)
        nbytes = GaugeMetricFamily("dynaexq_resident_bytes", "Of their versions, by layer and tier", labels=labels)
        experts = self._runtime.experts
        shape = experts.shape
        in_force = experts.handles.formats().reshape(shape.layers, shape.experts)
        for index, (fmt, layout) in enumerate(zip(experts.formats, experts.layouts, strict=True)):
            for layer, count in enumerate((in_force == index).sum(1).tolist()):
                resident.add_metric([str(layer), fmt.name], float(count))
                nbytes.add_metric([str(layer), fmt.name], float(count * layout.extent_bytes))
        yield resident
        yield nbytes


def _describe_moves(control: ControlLoop) -> Iterator[Metric]:
    pipeline, signals = control.pipeline, control.signals
    link = pipeline.link
    yield _gauge("in_flight", "Versions on their way", len(pipeline.moving))
    yield _gauge("reclaim_waiting", "Blocks that wait for windows which can still read them", pipeline.waiting_blocks)
    yield _gauge("paused", "Whether transitions are paused", control.steering.paused)
    yield CounterMetricFamily("dynaexq_workload_shifts", "Shifts of the workload", value=float(signals.shifts))
    if (distance := signals.drift.distance) is not None:
        yield _gauge("routing_distance", "Of the last traffic from what hotness expected, 0 to 1", distance)
    if signals.shadow:
        for name, value in vars(signals.shadow.counts).items():
            if name != "ratio":
                yield CounterMetricFamily(f"dynaexq_shadow_{name}", "Of the shadow signal", value=float(value))
        yield _gauge("shadow_ratio", "Measured over expected losses of experts", signals.shadow.counts.ratio)
    if signals.pace and (slowdown := signals.pace.slowdown) is not None:
        yield _gauge("tpot_slowdown", "Of decode steps beside copies, as a share", slowdown)
    if link.limit is not None:
        yield _gauge("link_limit_bytes_per_second", "What background copies may take", link.limit)
    yield CounterMetricFamily("dynaexq_link_busy_seconds", "Spent in background copies", value=link.busy_seconds)
    for name, moves in (("promotions", pipeline.promotions_by_layer), ("demotions", pipeline.demotions_by_layer)):
        family = CounterMetricFamily(f"dynaexq_layer_{name}", "By layer", labels=["layer"])
        for layer, count in enumerate(moves.tolist()):
            family.add_metric([str(layer)], float(count))
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"dynaexq_{name}", text, value=float(value))


def _by_label(name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"dynaexq_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], float(value))
    return family
