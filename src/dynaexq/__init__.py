"""DynaExq: Mixture-of-Experts inference where the precision of each expert is a run-time resource."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaexq.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what is heavy when it is asked for: `--version` needs no torch."""
    if name == "LLM":
        from dynaexq.llm import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module 'dynaexq' has no attribute '{name}'")
