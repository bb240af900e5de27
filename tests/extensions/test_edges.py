"""The core knows little of what attaches to it: at most so many of its files name a feature of ``lightning_gnn/extensions``."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

import lightning_gnn
from lightning_gnn.registry import feature

ROOT = Path(lightning_gnn.__file__).parent
OUTER = {"extensions", "functional", "strategies", "tools", "__main__.py", "__init__.py"}
"""What is not the core."""

TEXT = {tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.COMMENT)}
"""Tokens that are text; f-strings have some from Python 3.12 on."""

FEATURES = {
    "embeddings": (r"DistributedEmbedding|embeddings_of|EmbeddingRows|\bembeddings\.\w", 2),
    "node types": (
        r"(?<!\")\bTypes\b|is_hetero|HeteroData|(takes|with|about)_types|input_type|NodeType|EdgeType|ONE_TYPE|Typed[A-Z]"
        r"|(?<!\w)typed_|\bnode_types?\b|\bedge_types\b|\bnode_types\.\w",
        10,
    ),
}
"""By feature, what names it, and how many files of the core may."""


def is_name(string: str) -> bool:
    """Returns whether a string may be the name of something in code; else it is text."""
    return re.fullmatch(r"""['"][\w.]*\w['"]""", string) is not None


def code_of(file: Path) -> str:
    """Returns the code of a file without comments and text."""
    lines = file.read_text().splitlines()
    with tokenize.open(file) as opened:
        for token in tokenize.generate_tokens(opened.readline):
            if token.type in TEXT or (token.type == tokenize.STRING and not is_name(token.string)):
                (first, begin), (last, end) = token.start, token.end
                for row in range(first, last + 1):
                    low, high = begin if row == first else 0, end if row == last else len(lines[row - 1])
                    lines[row - 1] = lines[row - 1][:low] + " " * (high - low) + lines[row - 1][high:]
    return "\n".join(lines)


@pytest.mark.parametrize("name", FEATURES)
def test_few_files_of_the_core_know_a_feature(name):
    pattern, limit = FEATURES[name]
    core = [file for file in sorted(ROOT.rglob("*.py")) if file.relative_to(ROOT).parts[0] not in OUTER]
    known = [str(file.relative_to(ROOT)) for file in core if re.search(pattern, code_of(file))]
    assert len(known) <= limit, known


def test_the_core_finds_names_of_extensions():
    assert lightning_gnn.nn.DistributedEmbedding is lightning_gnn.DistributedEmbedding is feature("DistributedEmbedding")
    with pytest.raises(AttributeError, match="has no attribute 'TypedCut'"):
        _ = lightning_gnn.nn.TypedCut
