"""The options of config groups, and the folders of their files; this module imports no other library."""

from pathlib import Path

from istar.runs.names import BASE, METHOD_NAMES
from istar.runs.tasks import TASKS


def config_folder() -> Path:
    """Return the folder of config.yaml: `istar/conf` in an installed package, `conf` in a checkout."""
    package_folder = Path(__file__).resolve().parents[2]
    installed_folder = package_folder / "conf"
    return installed_folder if installed_folder.is_dir() else package_folder.parent / "conf"


def sweep_folder() -> Path:
    """Return the folder of the options of `sweep`: `istar/conf/sweep` if istar is installed, `sweep` in a checkout."""
    installed_folder = config_folder() / "sweep"
    return installed_folder if installed_folder.is_dir() else config_folder().parent / "sweep"


def list_options() -> dict[str, list[str]]:
    """Return the names of the options of each config group that has several, or one that is not the default."""
    groups = ("task", "model", "reg", "trainer", "logger", "experiment", "debug", "hydra/launcher")
    paths_by_group = {group: (config_folder() / group).glob("*.yaml") for group in groups}
    paths_by_group["sweep"] = sweep_folder().glob("*.yaml")
    names_by_group = {group: {path.stem for path in paths} for group, paths in paths_by_group.items()}
    names_by_group["task"].update(TASKS)
    names_by_group["reg"].update({"none", *METHOD_NAMES} - {BASE})
    return {group: sorted(names) for group, names in names_by_group.items()}
