"""Row semantics: inside a step, every tensor stands for the tensor of the whole graph."""

from lightning_gnn.rows import elementwise, reductions, shapes  # noqa: F401  their rules register themselves
from lightning_gnn.rows.mode import NotExactError, RowsMode, active_mode, local_rows, placement_of, register_row_rule
from lightning_gnn.rows.shapes import gather_global

__all__ = ["NotExactError", "RowsMode", "active_mode", "gather_global", "local_rows", "placement_of", "register_row_rule"]
