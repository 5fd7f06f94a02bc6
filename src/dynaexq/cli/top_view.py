"""One frame of `dynaexq top`, made of `Text`: rich reads no markup in what the server says."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dynaexq.cli.top_state import Cache, Percentiles, RunningSequence, ServerState
from dynaexq.plan.memory import format_bytes

BAR = 30
MOST_SEQUENCES = 8
TIER_MARKS = "#.-~"
TIER_STYLES = ("blue", "yellow", "magenta", "cyan")
COUNTERS = ("promotions", "demotions", "evictions", "deferred", "failed", "waits")


def show_frame(console: Console, state: ServerState, before: ServerState | None, whole: bool) -> Group:
    """Everything about a server; rates are those since `before`. Unless `whole`, the map has room in the terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("memory", _show_memory(state))
    table.add_row("tiers", _show_tiers(state))
    table.add_row("moves", _show_moves(state, before))
    table.add_row("speed", _show_speed(state))
    table.add_row("requests", _show_requests(state))
    above = Group(_show_header(state), table, *_show_sequences(state.sequences), Text())
    rows = len(state.map) if whole else max(console.height - len(console.render_lines(above)) - 1, 3)
    return Group(above, *show_map(state, max(console.width - 16, 10), rows))


def _show_header(state: ServerState) -> Text:
    hours, minutes = divmod(int(state.uptime_seconds) // 60, 60)
    style = "green" if state.status == "ready" else "yellow"
    text = Text.assemble(
        (state.model, "bold"), "  ", state.mode, ", paused" if state.paused else "", "  ",
        (state.status, style), (f"  up {hours} h {minutes} min, DynaExq {state.version}", "dim"),
    )  # fmt: skip
    for problem in state.problems:
        text.append(f"\n{problem}", "yellow")
    return text


def _show_memory(state: ServerState) -> Text:
    memory, experts = state.memory, state.expert_memory
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in memory.parts.items())
    return Text.assemble(
        _show_bar(memory.used, memory.limit), f" {format_bytes(memory.used)} of {format_bytes(memory.limit)}\n",
        (f"{parts}\n", "dim"), f"experts hold {format_bytes(experts.bytes)} of {format_bytes(experts.most)}",
    )  # fmt: skip


def _show_tiers(state: ServerState) -> Text:
    text = Text()
    for index, tier in enumerate(state.tiers):
        mark, style = _tier_look(index)
        text.append(f"{mark} ", style).append(f"{tier.name} ({tier.bits:.4g} bits): {tier.experts:,} experts, ")
        text.append(f"{format_bytes(tier.bytes)}\n")
    if len(state.tiers) > 1 and not state.cache:
        text.append(f"{100 * state.hot_share_high:.1f} % of routed traffic above {state.tiers[-1].name}")
    text.rstrip()
    return text


def _show_moves(state: ServerState, before: ServerState | None) -> Text:
    if state.cache:
        cache, now = state.cache, state.transitions
        needs = cache.hits + cache.misses
        met = f"{100 * cache.hit_rate:.1f} % of {needs:,} needs were met by {cache.capacity:,} experts"
        read = f"{format_bytes(now.bytes_moved)} read, {now.waits:,} layers waited {now.wait_seconds:.1f} s"
        return Text(f"{met}\n{read}, {now.failed:,} failed{_show_reads(cache)}")
    if not state.slots:
        return Text(f"no expert changes its tier in mode {state.mode}")
    now, passed = state.transitions, state.uptime_seconds - before.uptime_seconds if before else 0.0

    def rate(name: str) -> float | None:
        return (getattr(now, name) - getattr(before.transitions, name)) / passed if before and passed > 0 else None

    counts = []
    for name in COUNTERS:
        speed = rate(name)
        counts.append(f"{getattr(now, name):,} {name}" + ("" if speed is None else f" ({speed:.1f}/s)"))
    moved = rate("bytes_moved")
    link = f" of at most {format_bytes(now.link_limit)}/s" if now.link_limit else ""
    flow = f"{format_bytes(now.bytes_moved)} moved" + ("" if moved is None else f" ({format_bytes(moved)}/s{link})")
    paused = "paused, " if state.paused else ""
    waited = f", waited {now.wait_seconds:.1f} s" if now.waits else ""
    way = f"{paused}{now.in_flight} in flight, {now.reclaiming} waiting for reclaim, {flow}{waited}"
    return Text(", ".join(counts) + "\n" + way)


