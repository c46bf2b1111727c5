#!/usr/bin/env python3
"""Write the documents' JSON Schemas from the models that check them.

Usage: python scripts/gen_schemas.py [--check]
With --check nothing is written: exit 1 when a committed schema is out of date.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from isthmus.topology.schemas.schema import SCHEMAS, schema_text  # noqa: E402


def main(argv: list[str]) -> int:
    """Write the schemas, or with --check compare them with what is committed."""
    stale = []
    for kind in SCHEMAS:
        path = ROOT / "topology" / "schemas" / f"{kind}.schema.json"
        text = schema_text(kind)
        if argv != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
    for path in stale:
        print(f"stale: {path.relative_to(ROOT)}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
