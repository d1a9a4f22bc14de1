"""The lowest versions that pyproject.toml accepts have no known security hole."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

# The first version without the hole, and the advisory. The last column says what an older version allows.
SAFE = {
    "filelock": ("3.20.3", "CVE-2025-68146, CVE-2026-22701", "a lock follows symbolic links and truncates a file"),
    "jinja2": ("3.1.6", "CVE-2025-27516", "a template leaves the sandbox"),
    "lightning": ("2.6.6", "GHSA-w37p-236h-pfx3, GHSA-qqmf-gpg7-g8gw", "compromised releases; code in checkpoints"),
    "mkdocs": ("1.2.3", "CVE-2021-40978", "the development server reads any file"),
    "peft": ("0.20", "adapter_config.json imports megatron_core", "code of a stranger runs when an adapter is loaded"),
    "pyarrow": ("23.0.1", "CVE-2026-25087", "use after free in a reader of IPC files"),
    "pymdown-extensions": ("10.16.1", "CVE-2025-68142", "a regular expression takes exponential time"),
    "pytest": ("9.0.3", "CVE-2025-71176", "predictable temporary folders"),
    "pyyaml": ("5.4", "CVE-2020-14343", "code in YAML"),
    "requests": ("2.32.4", "CVE-2024-47081", "passwords of netrc for another host"),
    "scikit-learn": ("1.5.0", "CVE-2024-5206", "tokens of the training data in a saved vectorizer"),
    "setuptools": ("78.1.1", "CVE-2025-47273", "an index writes any file"),
    "torch": ("2.10.0", "CVE-2025-32434, CVE-2026-24747", "code in checkpoints, also with weights_only"),
    "transformers": ("5.3.0", "CVE-2026-1839, CVE-2026-4372", "code in config.json and in checkpoints"),
    "wandb": ("0.23.1", "CVE-2025-47914, CVE-2025-58181", "holes of its service process"),
}
PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENTS = [
    Requirement(text)
    for texts in (
        PROJECT["build-system"]["requires"],
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
    )
    for text in texts
    if not text.startswith("istar[")
]


@pytest.mark.parametrize("name", SAFE)
def test_no_accepted_version_has_a_known_hole(name: str) -> None:
    """A library may have several requirements in one extra; the strictest of each extra holds."""
    safe = Version(SAFE[name][0])
    floors = [
        max((Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")), default=Version("0"))
        for requirement in REQUIREMENTS
        if requirement.name.lower() == name
    ]
    has_floor = [floor for floor in floors if floor > Version("0")]
    assert all(floor >= safe for floor in has_floor), (name, has_floor, SAFE[name])
    assert bool(has_floor) == bool(floors)


def test_every_direct_requirement_of_the_table_is_one() -> None:
    """`requests` is in the table so that nobody brings it back with its old range."""
    names = {requirement.name.lower() for requirement in REQUIREMENTS}
    assert SAFE.keys() - names == {"requests"}
