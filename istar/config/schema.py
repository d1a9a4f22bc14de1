"""The Hydra schema, the conversion of composed configs to dataclasses, and one-line messages for config errors.

`register` stores a typed schema for each dataclass of `istar.config`. The YAML files of a group extend its schema, so
that Hydra rejects misspelt keys and wrong types in files and on the command line alike.
"""

import re
from collections.abc import Iterable
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args

from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import AnyNode, BooleanNode, DictConfig, FloatNode, IntegerNode, OmegaConf, StringNode
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from istar.config.checks import one_of
from istar.config.groups import Config, LoggerConfig, SweepConfig, TensorBoardConfig, WandbConfig
from istar.config.penalties import PENALTIES
from istar.errors import UserError, did_you_mean
from istar.tasks.specs import TASKS

T = TypeVar("T")

_GROUPS: dict[str, Any] = {group.name: group.type for group in fields(Config) if is_dataclass(group.type)}
"""The dataclass of each config group, except for `reg` and `logger`, which have several options."""
_LOGGERS: dict[str, Any] = {"csv": LoggerConfig, "tensorboard": TensorBoardConfig, "wandb": WandbConfig}

_MODELS = {(False, True): "tiny", (True, True): "tiny_decoder", (True, False): "gpt2"}
"""The default of `model` for tasks that need a decoder or not, and whose data are generated or not, if not that of
config.yaml: small models with random weights for generated data."""


def config_folder() -> Path:
    """Return the folder of config.yaml: `istar/conf` in an installed package, `conf` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def sweep_folder() -> Path:
    """Return the folder of the options of `sweep`: `istar/conf/sweep` in an installed package, `sweep` if not."""
    installed = config_folder() / "sweep"
    return installed if installed.is_dir() else config_folder().parent / "sweep"


def register() -> None:
    """Store the schemas (`schema/task`, `schema/istar` and so on) and the options of `task` and `reg` with Hydra.

    `TASKS` and `PENALTIES` have an option for each entry. The files in conf/ add options that set further values.
    """
    store = ConfigStore.instance()
    for name, kind in {**_GROUPS, **PENALTIES, **_LOGGERS, "sweep": SweepConfig}.items():
        store.store(group="schema", name=name, node=_schema(kind))
    for name in PENALTIES:
        store.store(group="reg", name=name, node={"defaults": [f"/schema/{name}@_here_"]})
    for name, spec in TASKS.items():
        model = _MODELS.get((spec.kind == "causal_lm", spec.hub is None))
        override = [] if model is None else [{"override /model@_global_.model": model}]
        store.store(group="task", name=name, node={"defaults": ["/schema/task@_here_", *override], "name": name})


def register_sweeps() -> None:
    """Store the options of `sweep` with Hydra, one for each file of `sweep_folder`, which is not in conf/."""
    for path in sweep_folder().glob("*.yaml"):
        ConfigStore.instance().store(group="sweep", name=path.stem, node=OmegaConf.load(path), package="_global_")


def load(config: DictConfig) -> Config:
    """Convert a composed config to dataclasses, which check the values.

    Raises:
        UserError: if a key is missing or unknown, or a value is not allowed.
    """
    values = _resolve(config)
    values.pop("sweep", None)
    for key in ("seed", *_GROUPS, "reg", "logger"):
        if key not in values:
            raise UserError(f"{key} is missing; give it on the command line: {key}=<value>")
    groups = {**_GROUPS, "reg": _select("reg", PENALTIES, values), "logger": _select("logger", _LOGGERS, values)}
    _check_keys("", values, ["seed", *groups])
    configs = {name: _build(name, kind, values[name]) for name, kind in groups.items()}
    return Config(seed=values["seed"], **configs)


def load_sweep(config: DictConfig) -> SweepConfig:
    """Convert the `sweep` group of a composed config to its dataclass, which checks the values.

    Raises:
        UserError: if a key is unknown or a value is not allowed.
    """
    return _build("sweep", SweepConfig, OmegaConf.to_container(config.sweep, resolve=True))  # type: ignore[arg-type]


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to plain data, with the keys of the command line (`lambda`, not `weight`)."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    further = values.pop(_further_keys(config) or "", {})
    plain = {_key(f): values[f.name] for f in fields(config) if f.name in values}
    return {key: to_dict(value) if is_dataclass(value) else value for key, value in {**plain, **further}.items()}


def explain(error: Exception) -> str:
    """Return a one-line message for an error of Hydra or OmegaConf, with the nearest valid name if a name is wrong."""
    if isinstance(error, MissingConfigException) and "hydra/launcher/submitit_" in str(error.missing_cfg_file):
        return "hydra/launcher=slurm and local_jobs need a package that is not installed: pip install 'istar[slurm]'"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        known = sorted(error.options)
        hint = did_you_mean(name, known)
        return f"{group}={name}: there is no such option{hint}; {group} is one of {', '.join(known)}"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: not understood; expected key=value, where a value with spaces or any of "
            "~,=[]{}()$ in it needs its own quotes: 'key=\"a value\"'"
        )
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause)
    key = re.search(r"full_key: (\S+)", text)
    headline = " ".join(text.split("\n    full_key")[0].split())
    if key is None:
        return " ".join(str(error).split())
    if "not in" in headline:
        return _explain_key(key[1])
    return f"{key[1]}: {headline}"


def _explain_key(key: str) -> str:
    """Return the message for an unknown key: the option that has this key, or else the nearest valid key."""
    group = key.partition(".")[0]
    owners = [name for name, kind in {**PENALTIES, **_LOGGERS}.items() if key in _keys(group, kind)]
    if owners:
        return f"{key} belongs to {group}={' or '.join(owners)}, which is not selected"
    known = _known_keys()
    in_a_group = [name for name in known if name.partition(".")[2] == key]
    hint = f"; did you mean {in_a_group[0]}?" if in_a_group else did_you_mean(key, [*known, *_GROUPS, "reg", "logger"])
    return f"{key}: there is no such key{hint}; `python train.py --cfg job` lists all"


def _known_keys() -> list[str]:
    """Return all keys of all groups, with those of options that are not selected."""
    kinds = [
        *_GROUPS.items(),
        ("sweep", SweepConfig),
        *(("reg", kind) for kind in PENALTIES.values()),
        *(("logger", kind) for kind in _LOGGERS.values()),
    ]
    return ["seed", *(key for group, kind in kinds for key in _keys(group, kind))]


def _keys(group: str, kind: Any) -> list[str]:
    return [f"{group}.{_key(f)}" for f in fields(kind) if not f.metadata.get("further_keys")]


def _key(field: "Field[Any]") -> str:
    """Return a field's key on the command line, which differs for `lambda` because that is a Python keyword."""
    return str(field.metadata.get("key", field.name))


