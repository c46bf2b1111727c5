"""Makes a site of the documentation: a hook of MkDocs that adds the pages outside docs/.

The pages are written to be read in the repository, too, so links go by relative paths. A link to a
page of the site stays one; a link to another file of the repository goes to `repo_url`, if
.mkdocs.yml says one, and else becomes the file's name.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
"""Pages at the root of the repository, and where they are in the site."""
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the root of the repository."""
    for source, path in OUTSIDE.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Have links lead to pages of the site, or out of it."""
    folder = _place_of(page.file.src_uri).parent

    def led(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        return _link(text, folder, target, anchor, page, config.repo_url)

    return LINK.sub(led, markdown)


def _link(
    text: str, folder: PurePosixPath, target: str, anchor: str, page: Page, repo_url: str | None
) -> str:
    there = PurePosixPath(_resolved(folder / target))
    path = OUTSIDE.get(str(there))
    if path is None and there.parts[:1] == ("docs",):
        path = str(there.relative_to("docs"))
    if path is None:
        return f"[{text}]({repo_url}/blob/HEAD/{there})" if repo_url else text
    if (ROOT / "docs" / path).is_dir():
        path = f"{path.rstrip('/')}/README.md"
    up = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)
    return f"[{text}]({up}{path}{anchor})"


def _place_of(path: str) -> PurePosixPath:
    """Return where a page of the site lies in the repository."""
    sources = {to: source for source, to in OUTSIDE.items()}
    return PurePosixPath(sources.get(path, f"docs/{path}"))


def _resolved(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
