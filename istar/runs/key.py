"""What a run is: its key, which says what makes two runs equal, repetitions of each other, or one method.

- Runs are equal if their keys have the same settings, data and model: `RunKey.hash`.
- Runs repeat each other if their keys are equal except for the seed: `RunKey.configuration`.
- Runs have one method if they have the same penalty or placebo, whatever its settings, or none: `RunKey.method`.

`istar.finetune.execute.identify` makes the key of a run from its config. It is stored with the run, and whatever
compares runs reads it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from istar.runs.names import BASE, METHOD_NAMES

LABELLED_SETTINGS = (
    "reg.name", "reg.lambda", "reg.estimator", "reg.zeta", "reg.include_padding", "reg.target_score", "reg.side",
    "reg.target", "reg.points",
)  # fmt: skip
"""Config keys that `RunKey.label` shows."""
RECORD_FORMAT = 2
"""Version of records and keys. It is part of the hash, so runs of different versions have different names."""


@dataclass(frozen=True)
class RunKey:
    """The settings, the data and the model that a run depends on. Versions of libraries are not part of it."""

    # Settings that change the outcome, by group and key as on the command line; `seed` has no group. Paths and logging
    # are left out. A penalty of weight 0 counts as `reg=none`, because it trains the same model.
    settings: dict[str, Any]
    data: str  # fingerprint of the training and validation examples
    model: str  # hub id and commit, or a hash of the files, of the model before training and of another tokenizer

    @cached_property
    def hash(self) -> str:
        """Twelve hexadecimal digits that are equal for equal runs; the name of a run's folder ends with them."""
        return self._hash(self.settings)

    @cached_property
    def configuration(self) -> str:
        """A hash of the key without the seed, equal for runs that repeat each other. See also `without`."""
        return self.without("seed")

    def without(self, setting: str) -> str:
        """Return a hash that runs share if they differ at most in the seed and in one setting or group of settings.

        `setting` is a key on the command line, such as `reg.lambda`, or the name of a group, such as `reg`.

        >>> keys = [RunKey({"reg": {"name": "istar", "lambda": weight}, "seed": 1}, "", "") for weight in (-1, 1)]
        >>> len({key.configuration for key in keys}), len({key.without("reg.lambda") for key in keys})
        (2, 1)
        """
        settings = {group: values for group, values in self.settings.items() if group not in ("seed", setting)}
        group, _, name = setting.partition(".")
        if name:
            settings[group] = {other: value for other, value in settings[group].items() if other != name}
        return self._hash(settings)

    def _hash(self, settings: Mapping[str, Any]) -> str:
        content = {"format": RECORD_FORMAT, "settings": settings, "data": self.data, "model": self.model}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    @cached_property
    def inputs(self) -> str:
        """A text that is equal for runs that start from the same model and are evaluated on the same examples."""
        model = [self.settings["model"].get(name) for name in ("pretrained", "architecture", "config")]
        limit = self.settings["trainer"].get("limit_val_batches")
        # A limit that is a number of batches, not a share of them, depends on their size.
        batch_size = self.settings["data"]["eval_batch_size"] if type(limit) is int else None
        return json.dumps([self.data, self.model, *model, limit, batch_size], sort_keys=True)

    @property
    def method(self) -> str:
        """The option of `reg`, such as `istar` or the placebo `dropout`; `BASE` without a penalty."""
        name = self.settings["reg"]["name"]
        return BASE if name == "none" else str(name)

    @property
    def method_name(self) -> str:
        """The name of the method in tables, without its settings: `Base`, `I-STAR`, `weight decay`."""
        return METHOD_NAMES.get(self.method, self.method)

    @property
    def label(self) -> str:
        """The method with its settings as in the paper, e.g. `Base`, `I-STAR λ=-1 ζ=0.4` or `CosReg λ=1`.

        Some further settings are added in words, such as `on output embeddings`; the layers, for example, are not.
        """
        if self.method == BASE:
            return self.method_name
        reg = self.settings["reg"]
        parts = [self.method_name, f"λ={reg['lambda']:g}"]
        if (estimator := reg.get("estimator", "shrinkage")) != "shrinkage":
            parts.append(estimator.replace("_", " "))
        elif "zeta" in reg:
            parts.append("ζ=auto" if reg["zeta"] == "auto" else f"ζ={reg['zeta']:g}")
        parts += ["padding counted"] if reg.get("include_padding") else []
        if reg.get("target_score") is not None:
            parts.append(f"target={reg['target_score']}")
            parts += [f"side={reg['side']}"] if reg.get("side", "both") != "both" else []
        if (target := reg.get("target", "hidden_states")) != "hidden_states":
            parts.append(f"on {target.replace('_', ' ')}")
        if (points := reg.get("points", "all")) != "all":
            parts.append(f"{points} tokens")
        return " ".join(parts)


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested settings by key on the command line, such as `model.config.hidden_size`."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        is_nested = isinstance(value, dict) and value
        values |= flatten_settings(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return values
