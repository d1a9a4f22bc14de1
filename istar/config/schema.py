"""From conf/ and the command line to `Config`: typed, closed, and each mistake explained in one line.

`register` gives Hydra a node of typed values for each dataclass of `istar.config`, from which the group's YAML files
start, so that a misspelt key or a wrong type is refused at compose time, in a file as on the command line. `load` turns
the composed config into the dataclasses.
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

from istar.config.groups import (
    Config,
    CosRegConfig,
    DataConfig,
    IStarConfig,
    LoggerConfig,
    ModelConfig,
    NoRegConfig,
    OptimConfig,
    RunConfig,
    SweepConfig,
    TaskConfig,
    TrainerConfig,
    WandbConfig,
    one_of,
)
from istar.errors import UserError, did_you_mean

T = TypeVar("T")

_GROUPS: dict[str, Any] = {
    "task": TaskConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
    "run": RunConfig,
}
_REGS: dict[str, Any] = {"none": NoRegConfig, "cosreg": CosRegConfig, "istar": IStarConfig}
_LOGGERS: dict[str, Any] = {"csv": LoggerConfig, "wandb": WandbConfig}


def config_folder() -> Path:
    """The folder with config.yaml and the groups' files: `istar/conf` of an installed package, `conf` of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def register() -> None:
    """Give Hydra the schemas as a group of its own, `schema/task`, `schema/istar` and so on."""
    store = ConfigStore.instance()
    for name, kind in {**_GROUPS, **_REGS, **_LOGGERS, "sweep": SweepConfig}.items():
        store.store(group="schema", name=name, node=_schema(kind))


def load(config: DictConfig) -> Config:
    """The composed config as dataclasses, every rule checked.

    Raises:
        UserError: naming the key, the value and what was expected.
    """
    values = _resolved(config)
    values.pop("sweep", None)
    for key in ("seed", *_GROUPS, "reg", "logger"):
        if key not in values:
            raise UserError(f"{key} is missing; give it on the command line: {key}=<value>")
    groups = {**_GROUPS, "reg": _chosen("reg", _REGS, values), "logger": _chosen("logger", _LOGGERS, values)}
    _refuse_unknown("", values, ["seed", *groups])
    built = {name: _build(name, kind, values[name]) for name, kind in groups.items()}
    return Config(seed=values["seed"], **built)


def load_sweep(config: DictConfig) -> SweepConfig:
    """The `sweep` keys of a composed config, every rule checked.

    Raises:
        UserError: naming the key, the value and what was expected.
    """
    return _build("sweep", SweepConfig, OmegaConf.to_container(config.sweep, resolve=True))  # type: ignore[arg-type]


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain data under the keys that the command line uses (`lambda`, not `weight`)."""
    return {
        _key(f): to_dict(value) if is_dataclass(value := getattr(config, f.name)) else value for f in fields(config)
    }


def explain(error: Exception) -> str:
    """What Hydra and OmegaConf say over several lines and causes, as one line with the nearest right name."""
    if isinstance(error, MissingConfigException) and "hydra/launcher/submitit_" in str(error.missing_cfg_file):
        return "hydra/launcher=slurm and local_jobs need a package that is not installed: pip install 'istar[slurm]'"
    if isinstance(error, MissingConfigException) and error.options:
        return _explain_option(str(error.missing_cfg_file), error.options)
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: not understood; expected key=value, where a value with spaces or any of "
            "~,=[]{}()$ in it needs quotes of its own: 'key=\"a value\"'"
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
    group = key.partition(".")[0]
    owners = [name for name, kind in {**_REGS, **_LOGGERS}.items() if key in _keys(group, kind)]
    if owners:
        return f"{key} belongs to {group}={' or '.join(owners)}, which is not the one chosen"
    known = _known_keys()
    same = [name for name in known if name.partition(".")[2] == key]
    hint = f"; did you mean {same[0]}?" if same else did_you_mean(key, [*known, *_GROUPS, "reg", "logger"])
    return f"{key}: there is no such key{hint}; `python train.py --cfg job` lists all"


def _explain_option(wanted: str, options: Iterable[str]) -> str:
    group, _, name = wanted.rpartition("/")
    shown = sorted(options)
    return f"{group}={name}: there is no such option{did_you_mean(name, shown)}; {group} is one of {', '.join(shown)}"


def _known_keys() -> list[str]:
    kinds = [
        *_GROUPS.items(),
        ("sweep", SweepConfig),
        *(("reg", kind) for kind in _REGS.values()),
        *(("logger", kind) for kind in _LOGGERS.values()),
    ]
    return ["seed", *(key for group, kind in kinds for key in _keys(group, kind))]


def _keys(group: str, kind: Any) -> list[str]:
    return [f"{group}.{_key(f)}" for f in fields(kind)]


def _key(of: "Field[Any]") -> str:
    """The key on the command line; lambda is a Python keyword, so no field can bear that name."""
    return str(of.metadata.get("key", of.name))


_NODES: dict[Any, type] = {str: StringNode, int: IntegerNode, float: FloatNode, bool: BooleanNode}


def _schema(kind: Any) -> DictConfig:
    """A closed OmegaConf node with a typed value for each field of a dataclass."""
    node = OmegaConf.create({_key(f): _value_node(f) for f in fields(kind)})
    OmegaConf.set_struct(node, True)
    return node


def _value_node(of: "Field[Any]") -> Any:
    default: Any = of.default_factory() if callable(of.default_factory) else of.default
    given = get_args(of.type)
    optional = type(None) in given
    if isinstance(of.type, UnionType) and len(given) > 1 + optional:
        # A number or a word: the dataclass says which.
        return AnyNode(default)
    base = next((kind for kind in given if kind is not type(None)), of.type) if optional else of.type
    if base in _NODES:
        return _NODES[base](value=default, is_optional=optional)
    return AnyNode(default) if base is Any else OmegaConf.create(default)


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        # Only now, as looking for them takes longer than all else together.
        missing = sorted(OmegaConf.missing_keys(config))[0]
        raise UserError(f"{missing} is not set; give it on the command line: {missing}=<value>") from error
    except OmegaConfBaseException as error:  # a ${key} that is not there
        raise UserError(explain(error)) from error
    return values  # type: ignore[return-value]


def _chosen(group: str, kinds: dict[str, Any], values: dict[str, Any]) -> Any:
    """The dataclass of the option that a group's own `name` tells."""
    name = values[group]["name"]
    one_of(f"{group}.name", name, tuple(kinds))
    return kinds[name]


def _refuse_unknown(prefix: str, values: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise UserError(_explain_key(prefix + unknown[0]))


def _build(group: str, kind: type[T], values: dict[str, Any]) -> T:
    _refuse_unknown(f"{group}.", values, [_key(f) for f in fields(kind)])  # type: ignore[arg-type]
    return kind(**{f.name: values[_key(f)] for f in fields(kind)})  # type: ignore[arg-type]
