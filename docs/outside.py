"""A hook of mkdocs: what pages link to outside of docs/ becomes part of the site.

The pages are also read in a checkout, where `../studies/jets.toml` is a file. The site has no
checkout beside it, so each such file is a page that shows its text; a folder, or a file that is
no text for people, is named instead.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDER = "checkout"  # of the site
FENCES = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".yml": "yaml", ".cff": "yaml"}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file of the checkout that some page links to."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    known: set[Path] = set()
    while waiting:
        for path in _linked(waiting.pop()):
            if path not in known and _has_page(path):
                known.add(path)
                waiting += [path] if path.suffix == ".md" else []
                files.append(_as_page(path, config))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links out of docs/ to the pages of those files."""
    if page.file.generated_by:
        return markdown
    return rewrite(markdown, DOCS / page.file.src_uri)


def rewrite(markdown: str, page: Path) -> str:
    """The text of a page of the checkout, with links as they are in the site."""

    def to_site(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups(default="")
        path = (page.parent / target).resolve()
        if "://" in target or target.startswith("mailto:") or not path.exists():
            return match[0]
        if not _has_page(path) and not path.is_relative_to(DOCS):
            name = f"`{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}`"
            return name if text.strip("`/") == name.strip("`/") else f"{text} ({name})"
        link = posixpath.relpath(_uri(path), posixpath.dirname(_uri(page)) or ".")
        return f"{image}[{text}]({link}{anchor})"

    parts = FENCES.split(markdown)
    parts[::2] = [LINK.sub(to_site, part) for part in parts[::2]]
    return "".join(parts)


def _linked(page: Path) -> Iterator[Path]:
    """What a page links to that is not in docs/."""
    for part in FENCES.split(page.read_text())[::2]:
        for match in LINK.finditer(part):
            path = (page.parent / match[3]).resolve()
            if path.is_relative_to(ROOT) and not path.is_relative_to(DOCS):
                yield path


def _has_page(path: Path) -> bool:
    return path.is_file() and (path.suffix in {".md", *LANGUAGES} or not path.suffix)


def _uri(path: Path) -> str:
    """Where a file of the checkout is in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{FOLDER}/{name}" if path.suffix == ".md" else f"{FOLDER}/{name}.md"


def _as_page(path: Path, config: Any) -> File:
    text = path.read_text()
    if path.suffix == ".md":
        content = rewrite(text, path)
    else:
        fence = f"````{LANGUAGES.get(path.suffix, '')}\n{text.rstrip()}\n````"
        content = f"# {path.relative_to(ROOT)}\n\n{fence}\n"
    return File.generated(config, _uri(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV)
