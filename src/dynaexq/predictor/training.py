"""Training of predictors, in CPU minutes: the corrector layer by layer, then the network over the last tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dynaexq.core import OptionError
from dynaexq.policy.prediction import Matrix, Routers, standardise
from dynaexq.predictor.corrector import CorrectorLayer
from dynaexq.predictor.examples import Examples
from dynaexq.predictor.files import PredictorFile, PredictorHead
from dynaexq.predictor.windows import WindowExamples, WindowNetwork, gather_windows

NETWORK_PARAMETERS = 1_000_000
"""Of the network over the last tokens, about (ExpertFlow, section 2)."""

BATCH = 256
CORRECTOR, NETWORK = {"lr": 3e-3, "weight_decay": 1e-4}, {"lr": 3e-4, "weight_decay": 0.1}
"""How fast they learn, and forget: the network has far more weights than moments to learn from."""


@dataclass(frozen=True)
class TrainingOptions:
    """What to train.

    Args:
        width: numbers inside the corrector of a layer.
        reach: layers that it looks ahead.
        window: tokens that the network looks back on (32 to 128 are worth it: routing further back says little).
        ahead: passes that its chances are for.
        epochs: times that all examples are gone over.
        seed: of the first weights and the order of examples.
    """

    width: int = 64
    reach: int = 4
    window: int = 64
    ahead: int = 8
    epochs: int = 12
    seed: int = 0

    def check(self, layers: int) -> None:
        """Raise OptionError for values out of range, for a model of so many MoE layers."""
        ranges = {
            "width": (self.width, 4, 1024),
            "reach": (self.reach, 1, layers),
            "window": (self.window, 8, 512),
            "ahead": (self.ahead, 1, 64),
            "epochs": (self.epochs, 1, 1000),
        }
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:
                raise OptionError(f"--{name} {value} is not in {low}..{high}")


def train_predictor(
    examples: Examples,
    routers: Routers | None,
    options: TrainingOptions,
    earlier: PredictorFile | None,
    progress: Callable[[str, int, int], None],
) -> PredictorFile:
    """A predictor that learned from what is not held out, from the start or from an `earlier` one on.

    Raises:
        OptionError: the earlier one is of other sizes than `options` says, or too few tokens follow each other.
    """
    head = make_head(examples, options, routers is not None)
    if earlier is not None and (earlier.head.shapes, earlier.head.routers) != (head.shapes, head.routers):
        raise OptionError("the predictor to go on from is of another model, or of other --width, --reach and --window")
    torch.manual_seed(options.seed)
    windows = gather_windows(examples, options.window, options.ahead)
    random = np.random.default_rng(options.seed)
    layers = []
    for layer in range(head.layers):
        layers.append(_train_layer(examples, routers, head, layer, options.epochs, random, earlier))
        progress("corrector", layer + 1, head.layers)
    network = _train_network(windows, head, options.epochs, random, earlier, progress)
    tensors = {f"corrector.{name}": np.stack([each[name] for each in layers]) for name in layers[0]}
    return PredictorFile(head, {**tensors, **{f"window.{name}": value for name, value in network.items()}})


def make_head(examples: Examples, options: TrainingOptions, routers: bool) -> PredictorHead:
    """What the predictor will be of; `routers`: those of the model are known."""
    head = examples.head
    size = head.layers * head.experts
    given = 2 * head.hidden + size + size
    middle = (math.sqrt(given**2 + 4 * NETWORK_PARAMETERS) - given) / 2
    return PredictorHead(
        fingerprint=head.fingerprint,
        layers=head.layers,
        experts=head.experts,
        hidden=head.hidden,
        top_k=head.top_k,
        width=options.width,
        middle=int(min(512, max(32, middle // 16 * 16))),
        reach=options.reach,
        window=options.window,
        ahead=options.ahead,
        routers=routers,
        tokens=int((~examples.held).sum()),
    )


def routers_say(hidden: Matrix, routers: Routers | None, head: PredictorHead, layer: int) -> Matrix:
    """What the routers of the following layers say to hidden states, [tokens, reach, experts]; 0 without."""
    said = np.zeros((len(hidden), head.reach, head.experts), np.float32)
    following = min(head.reach, head.layers - 1 - layer)
    if routers is not None and following:
        weights = routers.weights[layer + 1 : layer + 1 + following]
        said[:, :following] = standardise(np.einsum("th,leh->tle", hidden, weights, optimize=True), head.top_k)
    return said


def _train_layer(
    examples: Examples,
    routers: Routers | None,
    head: PredictorHead,
    layer: int,
    epochs: int,
    random: np.random.Generator,
    earlier: PredictorFile | None,
) -> dict[str, Matrix]:
    assert examples.hidden is not None
    learned = np.flatnonzero(~examples.held)
    hidden = examples.hidden[learned, layer].astype(np.float32)
    wanted, known = _list_wanted(examples, head, layer)
    said = torch.from_numpy(routers_say(hidden, routers, head, layer))
    model = CorrectorLayer(head, float(np.sqrt((hidden**2).mean())))
    if earlier is not None:
        model.load(earlier, layer)
    given = torch.from_numpy(hidden)
    targets, masks = torch.from_numpy(wanted[learned]), torch.from_numpy(known[learned])[:, :, None]

    def loss(places: torch.Tensor) -> torch.Tensor:
        scores = model(given[places], said[places])
        each = nn.functional.binary_cross_entropy_with_logits(scores, targets[places].float(), reduction="none")
        return (each * masks[places]).sum() / masks[places].sum().clamp(min=1) / head.experts

    _descend(model, loss, len(learned), epochs, random, CORRECTOR)
    return model.tensors()


def _list_wanted(examples: Examples, head: PredictorHead, layer: int) -> tuple[Any, Any]:
    """Who every token chooses at each distance, bool [tokens, reach, experts], and whether that is known."""
    tokens = len(examples.ids)
    wanted = np.zeros((tokens, head.reach, head.experts), np.bool_)
    known = np.zeros((tokens, head.reach), np.bool_)
    for distance in range(1, head.reach + 1):
        have, chosen = examples.targets(layer, distance)
        wanted[have[:, None], distance - 1, chosen] = True
        known[have, distance - 1] = True
    return wanted, known


def _train_network(
    windows: WindowExamples,
    head: PredictorHead,
    epochs: int,
    random: np.random.Generator,
    earlier: PredictorFile | None,
    progress: Callable[[str, int, int], None],
) -> dict[str, Matrix]:
    given, wanted = (torch.from_numpy(each[~windows.held]) for each in (windows.given, windows.wanted))
    model = WindowNetwork(head, given)
    if earlier is not None:
        model.load(earlier)

    def loss(places: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(given[places]), wanted[places])

    _descend(model, loss, len(given), epochs, random, NETWORK, lambda done: progress("window", done, epochs))
    return model.tensors()


def _descend(
    model: nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    count: int,
    epochs: int,
    random: np.random.Generator,
    speed: dict[str, float],
    tell: Callable[[int], None] = lambda _: None,
) -> None:
    steps = epochs * max(1, count // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), **speed)  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(epochs):
        for places in _batches(count, random):
            optimizer.zero_grad()
            loss(places).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        tell(epoch + 1)
    model.eval()


def _batches(count: int, random: np.random.Generator) -> Iterator[torch.Tensor]:
    order = torch.from_numpy(random.permutation(count))
    for start in range(0, max(1, count // BATCH)):
        yield order[start * BATCH : (start + 1) * BATCH]
