"""The second step of a run: loads the tokenizer and the model's config, and tokenizes the data."""

from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from istar.finetune.runs.identify import RunIdentity
from istar.finetune.runs.prepared_data import PreparedData, load_or_train_tokenizer, prepare_data
from istar.inputs import pretrained


@dataclass(frozen=True)
class PreparedRun:
    """A run with its tokenizer, the config of its model and its tokenized data."""

    identity: RunIdentity
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    data: PreparedData


def prepare(identity: RunIdentity) -> PreparedRun:
    """Load the tokenizer and the config of the model, and tokenize the data; write only into the cache.

    Raises:
        UserError: if tokenizer, model, penalty and data do not fit together.
    """
    config, spec = identity.config, identity.spec
    tokenizer = load_or_train_tokenizer(config, spec, identity.examples, identity.data_fingerprint)
    model_config = pretrained.load_config(config.model, spec, tokenizer)
    config.reg.check_layers(model_config.num_hidden_layers)
    data = prepare_data(spec, config, identity.examples, tokenizer, model_config)
    return PreparedRun(identity, tokenizer, model_config, data)
