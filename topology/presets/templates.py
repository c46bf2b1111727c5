"""Templates of the commented topology and job that `isthmus init` writes for a preset."""

from importlib import resources

SCHEMAS = ".schemas"
"""The folder beside the documents that has their JSON Schemas, for editors."""
DEFAULT_PRESET = "three-coasts"
PRESETS = {
    DEFAULT_PRESET: "Three sites in North America; runs here as it is.",
    "two-sites-1000km": "Two sites 21 ms apart; runs here as it is.",
    "three-continents": "Virginia, Frankfurt and Tokyo, up to 230 ms apart; runs here as it is.",
    "mesh-16": "Sixteen regions with 64 H100s each, all joined; to plan and simulate.",
}
"""The presets by name, each described in one line."""


def topology_yaml(preset: str = DEFAULT_PRESET) -> str:
    """Return a preset's commented topology; KeyError if there is no such preset."""
    return _headed("topology", preset)


def job_yaml(preset: str = DEFAULT_PRESET) -> str:
    """Return a preset's commented job, for its topology beside it as `topology.yaml`."""
    return _headed("job", preset)


def _headed(kind: str, preset: str) -> str:
    if preset not in PRESETS:
        raise KeyError(preset)
    file = resources.files(__package__).joinpath(f"{preset}.{kind}.yaml")
    return f"{schema_line(kind)}{file.read_text(encoding='utf-8')}"


def schema_line(kind: str) -> str:
    """Return the first line of a document, which points editors to its schema beside it."""
    return f"# yaml-language-server: $schema={SCHEMAS}/{kind}.schema.json\n"
