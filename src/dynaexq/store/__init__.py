"""Prepared stores on disk: checkpoints in, verified expert versions out."""

from dynaexq.store.checkpoint import Checkpoint
from dynaexq.store.manifest import MANIFEST_NAME, Manifest
from dynaexq.store.reader import ExpertStore
from dynaexq.store.sources import ExpertSource
from dynaexq.store.writer import PrepareOptions, prepare_store

__all__ = [
    "MANIFEST_NAME",
    "Checkpoint",
    "ExpertSource",
    "ExpertStore",
    "Manifest",
    "PrepareOptions",
    "prepare_store",
]
