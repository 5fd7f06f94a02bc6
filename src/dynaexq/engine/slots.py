"""Which sequence is in which slot, and what a free slot still holds of an earlier one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Slot:
    """Tokens whose keys and values are in the model's slot `number`; `busy` while a sequence uses it."""

    number: int
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    last_used: int = 0


@dataclass(frozen=True)
class Reuse:
    """A slot for a new sequence, and what of its prompt need not be computed: `length` tokens of slot `source`."""

    slot: Slot
    source: Slot
    length: int


class SlotTable:
    """The slots of a model. A free slot keeps its tokens: a conversation that goes on finds its beginning there."""

    def __init__(self, count: int, cuts: bool, reuse: bool) -> None:
        """`cuts`: whether a slot can go back to any earlier length; `reuse`: whether beginnings are reused at all."""
        self.slots = [Slot(number) for number in range(count)]
        self._cuts, self._reuse = cuts, reuse
        self._clock = 0

    @property
    def free(self) -> int:
        """Slots that no sequence uses."""
        return sum(not slot.busy for slot in self.slots)

    def take(self, prompt: tuple[int, ...]) -> Reuse:
        """Give a free slot to a prompt: the one that holds most of its beginning, else the longest unused.

        The last token of the prompt is never reused: its logits are wanted.
        """
        free = [slot for slot in self.slots if not slot.busy]
        assert free, "no slot is free"
        oldest = min(free, key=lambda slot: (slot.last_used, slot.number))
        best = Reuse(oldest, oldest, 0)
        for source in self.slots if self._reuse else []:
            if source.busy and not self._cuts:
                continue
            length = common_length(source.tokens, prompt[:-1])
            if not self._cuts and length < len(source.tokens):
                continue  # a recurrent state is that of all its tokens
            if length > best.length or (length == best.length > 0 and not source.busy and best.source.busy):
                best = Reuse(oldest if source.busy else source, source, length)
        slot = best.slot
        slot.busy = True
        slot.tokens = list(prompt[: best.length])
        return best

    def resembling(self, prompt: tuple[int, ...], slots: list[Slot], least: int) -> int | None:
        """The number of that of `slots` which holds most of a prompt's beginning, at least so many tokens."""
        longest, number = max(((common_length(slot.tokens, prompt), -slot.number) for slot in slots), default=(0, 0))
        return -number if longest >= least else None

    def release(self, slot: Slot) -> None:
        """The sequence in `slot` has ended; its tokens stay."""
        self._clock += 1
        slot.busy, slot.last_used = False, self._clock


def common_length(held: list[int], prompt: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    count = min(len(held), len(prompt))
    if tuple(held[:count]) == prompt[:count]:
        return count
    return next(i for i in range(count) if held[i] != prompt[i])