def _show_reads(cache: Cache) -> str:
    """What reading ahead brings, where it is known."""
    words = [] if cache.hidden is None else [f"{100 * cache.hidden:.1f} % of reading hidden"]
    if cache.recall is not None:
        words.append(f"{100 * cache.recall:.1f} % of needs predicted")
    if cache.horizon is not None:
        words.append(f"{cache.horizon} layers ahead")
    return "\n" + ", ".join(words) if words else ""


def _show_speed(state: ServerState) -> Text:
    speed = state.speed
    times = (("TTFT", speed.ttft), ("TPOT", speed.tpot), ("step", speed.step))
    known = [f"{name} {_show_times(found)}" for name, found in times if found]
    first = f"{speed.tokens_per_second:.1f} tokens/s, {speed.prompt_tokens_per_second:.1f} prompt tokens/s"
    text = Text(f"{first}, over {speed.seconds:.0f} s")
    return text.append("\n" + "; ".join(known)) if known else text


def _show_times(found: Percentiles) -> str:
    return f"p50 {_show_seconds(found.p50)} p99 {_show_seconds(found.p99)}"


def _show_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _show_requests(state: ServerState) -> Text:
    found = state.requests
    ended = ", ".join(f"{count:,} {why}" for why, count in found.finished.items())
    slots = f"{found.running} running in {found.slots} slots of {found.room:,} tokens, {found.waiting} waiting"
    return Text(f"{slots}\nended: {ended}")


def _show_sequences(sequences: Sequence[RunningSequence]) -> list[Text]:
    lines = []
    for one in sequences[:MOST_SEQUENCES]:
        prompt = one.state == "prefill"
        done, of = (one.done, one.prompt) if prompt else (one.generated, one.most)
        what = "prompt" if prompt else "answer"
        start = Text(f"{one.number:>8}  {what}  ", "dim")
        lines.append(start.append_text(_show_bar(done, of)).append(f" {done:,} of {of:,}, {one.seconds:.1f} s"))
    if len(sequences) > MOST_SEQUENCES:
        lines.append(Text(f"{'':10}and {len(sequences) - MOST_SEQUENCES} more", "dim"))
    return lines


def _show_bar(done: float, of: float) -> Text:
    filled = round(BAR * min(done / of, 1)) if of > 0 else 0
    return Text.assemble("[", ("#" * filled, "blue"), ("." * (BAR - filled), "dim"), "]")


def show_map(state: ServerState, columns: int, rows: int) -> list[Text]:
    """A mark for each expert or, where they do not fit, for a block of them the tenths that are at the highest tier."""
    tall, wide = -(-len(state.map) // rows), -(-len(state.map[0]) // columns)  # rounded up
    single = tall == wide == 1
    shares = state.hot_share_high_by_layer if len(state.tiers) > 1 else None
    what = "o pinned, + moving" if single else f"tenths at the highest tier, of {tall} x {wide} experts"
    lines = [Text(f"layer  {what}" + ("; share of traffic there" if shares else ""), "dim")]
    marks = {(layer, expert): "o" for layer, expert, _ in state.pinned} | dict.fromkeys(state.moving, "+")
    for layer in range(0, len(state.map), tall):
        line, block = Text(f"{layer:>5}  ", "dim"), state.map[layer : layer + tall]
        for expert in range(0, len(block[0]), wide):
            part = "".join(row[expert : expert + wide] for row in block)
            mark, style = _tier_look(int(part)) if single else _share_look(part.count("0") / len(part))
            line.append(marks.get((layer, expert), mark) if single else mark, style)
        if shares:
            line.append(f"  {100 * mean(shares[layer : layer + tall]):.0f} %", "dim")
        lines.append(line)
    return lines


def _share_look(share: float) -> tuple[str, str]:
    return str(min(9, int(10 * share))), TIER_STYLES[0] if share >= 0.5 else TIER_STYLES[1]


def _tier_look(index: int) -> tuple[str, str]:
    return TIER_MARKS[index % len(TIER_MARKS)], TIER_STYLES[index % len(TIER_STYLES)]
