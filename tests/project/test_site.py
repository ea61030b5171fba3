"""The documentation site: every page is in the navigation, links between files become links between pages."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from tools.site_hooks import page_of, pages_outside, site_markdown

from .sources import ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def nav_pages(entry: object) -> list[str]:
    """Pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in nav_pages(part)]


def test_every_page_is_in_the_navigation_once():
    docs = ROOT / "docs"
    inside = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(nav_pages(CONFIG["nav"])) == sorted([*inside, *pages_outside()])


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[c](docs/concepts.md#a)", "[c](concepts.md#a)"),
        ("README.md", "![p](docs/figures/p.png)", "![p](figures/p.png)"),
        ("README.md", '<img src="docs/figures/p.png">', '<img src="figures/p.png">'),
        ("examples/a/README.md", "![p](../../docs/figures/p.png)", "![p](../../figures/p.png)"),
        ("docs/recall.md", "[d](decisions/0023.md)", "[d](decisions/0023.md)"),
        ("docs/decisions/0001.md", "[r](../../README.md)", "[r](../README.md)"),
        ("docs/megatron.md", "[hooks.py](../a/hooks.py)", "`a/hooks.py`"),
        ("docs/megatron.md", "[the tests](../tests/ring)", "the tests (`tests/ring`)"),
        ("examples/real_model/README.md", "[r](../../docs/recall.md)", "[r](../../recall.md)"),
        ("docs/a.md", "[x](https://example.org/b) [y](#z)", "[x](https://example.org/b) [y](#z)"),
        ("docs/a.md", "```\n[hooks.py](../a/hooks.py)\n```", "```\n[hooks.py](../a/hooks.py)\n```"),
    ],
)
def test_links_of_the_site(source, text, expected):
    assert site_markdown(text, source) == expected


def test_a_source_file_is_no_page():
    assert page_of("setup.py") is None and page_of("docs/recall.md") == "recall.md"


def test_the_front_page_is_short_and_pictures_exist():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 110
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)


def test_the_citation_has_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version


def test_actions_are_pinned_to_commits():
    used = {
        use
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for use in re.findall(r"uses: (\S+)", path.read_text())
    }
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", use) for use in used)
