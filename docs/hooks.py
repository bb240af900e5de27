"""Hooks of MkDocs: the site shows the files that a code host shows, with the same links.

The README is its first page; files that pages link to outside of this folder are copied. So MkDocs checks every link. Tutorials
are shown as `make docs` has run them. reference.py generates tables, and a page for each public name.
"""

import re
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import reference  # noqa: E402

LINKED = ("LICENSE", "Dockerfile", "CONTRIBUTING.md", "CHANGELOG.md", "configs/**/*.yaml", "examples/*.py")
RUN = ROOT / "build" / "tutorials"


def on_files(files, config):
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    for name, content in reference.public_pages().items():
        files.append(File.generated(config, name, content=content))
    for pattern in LINKED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for source in sorted(ROOT.glob("docs/tutorials/*.py")):
        if not (RUN / f"{source.stem}.md").exists():
            raise PluginError(f"{source.name} has not been run. `make docs` runs it.")
        for path in sorted([RUN / f"{source.stem}.md", *RUN.glob(f"{source.stem}_*.png")]):
            files.append(File.generated(config, f"tutorials/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """The README's folder and this one are one folder on the site, and a tutorial is a page."""
    if page.file.src_uri.startswith("tutorials/"):
        return re.sub(r"(?<=\]\()(\w+)\.py(?=\))", r"\1.md", markdown.replace("](../../", "](../"))
    if page.file.src_uri in reference.PAGES:
        markdown = reference.with_links_to_pages(reference.updated(markdown))
    of_the_root = page.is_homepage or page.file.src_uri in LINKED
    markdown = re.sub(r"(?<=\]\()docs/" if of_the_root else r"(?<=\]\()\.\./", "", markdown)
    return re.sub(r"(?<=\]\()tutorials/(\w+)\.py", r"tutorials/\1.md", markdown)


def on_page_content(html, **_):
    """Docstrings name objects as Sphinx does."""
    return re.sub(r":\w+:<code>~?(?:[\w.]*\.)?(\w+)</code>", r"<code>\1</code>", html)
