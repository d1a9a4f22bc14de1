"""Replacement of settings that depend on the machine by the values that they have there."""

from dataclasses import replace

from istar.config import Config


def resolve(config: Config) -> Config:
    """Replace `trainer.precision=auto` by the precision that is fast on this machine, which the run's name contains.

    A warning is logged if the requested precision is slow on this machine.
    """
    if config.trainer.precision in ("32-true", "16-mixed"):
        return config
    # Imported here because the import takes seconds.
    from istar.training.precision import resolve_precision

    return replace(config, trainer=resolve_precision(config.trainer))
