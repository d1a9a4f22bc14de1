"""Checks of config values, which raise a UserError that names the key and the allowed values."""

from istar.errors import UserError, did_you_mean


def check_at_least(minimum: int, key: str, value: int | None) -> None:
    """Raise a UserError if the value of a config key is below the minimum; None passes."""
    if value is not None and value < minimum:
        raise UserError(f"{key}={value} is too small; expected {minimum} or more")


def check_one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise a UserError if the value of a config key is not allowed; the message suggests the most similar one."""
    if value not in allowed:
        raise UserError(
            f"{key}={value} is not known{did_you_mean(value, allowed)}; expected one of {', '.join(allowed)}"
        )
