"""A Python that has what `pip install isthmus` installs, and nothing else: no torch, say."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def make_slim_python(folder: Path) -> Path:
    """Make a virtual environment of links to what is installed here; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in needed("isthmus"):
        distribution = metadata.distribution(name)
        tops = {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}
        for top in sorted(tops):
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


def needed(distribution: str) -> set[str]:
    """Return the distributions that one needs here without its extras, itself among them."""
    names: set[str] = set()
    waiting = [distribution]
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        for line in metadata.requires(name) or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                waiting.append(wanted.name.lower().replace("_", "-"))
    return names
