"""What Prometheus sees."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynaexq.engine import Engine, FinishEvent, StepReport
from dynaexq.runtime import ExpertRuntime

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """An engine's observer: counters and histograms of requests, tokens and steps."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

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
            if event.generated_tokens > 1:
                self._tpot.observe((event.seconds - event.ttft_seconds) / (event.generated_tokens - 1))


class _State(Collector):
    """What is asked for at each scrape: queue, slots, memory, versions."""

    def __init__(self, engine: Engine, runtime: ExpertRuntime) -> None:
        self._engine, self._runtime = engine, runtime

    def collect(self) -> Iterator[Metric]:
        counts, runtime = self._engine.counts(), self._runtime
        for name, value, text in (
            ("waiting", counts.waiting, "Requests that wait for a slot"),
            ("running", counts.running, "Sequences in slots"),
            ("slots_free", counts.slots_free, "Slots without a sequence"),
            ("budget_bytes", runtime.budget.limit, "The memory limit"),
            ("budget_used_bytes", runtime.budget.used, "Reserved of it"),
            ("hi_hit_share", runtime.hot_share_high, "Share of routed traffic that ran at the high tier"),
        ):
            yield GaugeMetricFamily(f"dynaexq_{name}", text, value=float(value))
        parts = GaugeMetricFamily("dynaexq_memory_bytes", "The plan by part", labels=["part"])
        for part, nbytes in runtime.budget.parts.items():
            parts.add_metric([part], float(nbytes))
        yield parts
        for name, value in vars(runtime.counters).items():
            yield CounterMetricFamily(f"dynaexq_{name}", "Transitions of expert versions", value=float(value))
        yield self._resident()

    def _resident(self) -> Metric:
        resident = GaugeMetricFamily("dynaexq_resident_experts", "By layer and tier", labels=["layer", "tier"])
        experts = self._runtime.experts
        shape = experts.shape
        in_force = experts.handles.formats().reshape(shape.layers, shape.experts)
        for index, fmt in enumerate(experts.formats):
            for layer, count in enumerate((in_force == index).sum(1).tolist()):
                resident.add_metric([str(layer), fmt.name], float(count))
        return resident
