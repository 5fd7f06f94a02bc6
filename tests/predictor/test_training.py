"""Predictors learn from recorded hidden states, and are judged by requests that they have not seen."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dynaexq.core import OptionError, SideFileError
from dynaexq.launch import EMBEDDED_MODEL, Opened
from dynaexq.llm import LLM
from dynaexq.policy.prediction import Routers
from dynaexq.predictor.choice import pick_predictor
from dynaexq.predictor.examples import Examples, gather_examples
from dynaexq.predictor.files import PredictorFile, load_predictor, read_predictor
from dynaexq.predictor.judging import judge_predictor
from dynaexq.predictor.learned import LearnedPredictor, log_odds
from dynaexq.predictor.training import TrainingOptions, train_predictor
from dynaexq.predictor.windows import WindowNetwork, gather_windows
from dynaexq.predictor.yardsticks import judge, measure_recall
from dynaexq.traffic.trace import TraceReader
from support.files import silent

OPTIONS = TrainingOptions(width=16, reach=3, window=16, ahead=4, epochs=12)


@pytest.fixture(scope="session")
def examples(hidden_trace: Path) -> Examples:
    return gather_examples([TraceReader.open(hidden_trace)], 10_000)


@pytest.fixture(scope="session")
def routers() -> Routers:
    found = Opened(str(EMBEDDED_MODEL)).routers()
    assert found is not None
    return found


@pytest.fixture(scope="session")
def trained(examples: Examples, routers: Routers) -> PredictorFile:
    return train_predictor(examples, routers, OPTIONS, None, silent)


def test_routers_are_read_from_disk_as_the_loaded_model_has_them(embedded_store: Path, routers: Routers) -> None:
    stored = Opened(str(embedded_store)).routers()
    assert stored is not None and np.array_equal(stored.weights, routers.weights) and stored.top_k == 4
    with LLM(str(embedded_store), slots=1, context=64, mode="full") as llm:
        for layer, block in enumerate(llm.launch.model.model.layers):
            assert np.array_equal(block.mlp.gate.weight.detach().float().numpy(), routers.weights[layer])


def test_what_was_recorded_is_what_routers_chose_by(examples: Examples, routers: Routers) -> None:
    assert examples.hidden is not None
    for layer in range(examples.head.layers):
        scores = examples.hidden[:, layer].astype(np.float32) @ routers.weights[layer].T
        named = np.argsort(-scores, 1)[:, :4]
        same = (named[:, :, None] == examples.ids[:, layer][:, None, :]).any(-1).mean()
        assert same > 0.995  # but for ties in half precision


def test_requests_are_held_out_whole_and_followed_in_order(examples: Examples) -> None:
    ends = np.flatnonzero(examples.following < 0)
    assert len(ends) == 10 and (examples.following[examples.following >= 0] > 0).all()
    starts = np.append(0, ends[:-1] + 1)
    held = [examples.held[start : end + 1] for start, end in zip(starts, ends, strict=True)]
    assert sum(each.all() for each in held) == 2 and sum(each.any() for each in held) == 2
    have, chosen = examples.targets(4, 3)  # the next pass's second layer
    assert np.array_equal(chosen, examples.ids[examples.following[have], 1])


def test_training_beats_what_routers_say_ahead(examples: Examples, routers: Routers, trained: PredictorFile) -> None:
    found = measure_recall(examples, routers, 3, lambda: None)
    judged = judge_predictor(trained, examples, routers)
    for distance in range(3):
        best = max(found[name][distance] or 0.0 for name in ("static", "average"))
        assert judged.recall[distance] > best + 0.05
        assert judged.recall_double[distance] > judged.recall[distance]
    assert judged.calibration < 0.1 and min(judged.precision) > 0.6
    assert judge(found)[1] and not judge({"static": [0.5], "average": [0.52]})[1]


def test_without_routers_it_learns_from_hidden_states_alone(examples: Examples) -> None:
    alone = train_predictor(examples, None, replace(OPTIONS, epochs=40), None, silent)
    assert not alone.head.routers
    found = measure_recall(examples, None, 3, lambda: None)
    assert "pregate" not in found
    assert judge_predictor(alone, examples, None).recall[0] > (found["static"][0] or 0.0) + 0.1


def test_at_work_it_says_what_it_learned(examples: Examples, routers: Routers, trained: PredictorFile) -> None:
    """The numpy of serving against the torch of training."""

    from dynaexq.predictor.corrector import CorrectorLayer
    from dynaexq.predictor.training import routers_say

    assert examples.hidden is not None
    hidden = examples.hidden[:50, 1].astype(np.float32)
    layer = CorrectorLayer(trained.head, 1.0)
    layer.load(trained, 1)
    with torch.no_grad():
        said = torch.from_numpy(routers_say(hidden, routers, trained.head, 1))
        expected = torch.sigmoid(layer(torch.from_numpy(hidden), said)).numpy()
    found = LearnedPredictor(trained, routers).look_ahead(1, hidden)
    assert np.allclose(found.transpose(1, 0, 2), expected, atol=1e-5)
    windows = gather_windows(examples, OPTIONS.window, OPTIONS.ahead)
    network = WindowNetwork(trained.head, torch.from_numpy(windows.given)).eval()
    network.load(trained)
    predictor = LearnedPredictor(trained, routers)
    end = int(windows.ends[0])
    for token in range(end + 1):
        for place in range(trained.head.layers):
            counts = np.bincount(examples.ids[token, place], minlength=trained.head.experts)
            predictor._window.note(place, counts, examples.hidden[token : token + 1, place].astype(np.float32))
    with torch.no_grad():
        expected = torch.sigmoid(network(torch.from_numpy(windows.given[:1]))).numpy()[0]
    assert np.allclose(predictor._window.ask(), expected, atol=1e-4)
    assert np.isclose(log_odds(np.array([0.5]))[0], 0)


def test_fine_tuning_goes_on_from_where_it_was(
    examples: Examples, routers: Routers, trained: PredictorFile, tmp_path: Path
) -> None:
    short = TrainingOptions(width=16, reach=3, window=16, ahead=4, epochs=1)
    first = judge_predictor(train_predictor(examples, routers, short, None, silent), examples, routers)
    tuned = judge_predictor(train_predictor(examples, routers, short, trained, silent), examples, routers)
    assert tuned.recall[2] > first.recall[2]
    with pytest.raises(OptionError, match="--width"):
        train_predictor(examples, routers, TrainingOptions(width=8, reach=3, window=16), trained, silent)


def test_damaged_files_are_refused(trained: PredictorFile, tmp_path: Path, embedded_store: Path) -> None:
    path = tmp_path / "p.safetensors"
    trained.save(path)
    same = read_predictor(path)
    assert all(np.array_equal(same.tensors[name], each) for name, each in trained.tensors.items())
    whole = path.read_bytes()
    damaged = (whole[:-9], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], b"", b"\x80\x04pickle", whole[:200])
    for each in damaged:
        path.write_bytes(each)
        with pytest.raises(SideFileError, match=r"p\.safetensors"):
            read_predictor(path)
    path.write_bytes(whole)
    shape = Opened(str(embedded_store)).skeleton.profile.shape
    with pytest.raises(SideFileError, match="another model"):
        load_predictor(path, "somebody else's", shape)
    with pytest.raises(OptionError, match="routers"):
        pick_predictor(str(path), None, shape, trained.head.fingerprint)


def test_too_little_is_refused(hidden_trace: Path, examples: Examples) -> None:
    with pytest.raises(OptionError, match="too few"):
        gather_examples([TraceReader.open(hidden_trace)], 100)
    with pytest.raises(OptionError, match="no request"):
        gather_windows(examples, 400, 8)
    with pytest.raises(OptionError, match="--reach 7"):
        TrainingOptions(reach=7).check(6)


def test_served_by_a_trained_predictor_the_tokens_are_the_same(
    embedded_store: Path, trained: PredictorFile, tmp_path: Path
) -> None:
    path = tmp_path / "p.safetensors"
    trained.save(path)
    answers = []
    for options in (
        {"mode": "static"},
        {"mode": "expertflow", "expert_memory": 1_400_000, "predictor": str(path)},
        {"mode": "expertflow", "expert_memory": 1_400_000, "predictor": "pregate"},
    ):
        with LLM(str(embedded_store), slots=2, context=160, tier="int4", **options) as llm:  # type: ignore[arg-type]
            streams = [llm.submit(llm.encoder.encode(text), 40) for text in ("A box of", "def f(x):", "1 + 2 =")]
            answers.append([stream.wait().tokens for stream in streams])
            found = llm.launch.runtime.describe_cache()
    assert answers[0] == answers[1] == answers[2]
    assert found is not None and found["loads_ahead"] > 0 and found["recall"] > 0.4


def test_a_router_temperature_changes_weights_and_says_so(embedded_store: Path) -> None:
    ids = (5, 6, 7, 8, 9, 10)
    found = []
    for temperature in (1.0, 0.5):
        with pytest.warns(UserWarning, match="router temperature 0.5") if temperature != 1 else nullcontext():
            llm = LLM(
                str(embedded_store), slots=1, context=64, mode="static", tier="int8", router_temperature=temperature
            )
        with llm:
            seen = []
            llm.launch.runtime.tap = lambda layer, call, seen=seen: seen.append((layer, call.ids, call.weights))
            with torch.inference_mode():
                llm.launch.model(torch.tensor([ids]), use_cache=False)
            found.append(seen[0])
    assert torch.equal(found[0][1], found[1][1]) and (found[1][2][:, 0] > found[0][2][:, 0] + 0.01).all()
    with pytest.raises(OptionError, match="router temperature 0 "):
        LLM(str(embedded_store), mode="full", router_temperature=0.0)
