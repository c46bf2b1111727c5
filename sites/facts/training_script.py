"""Whether a training script can be run, joins and averages: told from its text alone."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

from isthmus.protos.failure import text_of
from isthmus.topology.spec.machine_facts import Script

_MODULES_MAX = 200
"""Modules beside the script that are looked into."""
_JOINING = frozenset({"isthmus", "isthmus.sites.worker.api.joining"})
"""The modules that `join` is imported from."""
_INTEGRATIONS = ("isthmus.sites.integrations.", "isthmus.sites.trainer.")
"""Modules of ours that average by themselves."""
_AVERAGING = frozenset({"attach", "average_gradients", "all_reduce", "broadcast"})
"""Methods of a site that do."""
_READING = frozenset({"AveragedModel", "eval", "inference_mode", "save_pretrained", "state_dict"})
"""What reads all of a model's weights, between two steps."""


def look_at(path: str) -> Script:
    """Read the script, and the modules beside it."""
    script = Path(path)
    try:
        if script.is_dir():
            return _look_at_folder(script)
        text = script.read_bytes()
        if script.suffix == ".pyc" or zipfile.is_zipfile(script):
            return Script(path=path)  # Python runs these, too
        tree = ast.parse(text, path)
    except SyntaxError as error:
        return Script(
            path=path,
            error=f"not Python: {error.msg}",
            line=error.lineno or 1,
            column=error.offset or 1,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path or in the text
        return Script(path=path, error=_reason(error))
    joins, averages, uses_own = _calls(tree, script.parent)
    return Script(path=path, joins=joins, averages=averages, uses_own=uses_own)


def _look_at_folder(folder: Path) -> Script:
    """Return what Python would run of a folder: its `__main__.py`."""
    main = folder / "__main__.py"
    if not main.is_file():
        return Script(path=str(folder), error="a folder without __main__.py")
    found = look_at(str(main))
    return Script(
        path=str(folder),
        error=None if found.error is None else f"{main.name}: {found.error}",
        joins=found.joins,
        averages=found.averages,
        uses_own=found.uses_own,
    )


def _calls(tree: ast.AST, folder: Path) -> tuple[bool, bool, str]:
    """Whether a module, or one of those in `folder` that it imports, joins; averages; uses its own.

    As `Script` has them.
    """
    trees, seen = [tree], set[Path]()
    joins = averages = False
    named = set[str]()
    for each in trees:
        joins |= _calls_join(each)
        averages |= _averages(each)
        named |= {node.attr for node in ast.walk(each) if isinstance(node, ast.Attribute)}
        named |= {node.id for node in ast.walk(each) if isinstance(node, ast.Name)} - {"eval"}
        for path in _imported(each, folder):
            if path not in seen and len(seen) < _MODULES_MAX:
                seen.add(path)
                try:
                    trees.append(ast.parse(path.read_bytes()))
                except (OSError, SyntaxError, ValueError):
                    return True, True, ""  # in doubt
    is_all = len(seen) < _MODULES_MAX
    uses = min(named & _READING, default="")
    return (
        joins,
        averages or not is_all,
        uses if is_all and "global_parameters" not in named else "",
    )


def _averages(tree: ast.AST) -> bool:
    """Whether a module calls what averages over sites, by whatever name it has the site.

    torch has methods of the same names. A module of ours does it itself.
    """
    others = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {each.name: each.asname or each.name.partition(".")[0] for each in node.names}
            others |= {known for name, known in names.items() if name.partition(".")[0] == "torch"}
            if any(name.startswith(_INTEGRATIONS) for name in names):
                return True
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if f"{node.module}.".startswith(_INTEGRATIONS):
                return True
            if node.module.partition(".")[0] == "torch":
                others |= {each.asname or each.name for each in node.names}
    return any(
        (
            isinstance(node, ast.Attribute)
            and node.attr in _AVERAGING
            and _first_name(node) not in others
        )
        or (isinstance(node, ast.keyword) and node.arg == "averages")
        or (isinstance(node, ast.Constant) and node.value in _AVERAGING)  # getattr
        for node in ast.walk(tree)
    )


def _calls_join(tree: ast.AST) -> bool:
    """Whether a module calls `isthmus.join`, by whatever name it imports that."""
    modules, functions = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {
                each.asname or each.name.partition(".")[0]
                for each in node.names
                if each.name in _JOINING
            }
        elif isinstance(node, ast.ImportFrom) and node.module in _JOINING and not node.level:
            functions |= {
                each.asname or each.name for each in node.names if each.name in ("join", "*")
            }
    if "*" in functions:
        functions.add("join")
    return any(
        (isinstance(node, ast.Name) and node.id in functions)
        or (
            isinstance(node, ast.Attribute) and node.attr == "join" and _first_name(node) in modules
        )
        for node in ast.walk(tree)
    )


def _first_name(node: ast.expr) -> str | None:
    """Return `a` of `a.b.c`; None where it begins with something else than a name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _imported(tree: ast.AST, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` of the modules that a module imports."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{each.name}".strip(".") for each in node.names)]
        for name in names:
            parts = [part for part in name.split(".") if part]
            for length in range(1, len(parts) + 1):
                stem = folder.joinpath(*parts[:length])
                for path in (stem.with_suffix(".py"), stem / "__init__.py"):
                    if path.is_file():
                        yield path


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or text_of(error)
