"""Checks of a trace: how well its routing can be foreseen by what it was."""

from __future__ import annotations

from dynaexq.doctor.figures import Figures
from dynaexq.doctor.verdicts import Status, Verdict, grade_high, grade_low, judge, percent, too_few

FEWEST_TOKENS = 500
"""Of a trace: with fewer, entropy looks low and repetition is that of one or two requests."""

FEWEST_SELECTIONS = 20
"""Of an average expert in either half: the hottest experts of fewer are hot by chance."""

SKEWED, EVEN = 0.85, 0.95
"""Entropy as a share of that of even routing. At 0.85, a fourth of the experts gets half of the traffic and more; above
0.95 hardly more than its share."""

REPEATING, BY_CHANCE = 1.5, 1.1
"""Times that the next token chooses an expert again, over chance."""

STABLE, SHIFTING = 0.7, 0.4
"""Share of the hottest fourth that both halves have in common; a fourth is what chance gives."""

NARROW, WIDE = 0.4, 0.7
"""Share of a layer's experts that one pass needs: a cache below that gives up who is needed in the next pass."""


def check_skew(figures: Figures) -> Verdict:
    """Is some of the experts' traffic much larger?"""
    if figures.entropy is None or (figures.tokens or 0) < FEWEST_TOKENS:
        return too_few(figures.tokens, FEWEST_TOKENS, "tokens")
    text = f"the entropy of routing is {percent(figures.entropy)} of that of even routing"
    advice = "`--mode expertflow`, not `lfu`: keeping who is used most holds little of such traffic"
    return judge(grade_low(figures.entropy, SKEWED, EVEN), text, advice)


def check_repetition(figures: Figures) -> Verdict:
    """Do tokens choose what the last ones chose?"""
    if figures.repeats is None or not figures.chance or (figures.tokens or 0) < FEWEST_TOKENS:
        return too_few(figures.tokens, FEWEST_TOKENS, "tokens of known requests")
    times = figures.repeats / figures.chance
    text = f"the next token chooses an expert again {times:.2f} times as often as by chance"
    advice = "`--predictor pregate`, not `average`: it looks at hidden states, not at the past"
    return judge(grade_high(times, REPEATING, BY_CHANCE), text, advice)


def check_stability(figures: Figures) -> Verdict:
    """Do the same experts stay hot?"""
    if figures.stability is None or (figures.selections or 0) < FEWEST_SELECTIONS:
        return too_few(figures.selections, FEWEST_SELECTIONS, "selections of an average expert in each half")
    text = f"{percent(figures.stability)} of the hottest experts are hot in both halves"
    advice = "`--mode dynaexq` or a cache, not `static-map`: the workload shifts"
    return judge(grade_high(figures.stability, STABLE, SHIFTING), text, advice)


def check_spread(figures: Figures) -> Verdict:
    """Does a pass need few of the experts?"""
    if figures.spread is None or (figures.tokens or 0) < FEWEST_TOKENS:
        return too_few(figures.tokens, FEWEST_TOKENS, "tokens, some of them decoded,")
    text = f"a pass of {figures.spread_tokens:.0f} tokens needs {percent(figures.spread)} of a layer's experts"
    advice = (
        f"`--slots {max(1, int(figures.spread_tokens or 2) // 2)}` in a cached mode: fewer tokens need fewer experts"
    )
    return judge(grade_low(figures.spread, NARROW, WIDE), text, advice)


def check_routing(figures: Figures) -> Verdict:
    """Is there anything to foresee routing by?"""
    if figures.entropy is None or figures.repeats is None or not figures.chance:
        return too_few(figures.tokens, FEWEST_TOKENS, "tokens of known requests")
    if (figures.tokens or 0) < FEWEST_TOKENS:
        return too_few(figures.tokens, FEWEST_TOKENS, "tokens")
    if figures.entropy > EVEN and figures.repeats < BY_CHANCE * figures.chance:
        text = "routing is erratic: even, and without repetition; no predictor of the past will help"
        return Verdict(Status.BAD, text, "`--mode dynaexq`, where every expert is resident and none is waited for")
    return Verdict(Status.GOOD, "routing is uneven or repeats: there is something to foresee it by")
