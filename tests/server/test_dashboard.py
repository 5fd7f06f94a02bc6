"""The dashboard's page in a real browser, over states that are made up."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dynaexq.server.app import DASHBOARD
from support.png import Image
from support.state_server import Reply, StateServer, make_state, reply_state, serve_states

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
PAGE = DASHBOARD.read_text(encoding="utf-8")
HOSTILE = '<img src=x onerror="document.body.dataset.state=1">'
KEY = "a key"

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium")


def still(**changes: Any) -> dict[str, Any]:
    """A model at one tier, nothing of which moves."""
    one = {"name": "int4", "bits": 4.5, "experts": 192, "bytes": 9 << 20}
    nothing: dict[str, Any] = {"moving": [], "pinned": [], "hotness": None, "slots": [], "sequences": []}
    share: dict[str, Any] = {"hot_share_high": 1.0, "hot_share_high_by_layer": None}
    return make_state(mode="static", tiers=[one], map=["0" * 32] * 6, **nothing, **share, **changes)


def cached() -> dict[str, Any]:
    """A model of which some experts are resident, and the others read ahead."""
    tiers = [
        {"name": "int4", "bits": 4.5, "experts": 64, "bytes": 1 << 20},
        {"name": "not loaded", "bits": 0, "experts": 128, "bytes": 0},
    ]
    counts = {"capacity": 64, "hits": 9, "misses": 1, "hit_rate": 0.9}
    cache = {**counts, "hidden": 0.75, "recall": 0.8, "horizon": 2}
    return still(cache=cache) | {"mode": "expertflow", "tiers": tiers, "map": ["011" * 10 + "01"] * 6}


FRAMES = {  # name: width, state
    "wide": (1280, make_state()),
    "phone": (390, make_state()),
    "large": (390, make_state(94, 512)),
    "still": (390, still()),
    "cached": (390, cached()),
    "hostile": (390, make_state(model=HOSTILE * 3, mode=HOSTILE, status=HOSTILE, problems=[HOSTILE, "x" * 300])),
    "locked": (390, make_state()),
    "unlocked": (390, make_state()),
    "broken": (390, make_state()),
}
IDS = ("model", "mode", "status", "problems", "tokens-per-second", "budget-used", "promotions", "running", "moves-text")
WRAPPER = """<!doctype html><title>frames</title><style>body { margin: 0 } iframe { border: 0; height: 480px }</style>
<body><script>
const wanted = %s, ids = %s, facts = {}, frames = {}, errors = [];
for (const [name, width] of Object.entries(wanted)) {
  frames[name] = Object.assign(document.createElement("iframe"), { src: name + "/", width });
  document.body.append(frames[name], document.createElement("br"));
  frames[name].contentWindow.addEventListener("error", (event) => errors.push(name + ": " + event.message));
}
const key = (canvas, key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
function look(name) {
  const page = frames[name].contentDocument, at = (id) => page.getElementById(id), canvas = at("tier-map");
  const place = canvas.getBoundingClientRect().toJSON(), root = page.documentElement;
  const texts = Object.fromEntries(ids.map((id) => [id, at(id)?.textContent]));
  const shown = (id) => at(id).offsetParent !== null;
  facts[name] = { ...texts, place, wide: [root.scrollWidth, root.clientWidth], form: shown("key-form"),
    main: shown("main"), hot: shown("hot-map"), pictures: page.images.length,
    sparks: page.querySelectorAll("svg").length };
  if (name !== "phone") return;
  const tips = (facts[name].tips = []), say = () => tips.push(at("tip").hidden ? null : at("tip").textContent);
  const place_at = (x, y) => ({ clientX: place.x + x, clientY: place.y + y });
  const point = (x, y) => canvas.dispatchEvent(new PointerEvent("pointermove", place_at(x, y)));
  key(canvas, "ArrowRight"); say();
  for (let i = 0; i < 17; i++) key(canvas, "ArrowRight");
  for (let i = 0; i < 3; i++) key(canvas, "ArrowDown");
  say();
  key(canvas, "Escape"); say();
  point(place.width - 3, 20); say();
  point(30, 12); say();
  point(1, 1); say();
}
const timer = setInterval(() => {
  const page = (name) => frames[name].contentDocument, state = (name) => page(name)?.body?.dataset.state;
  if (state("unlocked") === "key" && !facts.asked) {
    page("unlocked").getElementById("key").value = "%s";
    page("unlocked").getElementById("key-form").requestSubmit();
    facts.asked = true;
  }
  const drawn = { locked: "key", broken: "lost" };
  if (!Object.keys(wanted).every((name) => state(name) === (drawn[name] ?? "drawn"))) return;
  clearInterval(timer);
  Object.keys(wanted).forEach(look);
  scrollTo(0, 0);  // the forms for keys took the focus
  facts.errors = errors;
  facts.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const text = { id: "facts", textContent: JSON.stringify(facts) };
  document.body.append(Object.assign(document.createElement("pre"), text));
}, 100);
</script>"""


class Texts(HTMLParser):
    """The text and attributes of elements by id, else by tag, and the headings."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.by_id: dict[str, str] = {}
        self.attributes: dict[str, dict[str, str | None]] = {}
        self.headings: list[str] = []
        self._tags: list[tuple[str, str | None]] = []
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        name = found.get("id")
        self.attributes[name or tag] = found
        if tag not in ("meta", "link", "input", "br"):
            self._tags.append((tag, name))

    def handle_endtag(self, tag: str) -> None:
        while self._tags and self._tags.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag, name in self._tags:
            if tag in ("h1", "h2", "h3"):
                self.headings.append(data)
            if name:
                self.by_id[name] = self.by_id.get(name, "") + data


def browse(url: str, directory: Path, *options: str) -> str:
    """What a page has become."""
    assert BROWSER is not None
    command = [BROWSER, *OPTIONS, f"--user-data-dir={directory / 'profile'}", *options, "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def answer_all(path: str, key: str | None) -> Reply:
    """The wrapper, the page in each frame, and the states that go with them."""
    _, name, *rest = path.split("/")
    if name == "frames":
        widths = {frame: width for frame, (width, _) in FRAMES.items()}
        return Reply(WRAPPER % (json.dumps(widths), json.dumps(IDS), KEY), "text/html")
    if rest == [""]:
        return Reply(PAGE, "text/html; charset=utf-8")
    if name == "broken":
        return Reply("{}", status=500)
    if name == "locked" or (name == "unlocked" and key != KEY):
        return Reply('{"error": {"message": "give the key"}}', status=401)
    return reply_state(FRAMES[name][1])


class Seen:
    """One run of the browser over all frames."""

    def __init__(self, server: StateServer, directory: Path, dark: bool) -> None:
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        shot = directory / "shot.png"
        size = (f"--screenshot={shot}", "--window-size=1280,480", "--virtual-time-budget=8000")
        dom = browse(f"{server.url}/frames", directory, scheme, *size)
        found = re.search('<pre id="facts">(.*?)</pre>', dom, re.DOTALL)
        assert found, dom[-3000:]
        self.facts = json.loads(html.unescape(found[1]))
        self.picture = Image(shot, rows=480)
        self.dark, self.paths = dark, server.paths

    def colour(self, name: str) -> tuple[int, ...]:
        """What the page's style says, for the scheme."""
        found = re.search(rf"--{name}: light-dark\(#(\w+), #(\w+)\)", PAGE)
        assert found
        return tuple(bytes.fromhex(found[2 if self.dark else 1]))


@pytest.fixture(scope="module", params=[False, True], ids=["light", "dark"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with serve_states(answer_all) as server:
        yield Seen(server, tmp_path_factory.mktemp("browser"), request.param)


@needs_browser
def test_frames_are_drawn_without_errors_or_other_requests(seen: Seen) -> None:
    assert seen.facts["errors"] == [] and seen.facts["dark"] is seen.dark
    allowed = {"/frames", *(f"/{name}/{file}" for name in FRAMES for file in ("", "state"))}
    assert seen.paths - {"/favicon.ico"} == allowed  # the wrapper has no icon; the page says that it has none


@needs_browser
def test_no_page_scrolls_sideways(seen: Seen) -> None:
    for name in FRAMES:
        scroll, client = seen.facts[name]["wide"]
        assert scroll <= client == FRAMES[name][0], name


@needs_browser
def test_cells_have_their_tiers_colours(seen: Seen) -> None:
    high, low = seen.colour("tier-0"), seen.colour("tier-1")
    place, state = seen.facts["wide"]["place"], FRAMES["wide"][1]
    xs, ys = (
        range(int(place[axis]), int(place[axis] + place[size])) for axis, size in (("x", "width"), ("y", "height"))
    )
    inside = [(x, y) for x, y in itertools.product(xs, ys) if seen.picture.at(x, y) in (high, low)]
    left, right = min(x for x, _ in inside), max(x for x, _ in inside) + 1
    top, bottom = min(y for _, y in inside), max(y for _, y in inside) + 1
    marked = {tuple(mark[:2]) for mark in state["moving"] + state["pinned"]}
    for layer, expert in itertools.product(range(6), range(32)):
        x = left + (expert + 0.5) * (right - left) / 32
        y = top + (layer + 0.5) * (bottom - top) / 6
        colour = seen.picture.at(x, y)
        if (layer, expert) in marked:
            assert colour in (seen.colour("moving"), seen.colour("card")), (layer, expert)
        else:
            assert colour == (high if state["map"][layer][expert] == "0" else low), (layer, expert)


@needs_browser
def test_single_experts_by_key_and_pointer(seen: Seen) -> None:
    first, moving, left, bar, pointed, outside = seen.facts["phone"]["tips"]
    assert first == pointed == "layer 0, expert 0: int4, hotness 0.0"
    assert moving == "layer 3, expert 17: int4, hotness 1.8, moving"
    assert bar == "layer 0: 50.0 % of its traffic above int4"
    assert left is None and outside is None


@needs_browser
def test_a_model_that_does_not_move(seen: Seen) -> None:
    facts = seen.facts["still"]
    assert not facts["hot"] and seen.facts["phone"]["hot"]
    assert facts["moves-text"] == "No expert changes its tier in mode static."
    assert facts["sparks"] == seen.facts["phone"]["sparks"] - 1  # all traffic is at the one tier


@needs_browser
def test_a_cache_says_what_it_meets_and_reads(seen: Seen) -> None:
    words = "64 experts resident at once, 75.0 % of reading hidden, 80.0 % of needs predicted, read 2 layers ahead"
    assert seen.facts["cached"]["moves-text"].startswith(words)


@needs_browser
def test_what_the_server_says_stays_text(seen: Seen) -> None:
    facts = seen.facts["hostile"]
    assert facts["model"] == HOSTILE * 3 and facts["mode"] == HOSTILE and facts["status"] == HOSTILE
    assert facts["problems"] == HOSTILE + "x" * 300
    assert facts["pictures"] == 0


@needs_browser
def test_a_key_is_asked_for(seen: Seen) -> None:
    locked, unlocked = seen.facts["locked"], seen.facts["unlocked"]
    assert locked["form"] and not locked["main"] and locked["status"] == "needs a key"
    assert unlocked["main"] and not unlocked["form"] and unlocked["model"] == "demo"


@needs_browser
def test_a_server_that_is_gone(seen: Seen) -> None:
    assert seen.facts["broken"]["status"] == "connection lost, trying again"


@needs_browser
def test_facts_are_text_and_rates_come_from_polls(tmp_path: Path) -> None:
    polls = itertools.count()

    def answer(path: str, _: str | None) -> Reply:
        return (
            reply_state(make_state(polls=next(polls))) if path == "/state" else Reply(PAGE, "text/html; charset=utf-8")
        )

    with serve_states(answer) as server:
        page = Texts(browse(server.url, tmp_path, "--virtual-time-budget=5000"))
    assert next(polls) > 3
    assert page.attributes["body"]["data-state"] == "drawn"
    texts = page.by_id
    assert (texts["model"], texts["mode"], texts["status"]) == ("demo", "dynaexq", "ready")
    assert texts["tokens-per-second"] == "74.3" and texts["ttft"] == "132 ms" and texts["step"] == "\u2013"
    assert texts["budget-used"] == "612.0 MiB of 700.0 MiB" and texts["budget-free"] == "88.0 MiB free"
    assert texts["running"] == "2 running in 4 slots of 4,096 tokens, 3 waiting"
    assert f"promotions{texts['promotions']}7.0" in texts["moves"] and "3.0 MiB" in texts["moves"]
    assert texts["moves-text"] == "2 in flight, 1 waiting for reclaim, at most 64.0 MiB a second"
    assert "prompt 64 of 100" in texts["sequences"] and "generated 32 of 64" in texts["sequences"]
    assert page.headings[0] == "demo" and {"Experts", "Memory", "Transitions", "Requests"} <= set(page.headings)
    label = page.attributes["tier-map"]["aria-label"]
    assert label and label.startswith(
        "6 layers of 32 experts: 64 at int8 (8.25 bits), 128 at int4 (4.5 bits); 2 moving"
    )


def test_the_page_asks_nobody_else() -> None:
    addresses = set(re.findall(r"https?://[^\"'\s]+", PAGE))
    assert addresses == {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}  # names, not places
    assert "default-src 'none'" in PAGE and "innerHTML" not in PAGE
