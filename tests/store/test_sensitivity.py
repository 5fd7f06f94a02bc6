"""What versions lose in outputs: measured as they are written, read back, and put together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from dynaexq.core import ExpertKey, StoreError
from dynaexq.formats import ExpertWeights, decode
from dynaexq.formats.codec import Base
from dynaexq.integrations.transformers.calibration import InputCalibration
from dynaexq.kernels import LayerFunctions
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store
from dynaexq.store.layer_file import layer_path, read_extent_of
from dynaexq.store.manifest import MANIFEST_NAME
from dynaexq.store.reader import open_tier
from dynaexq.store.sensitivity import find_super_experts
from dynaexq.traffic.inputs import ExpertInputs, InputsWriter, LayerInputs
from support.files import contents, flip_byte, silent
from support.sources import SHAPE, RandomSource

TIERS = ("int2", "int2d4", "int3", "int4", "int4+4", "int8", "bf16")
SENSITIVITY = [3e-5, 2e-5, 1e-5]
TOKENS = 50
UNUSED = ExpertKey(2, 3)


class Source(RandomSource):
    """Random experts with a plain gate."""

    def read_functions(self, layer: int) -> LayerFunctions:
        return LayerFunctions(lambda both: F.silu(both[:, :32]) * both[:, 32:], False, None, None)


def write_inputs(root: Path, source: Source, tokens: int = TOKENS) -> ExpertInputs:
    """Random tokens; the last expert of the last layer is chosen by none."""
    writer = InputsWriter(root, source.checkpoint.fingerprint(), SHAPE, tokens)
    generator = torch.Generator().manual_seed(1)
    for layer in range(SHAPE.layers):
        count = SHAPE.experts - (layer == UNUSED.layer)
        ids = torch.rand(tokens, count, generator=generator).argsort(1)[:, :2]
        hidden, weights = torch.randn(tokens, 64, generator=generator), torch.rand(tokens, 2, generator=generator)
        writer.add(layer, hidden, ids, weights)
    writer.finish("bf16", ["text"], SENSITIVITY)
    return ExpertInputs.open(root, source.checkpoint.fingerprint(), SHAPE)


class Made:
    """A source, the inputs of its experts, and what is made of them below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.source = root, Source(RandomSource.create(root / "source").checkpoint.root)
        self.inputs = write_inputs(root / "inputs", self.source)

    def prepare(self, name: str, tiers: tuple[str, ...] = TIERS) -> Path:
        calibration = InputCalibration(self.inputs, self.source)  # type: ignore[arg-type]
        prepare_store(self.source, self.root / name, PrepareOptions(tiers, 32), silent, calibration=calibration)
        return self.root / name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """With a finished `store`. Prepare another one before changing it."""
    made = Made(tmp_path_factory.mktemp("sensitivity"))
    made.prepare("store")
    return made


def apply(weights: ExpertWeights, hidden: torch.Tensor) -> torch.Tensor:
    gate, up, down = (each.double() for each in weights)
    return (F.silu(hidden @ gate.t()) * (hidden @ up.t())) @ down.t()


def expect_error(inputs: LayerInputs, expert: int, exact: ExpertWeights, restored: ExpertWeights) -> float:
    """By the definition, in float64: 50 tokens are below all limits."""
    hidden, weights = inputs.hidden.double(), inputs.weights.double()
    lost = (apply(restored, hidden) - apply(exact, hidden)).square().sum(1)
    mine = (inputs.ids == expert).any(1)
    gains = torch.where(inputs.ids == expert, weights, 0).square().sum(1)
    own = float((gains * lost)[mine].sum())
    return (own + 8 * float(weights.square().mean() * lost.mean())) / (int(mine.sum()) + 8)


def restore(root: Path, store: ExpertStore, key: ExpertKey, tier: str) -> ExpertWeights:
    def block(name: str) -> torch.Tensor:
        return read_extent_of(open_tier(root, store.manifest, key.layer, name), key.expert)

    base = Base(block("int4"), store.format("int4")) if tier == "int4+4" else None
    return decode(block(tier), store.format(tier), SHAPE.expert, base)


def test_losses_are_what_the_versions_on_disk_do_to_outputs(made: Made) -> None:
    store = ExpertStore.open(made.root / "store")
    found = store.sensitivity
    assert found is not None
    assert found.tiers == ("int2", "int2d4", "int3", "int4", "int8", "int4+4", "bf16")
    assert found.losses.shape == (3, 4, 7)
    for key in SHAPE.expert_keys():
        inputs, exact = made.inputs.layer(key.layer), made.source.read(key)
        share = int((inputs.ids == key.expert).sum()) / TOKENS
        assert found.traffic[key] == pytest.approx(share, rel=1e-5)
        for tier, loss in zip(found.tiers, found.losses[key], strict=True):
            error = expect_error(inputs, key.expert, exact, restore(made.root / "store", store, key, tier))
            assert loss == pytest.approx(SENSITIVITY[key.layer] * error, rel=1e-3, abs=1e-12)
    assert found.traffic[UNUSED] == 0 and found.losses[UNUSED][0] > 0  # as the layer's tokens would see it
    assert found is store.sensitivity


