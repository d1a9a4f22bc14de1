"""The Hydra schema, the conversion of composed configs to dataclasses, and one-line messages for config errors.

`register` stores a typed schema for each dataclass of `istar.finetune.config`. The YAML files of a group extend its
schema, so that Hydra rejects misspelt keys and wrong types in files and on the command line alike.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import AnyNode, BooleanNode, DictConfig, FloatNode, IntegerNode, OmegaConf, StringNode
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from istar.errors import UserError, check_one_of, did_you_mean
from istar.finetune.config.fields import collects_further_keys, key_of
from istar.finetune.config.groups import Config, describe_unknown_key
from istar.finetune.config.optim_config import OPTIMIZERS
from istar.finetune.config.options import config_folder, sweep_folder
from istar.finetune.config.output_config import LoggerConfig, TensorBoardConfig, WandbConfig
from istar.finetune.config.penalties import PENALTIES
from istar.finetune.config.sweep_config import SweepConfig
from istar.runs.tasks import TASKS

T = TypeVar("T")

PACKAGE_LINE = "# @package _global_"
"""First line of a file of an experiment."""
_LOGGERS: dict[str, Any] = {"csv": LoggerConfig, "tensorboard": TensorBoardConfig, "wandb": WandbConfig}
OPTIONS_BY_GROUP: dict[str, dict[str, Any]] = {"reg": PENALTIES, "logger": _LOGGERS, "optim": OPTIMIZERS}
"""The dataclass of each option of the groups that have one for each option."""
_GROUPS: dict[str, Any] = {
    group.name: group.type
    for group in fields(Config)
    if is_dataclass(group.type) and group.name not in OPTIONS_BY_GROUP
}
"""The dataclass of each config group with one dataclass for all its options."""

_DEFAULT_MODELS = {(False, True): "tiny", (True, True): "tiny_decoder", (True, False): "gpt2"}
"""The default of `model` for tasks that replace the default of config.yaml, by whether the task needs a decoder and
whether its data are generated. For generated data, small models with random weights suffice."""


@functools.cache
def register() -> None:
    """Store the schemas (`schema/task`, `schema/istar` and so on) and the options of `task` and `reg` with Hydra.

    Each entry of `TASKS` and `PENALTIES` is an option; files in conf/ add more. Hydra keeps them for the life of the
    process, so only the first call stores them.
    """
    store = ConfigStore.instance()
    for name, config_class in {**_GROUPS, **PENALTIES, **_LOGGERS, **OPTIMIZERS, "sweep": SweepConfig}.items():
        store.store(group="schema", name=name, node=_make_schema_node(config_class))
    for name in PENALTIES:
        store.store(group="reg", name=name, node={"defaults": [f"/schema/{name}@_here_"]})
    for name, spec in TASKS.items():
        default_model = _DEFAULT_MODELS.get((spec.kind == "causal_lm", spec.hub is None))
        model_override = [] if default_model is None else [{"override /model@_global_.model": default_model}]
        store.store(group="task", name=name, node={"defaults": ["/schema/task@_here_", *model_override], "name": name})


def register_sweeps() -> None:
    """Store the options of `sweep` with Hydra, one for each file of `sweep_folder`."""
    for path in sweep_folder().glob("*.yaml"):
        ConfigStore.instance().store(group="sweep", name=path.stem, node=OmegaConf.load(path), package="_global_")
    Plugins.instance()  # imports the plugins, which store their launchers
    # Of a launcher that conf/ has too, Hydra would merge both options and warn.
    for path in (config_folder() / "hydra" / "launcher").glob("*.yaml"):
        ConfigStore.instance().repo["hydra"]["launcher"].pop(path.name, None)


def load(config: Mapping[str, Any]) -> Config:
    """Convert a composed config, as a DictConfig or as dictionaries, to dataclasses, which check the values.

    Raises a `UserError` if a key is missing or unknown, or a value is not allowed.
    """
    values = _to_plain_data(config) if isinstance(config, DictConfig) else dict(config)
    values.pop("sweep", None)
    class_by_group = dict(_GROUPS)
    for group, class_by_name in OPTIONS_BY_GROUP.items():
        name = find_option(group, values)
        check_one_of(f"{group}.name", name, tuple(class_by_name))
        class_by_group[group] = class_by_name[name]
    _check_known_keys("", values, ["seed", *class_by_group])
    config_by_group = {
        name: _build_dataclass(name, config_class, _get_group(values, name))
        for name, config_class in class_by_group.items()
    }
    return Config(seed=_get_value(values, "seed"), **config_by_group)


def load_sweep(config: DictConfig) -> SweepConfig:
    """Convert the `sweep` group of a composed config to its dataclass; see `load`."""
    return _build_dataclass("sweep", SweepConfig, OmegaConf.to_container(config.sweep, resolve=True))  # type: ignore[arg-type]


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to plain data, with the keys of the command line (`lambda`, not `weight`)."""
    config_class: Any = type(config)
    field_by_key, further_field = _list_fields(config_class)
    values = {key: getattr(config, option.name) for key, option in field_by_key.items()}
    values |= getattr(config, further_field) if further_field else {}
    return {key: to_dict(value) if is_dataclass(value) else value for key, value in values.items()}