_NODES: dict[Any, type] = {str: StringNode, int: IntegerNode, float: FloatNode, bool: BooleanNode}


def _schema(kind: Any) -> DictConfig:
    """Return an OmegaConf node with the typed keys of a dataclass, and others only if it has a field for them."""
    further = _further_keys(kind)
    node = OmegaConf.create({_key(f): _value_node(f) for f in fields(kind) if f.name != further})
    OmegaConf.set_struct(node, further is None)
    return node


def _further_keys(kind: Any) -> str | None:
    """Return the name of the field of a config dataclass that holds the keys without a field; None if there is none."""
    return next((f.name for f in fields(kind) if f.metadata.get("further_keys")), None)


def _value_node(field: "Field[Any]") -> Any:
    """Return an OmegaConf node with a field's default. It is typed unless the field is Any or allows two types."""
    default: Any = field.default_factory() if callable(field.default_factory) else field.default
    types = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    is_optional = type(None) in types
    types = tuple(kind for kind in types if kind is not type(None))
    if len(types) > 1 or types == (Any,):
        return AnyNode(default)
    if types[0] in _NODES:
        return _NODES[types[0]](value=default, is_optional=is_optional)
    node = OmegaConf.create(default)
    if isinstance(default, dict):
        OmegaConf.set_struct(node, False)  # accept keys that the default lacks, unlike the group around it
    return node


def _resolve(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain data with resolved interpolations; refuse unset values and unknown keys in them."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        # Listing the missing keys is slow, so it is done only after this error.
        missing = sorted(OmegaConf.missing_keys(config))[0]
        raise UserError(f"{missing} is not set; give it on the command line: {missing}=<value>") from error
    except OmegaConfBaseException as error:  # an interpolation such as ${foo} of a key that does not exist
        raise UserError(explain(error)) from error
    return values  # type: ignore[return-value]


def _select(group: str, kinds: dict[str, Any], values: dict[str, Any]) -> Any:
    """Return the dataclass of a group's selected option, whose name is in `<group>.name`."""
    name = values[group]["name"]
    one_of(f"{group}.name", name, tuple(kinds))
    return kinds[name]


def _check_keys(prefix: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Raise a UserError if any of the keys is unknown; its message names the key with the prefix."""
    unknown = sorted(set(keys) - set(known))
    if unknown:
        raise UserError(_explain_key(prefix + unknown[0]))


def _build(group: str, kind: type[T], values: dict[str, Any]) -> T:
    """Convert the values of a config group to its dataclass."""
    further = _further_keys(kind)
    names = {_key(f): f.name for f in fields(kind) if f.name != further}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {name: values[key] for key, name in names.items()}
    if further is None:
        _check_keys(f"{group}.", values, names)
    else:
        arguments[further] = {key: value for key, value in values.items() if key not in names}
    return kind(**arguments)
