"""Checks that optional dependencies are installed, and imports large libraries faster.

`pip install istar` installs torch alone, which is all that `istar.measures` and `istar.regularizers` import.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from istar.errors import UserError

_REPORT_MODULES = ("filelock", "jinja2", "markupsafe", "matplotlib", "numpy", "omegaconf", "pandas", "pyarrow", "rich",
           "scipy", "yaml")  # fmt: skip
MODULES_BY_EXTRA = {
    "transformers": ("transformers",),
    "report": _REPORT_MODULES,
    "large": ("accelerate",),
    "lora": ("peft",),
    "sweep": ("optuna",),
    "ray": ("hydra_plugins.hydra_ray_launcher",),
    "joblib": ("hydra_plugins.hydra_joblib_launcher",),
    "tensorboard": ("tensorboard",),
    "completion": ("shtab",),
    "train": ("transformers", *_REPORT_MODULES, "datasets", "huggingface_hub", "hydra", "lightning",
              "safetensors", "sklearn", "tokenizers", "tqdm", "wandb"),
}  # fmt: skip
"""The modules that istar imports from each extra; pyproject.toml has their versions."""


def require(feature: str, extra: str) -> None:
    """Check that all modules of an extra, a key of `MODULES_BY_EXTRA`, are installed, without importing them.

    Raises a `UserError` if any is missing; the message names the feature, such as `istar report`, the modules and the
    extra.
    """
    if missing := [module for module in MODULES_BY_EXTRA[extra] if not is_installed(module)]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(f"{feature} needs {', '.join(missing[:3])}{more}; pip install 'istar[{extra}]'")


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        # An import hook forbids the module, or it is in sys.modules without a spec.
        return False


@contextmanager
def fast_imports() -> Iterator[None]:
    """Speed up imports in the `with` block by disabling the garbage collector.

    torch, transformers and Lightning create about a million objects that are never freed. If the garbage collector
    traversed them again and again, it would take a fifth of the import time. After the block, the collector ignores
    the objects that exist by then, so that every full collection is faster.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
