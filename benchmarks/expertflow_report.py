"""Tables of `benchmarks.expertflow`: factors, the bound beside what was measured, targets, equal bytes, workloads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.adaptive_report import table
from benchmarks.expertflow_bound import DEFAULT, FLOOR, LRU, Row, find_bound, hide
from dynaexq.plan.memory import MIB
from dynaexq.policy.caching import FLOW
from dynaexq.simulate.cache import BELADY

BASE = {"link": 1.0, "cache": 0.3, "batch": 1, "prompt": 64}
NAMES = {
    "link": "layer times that a load takes", "cache": "experts resident", "batch": "batch", "prompt": "prompt tokens",
}  # fmt: skip
HITS, HIDDEN, SPEED_UP = 0.9, 0.8, 1.9
"""Targets: of Belady's hits; of load time at batch 8; over `lru` where 30 % are resident."""

PAPER, ACROSS = "paper: ", "across"


def render(result: dict[str, Any]) -> str:
    """Markdown of a result: factors, targets, equal bytes, workloads; what is not there is left out."""
    rows: dict[str, Row] = result["rows"]
    plain = [row for key, row in rows.items() if key != ACROSS and not key.startswith(PAPER)]
    paper = [row for key, row in rows.items() if key.startswith(PAPER)]
    lines: list[str] = []
    for model in dict.fromkeys(row["point"]["model"] for row in plain):
        mine = [row for row in plain if row["point"]["model"] == model]
        varied = [factor for factor in BASE if len(pick_rows(mine, factor)) > 1] or list(BASE)[:1]
        for factor in varied:
            lines += _render_factor(model, factor, pick_rows(mine, factor))
        lines += ["", f"Targets, {model}:", "", *_judge(mine)]
    if paper:
        lines += _render_paper(paper)
    if ACROSS in rows:
        lines += _render_across(rows[ACROSS])
    return "\n".join(lines).strip()


def pick_rows(rows: list[Row], factor: str) -> list[Row]:
    """Rows of one model that differ from the base in nothing but `factor`, the disk last."""
    others = [name for name in BASE if name != factor]
    same = [row for row in rows if all(row["point"][name] == BASE[name] for name in others)]
    return sorted(same, key=lambda row: float("inf") if row["point"][factor] is None else row["point"][factor])


def show_value(factor: str, row: Row) -> str:
    """Where a row is on its axis."""
    value = row["point"][factor]
    if factor == "cache":
        return f"{100 * value:.0f} %"
    return "disk" if value is None else f"{value:g}"


def _render_factor(model: str, factor: str, rows: list[Row]) -> list[str]:
    if not rows:
        return []
    modes = list(rows[0]["modes"])
    flows = [name for name in modes if name.startswith(FLOW)]
    heads = [NAMES[factor], "layer ms", *modes, *(f"{_short(name)} / {LRU}" for name in flows)]
    heads += ["at most", "bound by", f"hits: {LRU}", *map(_short, flows), BELADY]
    return [
        "",
        f"**{model}, {NAMES[factor]}**: tokens a second, times `lru`, needs met.",
        "",
        *table(heads, [_factor_cells(factor, row, modes, flows) for row in rows]),
    ]


def _factor_cells(factor: str, row: Row, modes: list[str], flows: list[str]) -> list[str]:
    found, bound = row["modes"], find_bound(row)
    speeds = {name: mode["tokens_per_second"] for name, mode in found.items()}
    return [
        show_value(factor, row),
        f"{row['layer_ms']:.2f}",
        *(f"{speeds[name]:.3g}" if name in speeds else "" for name in modes),
        *(f"{speeds[name] / speeds[LRU]:.2f}" if name in speeds else "" for name in flows),
        f"{bound.over_lru:.2f}",
        bound.by,
        *(_percent(found.get(name, {}).get("hit_rate")) for name in (LRU, *flows)),
        _percent(row[BELADY]["hit_rate"]),
    ]


def _judge(rows: list[Row]) -> Iterator[str]:
    """Each target that rows speak of: met, or missed and whether it can be met at all."""
    for row in pick_rows(rows, "cache"):
        if (most := row[BELADY]["hit_rate"]) and row["point"]["cache"] < 1:
            values = {name: mode["hit_rate"] / most for name, mode in _flows(row)}
            yield _verdict(row, "cache", f"{_percent(HITS)} of Belady's hits ({_percent(most)})", HITS, values, None)
    for row in pick_rows(rows, "batch"):
        if row["point"]["batch"] == 8:
            values = {name: mode.get("hidden", 0.0) for name, mode in _flows(row)}
            of_link = [(_short(name), *hide(row, name)) for name in values]
            said = ", ".join(f"{name} {share:.2f} and at most {most:.2f}" for name, share, most in of_link)
            verdict = _verdict(row, "batch", f"{_percent(HIDDEN)} of load time hidden", HIDDEN, values, None)
            yield f"{verdict}; of the link's own time {said}"
    for factor in ("link", "batch", "prompt"):
        others = [row for row in pick_rows(rows, factor) if factor == "link" or row["point"][factor] != BASE[factor]]
        for row in others:
            least = row["modes"][LRU]["tokens_per_second"]
            values = {name: mode["tokens_per_second"] / least for name, mode in _flows(row)}
            most = find_bound(row).over_lru
            yield _verdict(row, factor, f"{SPEED_UP} times the tokens of `lru`", SPEED_UP, values, most)