@functools.cache
def _list_fields(config_class: Any) -> tuple[dict[str, "Field[Any]"], str | None]:
    """Return the fields of a config dataclass by key, and the name of the field with further keys, if any."""
    further_field = next((f.name for f in fields(config_class) if collects_further_keys(f)), None)
    return {key_of(f): f for f in fields(config_class) if f.name != further_field}, further_field


def to_yaml(config: Config) -> str:
    """Return a config as YAML that OmegaConf reads back unchanged, even values that look like interpolations."""

    def escape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [escape(item) for item in value]
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value

    return yaml.safe_dump(escape(to_dict(config)))


def explain(error: Exception) -> str:
    """Return a line for an error of Hydra, OmegaConf or YAML, with the most similar name if a name is wrong."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: not YAML: {error.problem}"
    if isinstance(error, MissingConfigException) and "hydra/launcher/submitit_" in str(error.missing_cfg_file):
        return "hydra/launcher=slurm and local_jobs need a package that is not installed: pip install 'istar[slurm]'"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).partition("/")
        options = sorted(error.options)
        hint = did_you_mean(name, options, cutoff=0.8 if group == "model" else 0.5)
        expected = f"{group} is one of {', '.join(options)}"
        if group == "model" and not hint:
            expected = f"a hub id or a folder is model=auto model.name={name}; otherwise, {expected}"
        return f"{group}={name}: there is no such option{hint}; {expected}"
    if ambiguous := re.search(r"Ambiguous value for argument '((.*?)=(.*?))'", str(error)):
        override, key, values = ambiguous.groups()
        return f"{override}: several values need -m, for a sweep over them; a list is one value: '{key}=[{values}]'"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: not understood; expected key=value, where a value with spaces or any of "
            "~,=[]{}()$ in it needs its own quotes: 'key=\"a value\"'"
        )
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    message = str(cause)
    key_match = re.search(r"full_key: (\S+)", message)
    if key_match is None:
        return " ".join(str(error).split())
    headline = " ".join(message.split("\n    full_key")[0].split())
    if "does not support deletion" in headline:
        return _describe_missing_key(key_match[1])
    if "not in" in headline:
        return _explain_unknown_key(key_match[1])
    return f"{key_match[1]}: {headline}"


@functools.cache
def find_options_with_key(key: str) -> list[str]:
    """Return the options of `reg`, `logger` or `optim` with a key, such as `reg.zeta`; empty for other groups."""
    group = key.partition(".")[0]
    options = OPTIONS_BY_GROUP.get(group, {}).items()
    return [name for name, config_class in options if key in _list_cli_keys(group, config_class)]


def find_keys_named(name: str) -> list[str]:
    """Return the config keys with a name after their group: `["reg.lambda"]` for `lambda`."""
    return list(dict.fromkeys(key for key in _list_known_keys() if key.rpartition(".")[2] == name))


def _explain_unknown_key(key: str) -> str:
    """Return a message about an unknown key that names the option with this key, or else the most similar key."""
    if owning_options := find_options_with_key(key):
        group = key.partition(".")[0]
        return f"{key} belongs to {group}={' or '.join(owning_options)}, which is not selected"
    known_keys = _list_known_keys()
    if key in (*known_keys, *_GROUPS, *OPTIONS_BY_GROUP):  # `~key` has deleted it
        return _describe_missing_key(key)
    if key in ("experiment", "debug"):
        return f"{key}: there is no such key; a file of {key}/ needs the first line `{PACKAGE_LINE}`"
    if namesakes := find_keys_named(key):
        return describe_unknown_key(key, f"; did you mean {namesakes[0]}?")
    return describe_unknown_key(key, did_you_mean(key, [*known_keys, *_GROUPS, *OPTIONS_BY_GROUP]))


def _describe_missing_key(key: str) -> str:
    return f"{key} is missing; give it on the command line: {key}=<value>"


def _list_known_keys() -> list[str]:
    options = [(group, option) for group, options in OPTIONS_BY_GROUP.items() for option in options.values()]
    classes_by_group = [*_GROUPS.items(), ("sweep", SweepConfig), *options]
    return ["seed", *(key for group, config_class in classes_by_group for key in _list_cli_keys(group, config_class))]


def _list_cli_keys(group: str, config_class: Any) -> list[str]:
    return [f"{group}.{key}" for key in _list_fields(config_class)[0]]


_NODE_CLASSES: dict[Any, type] = {str: StringNode, int: IntegerNode, float: FloatNode, bool: BooleanNode}


def _make_schema_node(config_class: Any) -> DictConfig:
    field_by_key, further_field = _list_fields(config_class)
    node = OmegaConf.create({key: _make_value_node(option) for key, option in field_by_key.items()})
    OmegaConf.set_struct(node, further_field is None)
    return node


def _make_value_node(field: "Field[Any]") -> Any:
    """Return an OmegaConf node with the default of a field. It is typed unless the field allows several types."""
    default: Any = field.default_factory() if callable(field.default_factory) else field.default
    value_types = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    is_optional = type(None) in value_types
    value_types = tuple(value_type for value_type in value_types if value_type is not type(None))
    if len(value_types) > 1 or value_types == (Any,):
        return AnyNode(default)
    if value_types[0] in _NODE_CLASSES:
        return _NODE_CLASSES[value_types[0]](value=default, is_optional=is_optional)
    node = OmegaConf.create(default)
    if isinstance(default, dict):
        OmegaConf.set_struct(node, False)  # accept keys that the default lacks, unlike the group around it
    return node


def _to_plain_data(config: DictConfig) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        # Listing the missing keys is slow, so it is done only after this error.
        missing_key = sorted(OmegaConf.missing_keys(config))[0]
        raise UserError(f"{missing_key} is not set; give it on the command line: {missing_key}=<value>") from error
    except OmegaConfBaseException as error:  # an interpolation such as ${foo} of a key that does not exist
        raise UserError(explain(error)) from error
    return values  # type: ignore[return-value]


def find_option(group: str, config: Mapping[str, Any]) -> str:
    """Return the option of a group in a config: its `name`, except for `torch`, whose name is a class."""
    values = _get_group(config, group)
    return "torch" if group == "optim" and "arguments" in values else str(_get_value(values, "name", f"{group}."))


def _get_group(config: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """Return the values of a group, or raise a `UserError` if the group is missing or, in a user's file, no mapping."""
    values = _get_value(config, group)
    if not isinstance(values, Mapping):
        option = values if isinstance(values, str) else "..."
        raise UserError(
            f"{group}={values} is not a mapping of keys; to choose an option in a file, write `defaults: [override "
            f"/{group}: {option}]`"
        )
    return values


