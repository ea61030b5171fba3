"""Hooks of the documentation site (mkdocs.yml): pages and links outside docs/.

README.md is the home page. Other Markdown files of the repository that pages link to, those of examples/ for example,
become pages at their own path. A link to a source file becomes the file's path in the text, since the site has no copy
of the sources.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("csrc", "docker", "examples", "patches")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
SOURCE_OF_PICTURE = re.compile(r"((?:src|srcset)=\")docs/")
ROLE = re.compile(r":(?:attr|class|func|meth|mod):<code>~?([^<]*)</code>")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages_outside() -> list[str]:
    """Return the Markdown files outside docs/ that are pages, relative to the repository."""
    top = [path.name for path in ROOT.glob("*.md")]
    below = (path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))
    return sorted([*top, *below])


def page_of(path: str) -> str | None:
    """Return the file of the site that holds a file of the repository, or None where the site has none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in pages_outside() else None


def site_markdown(text: str, source: str) -> str:
    """Return Markdown with links between files of the repository as links between pages of the site.

    Args:
        text: a page.
        source: its file, relative to the repository.
    """

    def replaced(match: re.Match) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        page = page_of(path)
        if page is None:
            name = label.strip("`")
            return f"`{path}`" if os.path.basename(path) == os.path.basename(name) else f"{label} (`{path}`)"
        here = os.path.dirname(page_of(source) or source)
        return f"[{label}]({os.path.relpath(page, here or '.')}{anchor})"

    if not source.startswith("docs/"):
        text = SOURCE_OF_PICTURE.sub(r"\1", text)
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(replaced, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join(parts) + LINK.sub(replaced, text[end:])


def on_files(files, config):
    """Add the pages outside docs/."""
    from mkdocs.structure.files import File

    for path in pages_outside():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite the links of a page."""
    is_outside = page.file.src_uri in pages_outside()
    return site_markdown(markdown, page.file.src_uri if is_outside else f"docs/{page.file.src_uri}")


def on_page_content(html, page, config, files):
    """Remove Sphinx's roles from docstrings."""
    return ROLE.sub(r"<code>\1</code>", html)
