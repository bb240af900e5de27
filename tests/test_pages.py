"""Pages as a browser shows them: the report of a comparison, and the site; their pictures are left in ``build/screens``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import Browser
from processes import REPOSITORY

from lightning_gnn.tools.comparing.report import report_html

SITE = REPOSITORY / "build" / "site"
WIDTHS = (1280, 400)
SOME = ("index.html", "numbers.html", "tutorials/four_ranks.html")  # every day; the others are of the campaign


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.mark.parametrize("width", WIDTHS)
def test_a_report(browser, tmp_path, width):
    """Of a comparison that was run once: eight cells, one of which has failed."""
    page = tmp_path / "comparison.html"
    page.write_text(report_html(json.loads((REPOSITORY / "tests" / "comparing" / "compared.json").read_text())))
    seen = browser.look(page.as_uri(), width, f"report-{width}")
    assert seen.title == "Comparison of strategies" and not seen.faults


def test_what_a_browser_finds(browser, tmp_path):
    """Each fault is one."""
    page = tmp_path / "wrong.html"
    head = "<!DOCTYPE html><meta name='viewport' content='width=device-width'>"
    page.write_text(
        f"{head}<title>wrong</title><img src='absent.png'><p style='width:2000px;text-align:right'>far out</p>"
        "<div style='overflow-x:auto'><p style='width:3000px;text-align:right'>scrolled to</p></div>"
        "<script>console.error('said'); absent()</script>"
    )
    faults = browser.look(page.as_uri(), 400).faults
    assert [*faults] == ["errors", "empty pictures", "too wide", "scrolls by"] and faults["too wide"] == ["far out"]
    said = "\n".join(faults["errors"])
    assert "said" in said and "absent is not defined" in said and "ERR_FILE_NOT_FOUND" in said
    page.write_text(f"{head}<title>right</title>")
    assert not browser.look(page.as_uri(), 400).faults
    page.write_text("<!DOCTYPE html><title>as on a desk</title>")
    assert [*browser.look(page.as_uri(), 400).faults] == ["scrolls by"]


def pages() -> list[pytest.param]:  # type: ignore[valid-type]
    if not (SITE / "index.html").exists():
        return [pytest.param(None, id="site", marks=pytest.mark.skip("needs the site: make docs"))]
    names = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    names.remove("404.html")  # of a server: its links begin at the root
    return [pytest.param(name, marks=[] if name in SOME else pytest.mark.campaign) for name in names]


@pytest.mark.parametrize("name", pages())
def test_a_page_of_the_site(browser, name):
    """As `make docs` has left it, opened from disk."""
    for width in WIDTHS:
        seen = browser.look(
            (SITE / name).as_uri(), width, f"site-{name.removesuffix('.html').replace('/', '-')}-{width}"
        )
        assert not seen.faults, width
    absent = []
    for link in {*seen.links}:
        parts = urlsplit(link)
        if parts.scheme == "file" and not Path(unquote(parts.path)).is_file():
            absent.append(link)
        elif parts.scheme == "file" and Path(unquote(parts.path)) == SITE / name and parts.fragment:
            absent += [link] * (unquote(parts.fragment) not in seen.ids)
    assert not absent
