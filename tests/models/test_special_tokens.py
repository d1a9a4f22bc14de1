"""Special tokens around a text and inputs for a trial of a model, for tokenizers of every kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, LlamaTokenizer, PreTrainedTokenizerFast

from istar.errors import UserError
from istar.finetune.config import ModelConfig
from istar.finetune.execute.build_config import build_config
from istar.finetune.execute.build_model import build_model
from istar.finetune.tasks.language_modelling import find_block_tokens
from istar.models import pretrained, special_tokens
from istar.runs.tasks import TASKS
from istar.texts.corpus import Blocks

INPUT_NAMES = ["input_ids", "token_type_ids", "attention_mask"]
VOCABULARY = {token: id_ for id_, token in enumerate(["A", "C", "G", "T", "[PAD]", "[CLS]", "[SEP]", "x"])}
A, C, G, T, PAD, CLS, SEP, X = VOCABULARY.values()
BERT = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"


def make_template(single: str, pair: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(VOCABULARY.items()))


def make_tokenizer(post_processor: Any, model: Any = None, **settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the characters of DNA, which has no unknown token and drops all other characters."""
    tokenizer = Tokenizer(model or models.BPE(VOCABULARY, []))
    tokenizer.post_processor = post_processor
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", **settings
    )


def make_llama_tokenizer(**settings: bool) -> Any:
    """Return a tokenizer that puts a space before a text, and whose only letter is Cyrillic."""
    vocabulary = {token: id_ for id_, token in enumerate(["<unk>", "<s>", "</s>", "\u2581", "\u0416"])}
    return LlamaTokenizer(vocab=vocabulary, merges=[], **settings)


def make_dropping_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose normalizer leaves nothing of a Latin letter."""
    tokenizer = make_tokenizer(make_template(*BERT))
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    return tokenizer


def make_byte_tokenizer(adds_prefix_space: bool) -> PreTrainedTokenizerFast:
    alphabet = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_prefix_space)
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize(
    ("tokenizer", "text", "prefix", "suffix"),
    [
        (make_tokenizer(make_template(*BERT)), "ACGT", [CLS], [SEP]),
        (make_tokenizer(make_template(*BERT), padding_side="left", truncation_side="left"), "ACGT", [CLS], [SEP]),
        (make_tokenizer(make_template(*BERT), models.WordLevel(VOCABULARY, "x")), "A", [CLS], [SEP]),
        (make_tokenizer(processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))), "ACGT", [CLS], [SEP]),
        (make_tokenizer(processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS))), "ACGT", [CLS], [SEP]),
        (make_tokenizer(None), "ACGT", [], []), (make_tokenizer(make_template("$A", "$A $B:1")), "ACGT", [], []),
        (make_tokenizer(make_template("$A [SEP] [CLS]:2", "$A [SEP] $B:1 [CLS]:2")), "ACGT", [], [SEP, CLS]),
        (make_tokenizer(make_template("[CLS] x A $A A x [SEP]", "$A $B")), "A", [CLS, X, A], [A, X, SEP]),
        (make_byte_tokenizer(False), "a", [0], []), (make_byte_tokenizer(True), "a", [0], []),
        (make_dropping_tokenizer(), "AaC", [CLS], [SEP]),
        (make_llama_tokenizer(add_bos_token=True), "\u0416", [1], []),
        (make_llama_tokenizer(add_bos_token=False, add_eos_token=True), "\u0416", [], [2]),
        (make_llama_tokenizer(add_bos_token=True, add_eos_token=True), "\u0416 \u0416", [1], [2]),
    ],
)  # fmt: skip
def test_special_tokens_without_a_text(tokenizer: Any, text: str, prefix: list[int], suffix: list[int]) -> None:
    assert special_tokens.special_tokens(tokenizer) == (prefix, suffix)
    text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer(text)["input_ids"] == [*prefix, *text_ids, *suffix]
    [block] = Blocks(tokenizer, 64)([text])
    assert block.tokens == [*prefix, *text_ids, *suffix]
    assert [*block.is_special] == [*[True] * len(prefix), *[False] * len(text_ids), *[True] * len(suffix)]
    assert find_block_tokens(TASKS["clm"], tokenizer) == (prefix, [])
    assert find_block_tokens(TASKS["mlm"], tokenizer) == (prefix, suffix)
    pair_ids = special_tokens.make_one_token_tokenizer(tokenizer)("one text", "another one")["input_ids"]
    assert len(pair_ids) == tokenizer.num_special_tokens_to_add(pair=True) + 2


def test_a_text_of_one_token_has_the_inputs_of_any_text() -> None:
    tokenizer = make_tokenizer(make_template(*BERT), model_input_names=INPUT_NAMES)
    for texts in (["A"], ["A", "A"]):
        expected = tokenizer(*texts, return_tensors="pt")
        inputs = special_tokens.make_one_token_tokenizer(tokenizer)(*texts, return_tensors="pt")
        assert inputs.keys() == expected.keys() == set(INPUT_NAMES)
        assert all(torch.equal(inputs[name], expected[name]) for name in expected)
    tokenizer.model_input_names = ["input_ids"]
    assert special_tokens.make_one_token_tokenizer(tokenizer)("A").keys() == {"input_ids"}


@pytest.mark.parametrize("post_processor", [None, make_template(*BERT)])
@pytest.mark.parametrize("num_types", [1, 2])
def test_a_model_of_another_alphabet_is_loaded(tmp_path: Path, post_processor: Any, num_types: int) -> None:
    make_tokenizer(post_processor, model_input_names=INPUT_NAMES).save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=8, type_vocab_size=num_types, **sizes)).save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path))
    tokenizer = pretrained.load_tokenizer(config.source())
    assert isinstance(pretrained.load_encoder(config.source(), tokenizer), BertModel)

    def load(task: str) -> Any:
        return build_model(config, TASKS[task], build_config(config, TASKS[task], tokenizer), tokenizer)

    load("sst2")
    if num_types == 2:
        load("rte")
    else:  # the second text has the type 1
        with pytest.raises(UserError, match="cannot process the output of its tokenizer"):
            load("rte")
