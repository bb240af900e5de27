"""LightningModules; the link predictor is imported on first use."""

from typing import TYPE_CHECKING, Any

from lightning_gnn.modules.node_classifier import NodeClassifier

if TYPE_CHECKING:
    from lightning_gnn.modules.link_predictor import LinkPredictor

__all__ = ["LinkPredictor", "NodeClassifier"]


def __getattr__(name: str) -> Any:
    if name != "LinkPredictor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_gnn.modules.link_predictor import LinkPredictor

    return LinkPredictor
