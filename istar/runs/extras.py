"""Which extra of the package brings which library, and the one line that names it where a library is missing.

`pip install istar` brings torch alone, which is all that `istar.measures` and `istar.regularizers` import.
"""

from importlib.util import find_spec

from istar.errors import UserError

_REPORT = ("filelock", "jinja2", "markupsafe", "matplotlib", "numpy", "omegaconf", "pandas", "pyarrow", "rich", "scipy",
           "yaml")  # fmt: skip
MODULES = {
    "transformers": ("transformers",),
    "report": _REPORT,
    "sweep": ("optuna",),
    "train": ("transformers", *_REPORT, "datasets", "evaluate", "huggingface_hub", "hydra", "lightning", "requests",
              "safetensors", "sklearn", "tokenizers", "wandb"),
}  # fmt: skip
"""What istar imports, by the extra that brings it; pyproject.toml has the versions."""


def require(feature: str, extra: str) -> None:
    """Refuse to go on if something of an extra is not installed; nothing is imported for it.

    Args:
        feature: what needs the extra, as the user asked for it: `istar report`, `sweep.search=optuna`.
        extra: of `MODULES`.

    Raises:
        UserError: naming the libraries and the extra.
    """
    missing = [module for module in MODULES[extra] if not is_installed(module)]
    if missing:
        names = ", ".join(missing) if len(missing) <= 3 else f"{', '.join(missing[:3])} and {len(missing) - 3} more"
        raise UserError(f"{feature} needs {names}; pip install 'istar[{extra}]'")


def is_installed(module: str) -> bool:
    """Whether a library can be imported; it is not."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        # Somebody forbids its import.
        return False
