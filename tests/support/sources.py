"""An expert source without Transformers, so that child processes start fast."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dynaexq.core import ExpertKey, ExpertShape, ModelShape
from dynaexq.formats import ExpertWeights
from dynaexq.store import Checkpoint

SHAPE = ModelShape(layers=3, experts=4, expert=ExpertShape(hidden=64, intermediate=32))


class RandomSource:
    """Reads experts that `create` wrote under plain names."""

    def __init__(self, root: Path, shape: ModelShape = SHAPE) -> None:
        self.checkpoint = Checkpoint.open(root)
        self.shape = shape
        self.layer_names = [f"layers.{layer}" for layer in range(shape.layers)]
        self.dense_names = ["dense.weight"]

    @classmethod
    def create(cls, root: Path, shape: ModelShape = SHAPE, seed: int = 0) -> RandomSource:
        """Write a checkpoint of random bfloat16 weights and open it."""
        root.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(torch.bfloat16)

        tensors = {"dense.weight": random(300, 20)}
        for layer, expert in shape.expert_keys():
            for name in ("gate", "up"):
                tensors[f"{layer}.{expert}.{name}"] = random(shape.expert.intermediate, shape.expert.hidden)
            tensors[f"{layer}.{expert}.down"] = random(shape.expert.hidden, shape.expert.intermediate)
        save_file(tensors, root / "model.safetensors")
        (root / "config.json").write_text(json.dumps({"model_type": "random"}))
        (root / "tokenizer.json").write_text("{}")
        return cls(root, shape)

    def read(self, key: ExpertKey) -> ExpertWeights:
        names = (f"{key.layer}.{key.expert}.{name}" for name in ("gate", "up", "down"))
        return ExpertWeights(*(self.checkpoint.read(name) for name in names))
