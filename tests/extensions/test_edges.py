"""Features are edges of the package: few files of the core know them. Read from the source; nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from processes import REPOSITORY

PACKAGE = REPOSITORY / "lightning_gnn"
NOT_CORE = ("extensions", "functional", "strategies", "tools", "__main__.py", "__init__.py")
FEATURES: dict[str, tuple[set[str], set[str]]] = {
    "graph_files": (
        {
            "graph_files",
            "array_files",
            "in_edges",
            "streaming",
            "partitioner",
            "Streaming",
            "FolderSource",
            "InEdges",
            "PartEdges",
            "RowBlocks",
            "Blocks",
            "is_folder",
            "read_folder",
            "is_symmetric",
            "cluster_graph",
            "refine_parts",
            "count_clusters",
            "streaming_candidates",
            "write_parts",
            "partition_memory",
            "_build_from_files",
            "_converted",
            "_write_pieces",
            "_streaming",
            "_Watched",
        },
        {"in_files", "blocks", "in_edges"},
    ),
}
"""By feature: its names, old and new, wherever code has them, and names that are its own as arguments only."""


def names_in(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the names that code has, and strings that look like names, and whether each is one of an argument."""
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        found = next((getattr(node, key) for key in ("id", "attr", "name", "module") if hasattr(node, key)), None)
        if isinstance(node, ast.Constant) and id(node) not in docs and re.fullmatch(r"[\w.]+", str(node.value)):
            found = str(node.value)
        yield from ((part, False) for part in str(found or "").split("."))
        if isinstance(node, (ast.arg, ast.keyword)):
            yield str(node.arg), True


def knowing(feature: str) -> dict[str, set[str]]:
    """Returns the files of the core that know a feature, by imports, branches and options, and by which names."""
    names, arguments = FEATURES[feature]
    found: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        if path.parts[0] not in NOT_CORE:
            for name, is_argument in names_in(file.read_text()):
                if name in names or (is_argument and name in arguments):
                    found.setdefault(str(path), set()).add(name)
    return found


@pytest.mark.parametrize("feature", FEATURES)
def test_at_most_two_files_of_the_core_know_a_feature(feature):
    found = knowing(feature)
    assert 0 < len(found) <= 2, found


@pytest.mark.parametrize(
    "line",
    [
        "from lightning_gnn.extensions.graph_files import folders",
        "from lightning_gnn.extensions.graph_files.source import anything",
        "import lightning_gnn.extensions.graph_files",
        'found = method == "streaming"',
        "found = is_folder(source)",
        "found = predictions(edges, in_files=True)",
        "def predict(edges, in_files=False): ...",
        "found = data.partition_memory",
        'module = import_module("lightning_gnn.extensions.graph_files.source")',
    ],
)
def test_a_mention_is_found(line):
    names, arguments = FEATURES["graph_files"]
    assert any(name in names or (is_one and name in arguments) for name, is_one in names_in(line))