def test_predictions_are_in_the_order_of_tiers(made: Made) -> None:
    found = ExpertStore.open(made.root / "store").sensitivity
    assert found is not None
    predicted = found.predict()
    assert predicted["int2"] > 2 * predicted["int3"] > 4 * predicted["int4"] > 8 * predicted["int8"] > 0
    assert predicted["int4"] > 8 * predicted["int4+4"] > 0
    assert predicted["bf16"] == 0  # the checkpoint is bfloat16
    total = sum(found.traffic[key] * found.losses[key][0] for key in SHAPE.expert_keys())
    assert predicted["int2"] == pytest.approx(total)


def test_tiers_added_later_and_damage_restored_are_those_of_one_go(made: Made) -> None:
    once = contents(made.root / "store")
    assert contents(made.prepare("again")) == once
    for tiers in (("int8",), ("int2", "int4"), TIERS):
        root = made.prepare("steps", tiers)
    flip_byte(layer_path(root, 1, "int4"), -1)
    made.prepare("steps")
    steps = contents(root)
    assert {k: v for k, v in steps.items() if k != MANIFEST_NAME} == {
        k: v for k, v in once.items() if k != MANIFEST_NAME
    }
    one, other = (ExpertStore.open(made.root / name) for name in ("store", "steps"))
    assert one.manifest == other.manifest
    assert one.sensitivity and other.sensitivity and np.array_equal(one.sensitivity.losses, other.sensitivity.losses)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [(rb"\d\.", b"-9"), (rb"\d\.\d{6}e[+-]\d+", b"         nan"), (rb"\d\.\d{6}e[+-]\d+ ", b" " * 13)],
)
def test_damaged_errors_are_refused_and_made_again(made: Made, pattern: bytes, replacement: bytes) -> None:
    root = made.prepare("damaged", ("int2",))
    path = layer_path(root, 0, "int2")
    whole = path.read_bytes()
    path.write_bytes(re.sub(rb'("output_error":")' + pattern, rb"\g<1>" + replacement, whole, count=1))
    assert len(path.read_bytes()) == len(whole) and path.read_bytes() != whole
    with pytest.raises(StoreError, match="its errors in outputs are unreadable"):
        ExpertStore.open(root).require_tier("int2")
    made.prepare("damaged", ("int2",))
    assert path.read_bytes() == whole


def test_without_errors_in_outputs_nothing_is_known_until_they_are_made(made: Made) -> None:
    root = made.prepare("bare", ("int2", "int4"))
    path = layer_path(root, 0, "int4")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"output_error"', b'"unknown_name"'))
    assert ExpertStore.open(root).sensitivity is None
    made.prepare("bare", ("int2", "int4"))
    assert path.read_bytes() == whole
    assert ExpertStore.open(root).sensitivity is not None


def test_stores_that_are_not_calibrated_have_none(random_source: RandomSource, tmp_path: Path) -> None:
    prepare_store(random_source, tmp_path / "store", PrepareOptions(("int2",), 32), silent)
    store = ExpertStore.open(tmp_path / "store")
    assert store.sensitivity is None
    assert b"output_error" not in layer_path(tmp_path / "store", 0, "int2").read_bytes()


@pytest.mark.parametrize("change", [{"sensitivity": [1.0]}, {"peaks": [[1.0]] * 3}, {"selections": [[-1.0] * 4] * 3}])
def test_a_manifest_with_another_models_calibration_is_refused(made: Made, change: dict[str, Any]) -> None:
    manifest = ExpertStore.open(made.root / "store").manifest
    assert manifest.calibration is not None
    wrong = manifest.calibration.model_copy(update=change)
    root = made.root / "wrong"
    root.mkdir(exist_ok=True)
    manifest.model_copy(update={"calibration": wrong}).save(root)
    with pytest.raises(StoreError, match="is damaged"):
        ExpertStore.open(root)


def test_many_tokens_are_sampled_for_errors_but_all_seen_for_peaks(tmp_path: Path) -> None:
    source = Source(RandomSource.create(tmp_path / "source").checkpoint.root)
    inputs = write_inputs(tmp_path / "inputs", source, 5000)
    key = ExpertKey(0, 1)
    exact, layer = source.read(key), inputs.layer(0)
    rough = ExpertWeights(*(torch.round(each.float() * 2) / 2 for each in exact))
    calibration = InputCalibration(inputs, source)  # type: ignore[arg-type]
    assert int((layer.ids == key.expert).sum()) > 2000
    found = calibration.output_error(key, exact, rough)
    assert found == pytest.approx(expect_error(layer, key.expert, exact, rough), rel=0.1)
    mine = layer.hidden.double()[(layer.ids == key.expert).any(1)]
    assert calibration.peak(key, exact) == pytest.approx(float(apply(exact, mine).abs().max()), rel=1e-4)
    assert calibration.peak(UNUSED, source.read(UNUSED)) == 0


def test_super_experts_are_found_where_there_are_some() -> None:
    peaks = np.random.default_rng(0).lognormal(0, 0.4, (48, 128))
    assert find_super_experts(peaks) == []
    peaks[2, 92] = peaks[1, 68] = 700
    peaks[3, 5] = 65  # below a tenth of the largest
    assert find_super_experts(peaks) == [ExpertKey(1, 68), ExpertKey(2, 92)]
    assert find_super_experts(np.ones((6, 16))) == []
    assert find_super_experts(np.zeros((6, 16))) == []
    few = np.zeros((6, 16))
    few[0, :3] = 1, 2, 9
    assert find_super_experts(few) == []  # the largest of those that were used, and no more
