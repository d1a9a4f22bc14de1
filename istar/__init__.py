"""Fine-tuning with isotropy penalties, and measures of the geometry of language-model representations.

The public names of this package are imported on first use. Most need only torch. `measure`, `load`, `load_runs`,
`compare`, `Geometry` and `Comparison` need `istar[train]`.
"""

import importlib
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from istar.errors import UserError as UserError
    from istar.geometry.compared_geometries import Comparison as Comparison
    from istar.geometry.compared_geometries import compare as compare
    from istar.geometry.geometry import Geometry as Geometry
    from istar.geometry.geometry import load as load
    from istar.geometry.measuring import measure as measure
    from istar.hidden_states import *  # noqa: F403
    from istar.measures import isoscore as isoscore
    from istar.measures import isoscore_star as isoscore_star
    from istar.measures import isoscore_unbiased as isoscore_unbiased
    from istar.monitoring.alarms import Alarm as Alarm
    from istar.monitoring.alarms import Collapse as Collapse
    from istar.monitoring.monitor import Monitor as Monitor
    from istar.regularizers import *  # noqa: F403
    from istar.reports.run_frame import load_runs as load_runs
    from istar.vectors.transforms import AllButTheTop as AllButTheTop
    from istar.vectors.transforms import Centering as Centering
    from istar.vectors.transforms import Transform as Transform
    from istar.vectors.transforms import Whitening as Whitening

__version__ = "0.1.0"

_MODULE_BY_NAME = {
    "Alarm": "istar.monitoring.alarms",
    "AllButTheTop": "istar.vectors.transforms",
    "Centering": "istar.vectors.transforms",
    "Collapse": "istar.monitoring.alarms",
    "Monitor": "istar.monitoring.monitor",
    "Transform": "istar.vectors.transforms",
    "UserError": "istar.errors",
    "Whitening": "istar.vectors.transforms",
    "isoscore": "istar.measures",
    "isoscore_star": "istar.measures",
    "isoscore_unbiased": "istar.measures",
}
_MODULE_OF_READERS = {
    "Comparison": "istar.geometry.compared_geometries",
    "Geometry": "istar.geometry.geometry",
    "compare": "istar.geometry.compared_geometries",
    "load": "istar.geometry.geometry",
    "load_runs": "istar.reports.run_frame",
    "measure": "istar.geometry.measuring",
}
"""Functions and classes that need more than torch. `from istar import *` leaves them out."""
_PACKAGES = ("istar.regularizers", "istar.hidden_states")
"""Packages with public names that this package exports too; the second imports the first."""
_SUBPACKAGES = ("hidden_states", "integrations", "measures", "regularizers", "statistics")
"""Packages of the library, which `istar.measures.isoscore` imports after `import istar` alone."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if module := {**_MODULE_BY_NAME, **_MODULE_OF_READERS}.get(name):
        return getattr(importlib.import_module(module), name)
    if name == "__all__":
        return _list_public_names()
    if name in _SUBPACKAGES:
        return importlib.import_module(f"istar.{name}")
    if not name.startswith("_"):
        for package in map(importlib.import_module, _PACKAGES):
            if name in package.__all__:
                return getattr(package, name)
    raise AttributeError(f"module 'istar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_list_public_names(), *_MODULE_OF_READERS, *_SUBPACKAGES])


def _list_public_names() -> list[str]:
    names_of_packages = [importlib.import_module(package).__all__ for package in _PACKAGES]
    return sorted(["__version__", *_MODULE_BY_NAME, *itertools.chain.from_iterable(names_of_packages)])