def _get_value(values: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    """Return the value of a key, or raise a `UserError` if the key is missing, for example deleted by `~key`."""
    if key not in values:
        raise UserError(_describe_missing_key(prefix + key))
    return values[key]


def _check_known_keys(prefix: str, keys: Iterable[str], known: Iterable[str]) -> None:
    if unknown_keys := sorted(set(keys) - set(known)):
        raise UserError(_explain_unknown_key(prefix + unknown_keys[0]))


def _build_dataclass(group: str, config_class: type[T], values: Mapping[str, Any]) -> T:
    field_by_key, further_field = _list_fields(config_class)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {
        option.name: _convert_value(_get_value(values, key, f"{group}."), option)
        for key, option in field_by_key.items()
    }
    if further_field is None:
        _check_known_keys(f"{group}.", values, field_by_key)
    else:
        arguments[further_field] = {key: value for key, value in values.items() if key not in field_by_key}
    return config_class(**arguments)


def _convert_value(value: Any, option: "Field[Any]") -> Any:
    """Return the value of a field; nodes of OmegaConf have converted those with a single type.

    Null is the default of a number or fraction of batches, as in Lightning. Numbers become floats in a field that may
    also be a word, such as zeta.
    """
    types = {*get_args(option.type)}
    if value is None and types == {int, float}:
        return option.default
    if not {float, str} <= types or isinstance(value, bool):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value
