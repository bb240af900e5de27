"""Graphs in files, partitioned and sorted in memory that does not grow with the number of edges."""

from typing import Any


def source_of(data: Any) -> Any:
    """Returns the source of a datamodule's files: a folder, or a URL if the source contains ``://``."""
    if "://" in data.source:
        from lightning_gnn.extensions.graph_files.urls import url_source

        return url_source(data)
    from lightning_gnn.extensions.graph_files.folders import FolderSource

    return FolderSource(data.source, data.partition_memory_limit, data.input_type)
