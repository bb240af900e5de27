"""Features are attached at the edge: few files of the core know each, by import, branch or option."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_gnn
from lightning_gnn.registry import feature

PACKAGE = Path(lightning_gnn.__file__).parent
EDGE = ("extensions", "functional", "strategies", "tools", "__main__.py", "__init__.py", "testing.py")

FEATURES: dict[str, tuple[str, int]] = {
    "codecs": (r"codecs?|\w*encod(ing|es|er)\w*|\w*codec_\w*|codec\w+|stochastic_rounding|take_squares", 2),
    "zero_rows": (r"\w*zero_?rows\w*|(count_|pack_|unpack_)?nonzero_rows|pack_rows|unpack_rows|bits_bytes", 2),
    "out_of_core": (
        r"\w*out_of_core\w*|memory_limit\w*|\w*_host_memory|my_turns?|\w*_turns?|turns|\w*pag(er|ing)|keeps_buffers|in_file"
        r"|messages_folder|full_disk|unnamed_file",
        2,
    ),
    "graph_files": (
        r"graph_files|array_files|in_?edges|streaming(_candidates)?|FolderSource|PartEdges|(?-i:(Row)?Blocks)|is_folder|read_folder"
        r"|is_symmetric|cluster_graph|refine_parts|count_clusters|write_parts|partition_memory_limit|build_from_files"
        r"|write_pieces",
        2,
    ),
    "survivors": (
        r"surviv\w*|\w*lost_(ranks|agents)|(?-i:Losses)|\w*starts?_again|\w*restarts|(ranks_are_)?independent"
        r"|\w*rejoins?(_\w+)?|goes_on|others_go_on|needs_parent|select_failures",
        2,
    ),
    "samples": (r"Sample(Data|Loader|Info|Batch|Format)|sample_(data|info)|(has|val|test|predict)_samples|node_dims", 2),
    "mesh": (r"Mesh(Rows|Streams)|check_mesh|check_graph_ranks", 2),
    "embeddings": (r"DistributedEmbedding|EmbeddingRows|embeddings(_of)?", 2),
    "node_types": (
        r"(?-i:Types|Typed[A-Z]\w*)|is_hetero|HeteroData|(takes|with|about)_types|input_type|NodeType|EdgeType|ONE_TYPE"
        r"|typed_\w+|node_types?|edge_types",
        10,
    ),
}
"""By feature, what names it, and how many files of the core may."""


def core_files() -> Iterator[Path]:
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.relative_to(PACKAGE).parts[0] not in EDGE:
            yield file


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yields what code names: imports, variables, attributes, arguments, definitions, and strings that are keys or modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                yield from f"{getattr(node, 'module', '')}.{alias.name}".split(".")
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[a-z_][\w./]*", node.value):
            yield from re.split(r"[./]", node.value)


def files_that_know(pattern: str) -> dict[str, set[str]]:
    """Returns by file of the core what it names of a feature."""
    named = {str(file.relative_to(PACKAGE)): set(names_in(ast.parse(file.read_text()))) for file in core_files()}
    return {
        file: found
        for file, names in named.items()
        if (found := {name for name in names if re.fullmatch(pattern, name.strip("_"), re.IGNORECASE)})
    }


@pytest.mark.parametrize("name", FEATURES)
def test_few_files_of_the_core_know_it(name):
    pattern, limit = FEATURES[name]
    found = files_that_know(pattern)
    assert len(found) <= limit, found


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_looked_for_is_in_the_feature(name):
    """Else the pattern would find nothing anywhere."""
    names = set[str]()
    folder = PACKAGE / ("strategies/gossip" if name == "survivors" else f"extensions/{name}")
    for file in folder.rglob("*.py"):
        names |= set(names_in(ast.parse(file.read_text())))
    assert any(re.fullmatch(FEATURES[name][0], each.strip("_"), re.IGNORECASE) for each in names)


def test_the_core_finds_names_of_extensions():
    assert lightning_gnn.nn.DistributedEmbedding is lightning_gnn.DistributedEmbedding is feature("DistributedEmbedding")
    with pytest.raises(AttributeError, match="has no attribute 'TypedCut'"):
        _ = lightning_gnn.nn.TypedCut