def _flows(row: Row) -> list[tuple[str, dict[str, float]]]:
    return [(name, mode) for name, mode in row["modes"].items() if name.startswith(FLOW)]


def _verdict(row: Row, factor: str, what: str, target: float, values: dict[str, float], most: float | None) -> str:
    met = values[DEFAULT] >= target
    said = ", ".join(f"{_short(name)} {value:.2f}" for name, value in values.items())
    limit = "" if most is None else f"; at most {most:.2f}"
    impossible = not met and most is not None and most < target
    verdict = "met" if met else "missed, and out of reach" if impossible else "missed"
    return f"* {NAMES[factor]} {show_value(factor, row)}: {what}: **{verdict}** ({said}{limit})"


def _short(name: str) -> str:
    return name.removeprefix(FLOW).strip()


def _render_paper(rows: list[Row]) -> list[str]:
    modes = [name for name in rows[0]["modes"] if name != FLOOR]
    point = rows[0]["point"]
    heads = ["batch", *(f"{name}: tokens/s" for name in modes), f"{FLOOR} at int4, which does not fit", f"over {FLOW}"]
    heads += [f"{name}: TPOT mean / P99 ms" for name in modes] + [f"{name}: waits" for name in modes]
    return [
        "",
        f"**{point['model']}, experts held to {100 * point['cache']:.0f} % of their bytes at int4** (weights are "
        "random: speed alone compares; a load of an expert takes one layer time at int4):",
        "",
        *table(heads, [_paper_cells(row, modes) for row in sorted(rows, key=lambda row: row["point"]["batch"])]),
    ]


def _paper_cells(row: Row, modes: list[str]) -> list[str]:
    found = row["modes"]
    speeds = [found[name]["tokens_per_second"] for name in modes]
    return [
        f"{row['point']['batch']}",
        *(f"{speed:.3g}" for speed in speeds),
        f"{found[FLOOR]['tokens_per_second']:.3g}",
        ", ".join(f"{speed / speeds[-1]:.2f}" for speed in speeds[:-1]),
        *(f"{found[name]['tpot_ms']:.1f} / {found[name]['tpot_p99_ms']:.1f}" for name in modes),
        *(_percent(found[name]["wait_share"]) for name in modes),
    ]


def _render_across(row: Row) -> list[str]:
    recall, distances = row["recall"], row["distances"]
    judged = list(row["tokens"])
    heads = ["predictor", *(f"{name}, {distance} ahead" for distance in distances for name in judged)]
    cells = [
        [
            f"trained on {name}" if name in judged else name,
            *(_percent(found[each][place]) for place in range(len(distances)) for each in judged),
        ]
        for name, found in recall.items()
    ]
    tokens = ", ".join(f"{name} {count:,}" for name, count in row["tokens"].items())
    return [
        "",
        f"**Predictions in and across workloads** (embedded model; share of chosen experts among as many that are "
        f"named, on held-out requests, so many layers ahead; tokens: {tokens}):",
        "",
        *table(heads, cells),
    ]


def render_details(result: dict[str, Any]) -> str:
    """A table of everything, by row and mode."""
    heads = ["mode", "tokens/s", "TTFT ms", "TPOT ms", "P99", "wait s", "share", "hidden", "hits", "recall"]
    heads += ["precision", "loads", "ahead", "late", "wasted", "MiB read"]
    lines: list[str] = []
    for key, row in result["rows"].items():
        if key == ACROSS:
            continue
        link = "as the store reads" if row["link_gbps"] is None else f"{row['link_gbps']:.3g} GB/s"
        lines += [
            "",
            f"{key}: {row['answer']} tokens an answer, {row['rounds']} rounds; a layer {row['layer_ms']:.2f} ms, an "
            f"expert {row['expert_bytes'] / MIB:.3g} MiB, the link {link}, the store {row['read_gbps']:.3g} GB/s",
        ]
        if BELADY in row:
            bound, most = find_bound(row), row[BELADY]
            lines.append(
                f"Belady: {_percent(most['hit_rate'])} hits, {most['misses']:.0f} loads; so a round takes at least "
                f"{bound.seconds:.3g} s ({bound.by}), {bound.over_lru:.2f} times as fast as {LRU}"
            )
        lines += ["", *table(heads, [_detail_cells(name, mode) for name, mode in row["modes"].items()])]
    return "\n".join(lines).strip()


def _detail_cells(name: str, mode: dict[str, float]) -> list[str]:
    return [
        name,
        f"{mode['tokens_per_second']:.3g}",
        *(f"{mode[each]:.3g}" for each in ("ttft_ms", "tpot_ms", "tpot_p99_ms", "wait_seconds")),
        *(_percent(mode.get(each)) for each in ("wait_share", "hidden", "hit_rate", "recall", "precision")),
        *(f"{mode[each]:.0f}" for each in ("loads", "loads_ahead", "late", "wasted")),
        f"{mode['bytes_moved'] / MIB:.0f}",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
