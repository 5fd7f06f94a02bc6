"""`dynaexq inspect`: what is in a store, and whether every byte is as written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from dynaexq.cli.options import JsonOption
from dynaexq.cli.output import check_json_target, progress_bar, reports_errors, stderr, write_json
from dynaexq.core import StoreError
from dynaexq.formats import TIERS
from dynaexq.plan.memory import format_bytes
from dynaexq.store import ExpertStore


@reports_errors
def inspect(
    store: Annotated[Path, typer.Argument(help="A directory made by `dynaexq prepare`.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check it.")] = False,
    json_target: JsonOption = None,
) -> None:
    """Show a store's tiers, sizes and errors; --verify reads everything against its checksums.

    Of a calibrated store, also what each tier is predicted to lose in nats of KL per token with all experts at it, how
    sensitive layers are, and the experts whose outputs are massive.

    Examples:

      dynaexq inspect ./store

      dynaexq inspect ./store --verify --json -
    """
    check_json_target(json_target)
    opened = ExpertStore.open(store)
    result = _describe(opened)
    if verify:
        result["damaged"] = _verify(opened)
    _print_table(opened, result)
    if json_target:
        write_json(json_target, result)
    if result.get("damaged"):
        first = result["damaged"][0]
        raise StoreError(
            f"{len(result['damaged'])} parts of {store} are damaged, the first is {first}; "
            "run `dynaexq prepare` (or `synth`) again with the same options to restore them"
        )
    if verify:
        stderr.print("every byte is as written")


def _describe(store: ExpertStore) -> dict[str, Any]:
    manifest = store.manifest
    tiers = {}
    for name in sorted(manifest.tiers, key=list(TIERS).index):
        info = manifest.tiers[name]
        count = manifest.shape.layers * manifest.experts
        tiers[name] = {
            "bytes": info.extent_bytes * count,
            "bytes_per_expert": info.extent_bytes,
            "payload_bytes_per_expert": info.payload_bytes,
            "bits_per_weight": info.payload_bytes * 8 / manifest.shape.expert.weights,
            "error_mean": info.error_mean,
            "error_max": info.error_max,
            "errors": store.errors(name),
        }
    described = manifest.model_dump(exclude={"tiers", "dense"})
    sensitivity = store.sensitivity
    if sensitivity is not None:
        for name, predicted in sensitivity.predict().items():
            tiers[name]["predicted_kl"] = predicted
        described["super_experts"] = [key._asdict() for key in sensitivity.super_experts]
    return {**described, "dense_bytes": manifest.dense.nbytes if manifest.dense else 0, "tiers": tiers}


def _verify(store: ExpertStore) -> list[str]:
    """Names of damaged parts; one bad file does not hide the others."""
    damaged = []
    with progress_bar() as progress:
        try:
            store.verify_dense()
        except StoreError as error:
            damaged.append(str(error))
        damaged += [f"{store.root / name} (missing or changed)" for name in store.damaged_files()]
        steps = [(layer, tier) for tier in store.manifest.tiers for layer in range(store.shape.layers)]
        for done, (layer, tier) in enumerate(steps, 1):
            try:
                damaged += [f"layer {layer} expert {expert} at {tier}" for expert in store.damaged(layer, tier)]
            except StoreError as error:
                damaged.append(str(error))
            progress("verifying layers", done, len(steps))
    return damaged


def _print_table(store: ExpertStore, result: dict[str, Any]) -> None:
    manifest = store.manifest
    table = Table(title=f"{store.root} ({manifest.model_type} from {manifest.source})", title_justify="left")
    columns = ("tier", "size", "bits/weight", "error mean", "error max")
    predicted = ("predicted KL",) if store.sensitivity else ()
    for column in (*columns, *predicted):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, tier in result["tiers"].items():
        numbers = [f"{tier['bits_per_weight']:.2f}", f"{tier['error_mean']:.4f}", f"{tier['error_max']:.4f}"]
        numbers += [f"{tier['predicted_kl']:.2g}"] if predicted else []
        table.add_row(name, format_bytes(tier["bytes"]), *numbers)
    stderr.print(table)
    stderr.print(
        f"{manifest.shape.layers} MoE layers of {manifest.experts} experts, groups of {manifest.group_size}, quantizer "
        f"{manifest.quantizer}; dense weights {format_bytes(result['dense_bytes'])}"
    )
    if store.sensitivity and manifest.calibration:
        layers = np.array(manifest.calibration.sensitivity)
        shares = " ".join(f"{each:.2f}" for each in layers / (layers.mean() or 1))
        massive = ", ".join(f"{key.expert} of layer {key.layer}" for key in store.sensitivity.super_experts)
        stderr.print(f"sensitivity of layers, relative to their mean: {shares}\nsuper experts: {massive or 'none'}")
