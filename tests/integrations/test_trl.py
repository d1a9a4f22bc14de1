"""The penalty and the monitor in trl's `SFTTrainer`, whose fused head returns no hidden states."""

import copy
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import istar
from istar.integrations.transformers import MonitorCallback, PenaltyMixin
from tests.integrations.builders import GPT2, LLAMA, SGD, expected_gradient, make_settings, make_sigma
from tests.oracles import algorithm_1, mean_pair_cosine, stack

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

WEIGHT, ZETA = 3.0, 0.3
WORDS = [f"w{index}" for index in range(36)]


class PenaltySFTTrainer(PenaltyMixin, trl.SFTTrainer):
    task_loss_is_normalized = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.terms = [], []

    def compute_loss(self, model, inputs, *args, **kwargs):
        if torch.is_grad_enabled():
            self.batches.append(dict(inputs))
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if torch.is_grad_enabled():
            self.terms.append(self.penalty.last)
        self.num_items = kwargs.get("num_items_in_batch")
        return loss


def make_tokenizer():
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make_texts(count=16):
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    return [
        {"text": " ".join(WORDS[i] for i in torch.randint(36, (length,), generator=generator).tolist())}
        for length in lengths
    ]


def make_model(name):
    torch.manual_seed(5)
    special_ids = {"bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**(GPT2 | special_ids))).double()
    return LlamaForCausalLM(LlamaConfig(**(LLAMA | special_ids))).double()


def make_trainer(folder, model, penalty, **arguments):
    defaults = SGD | {"bf16": False, "gradient_checkpointing": False, "logging_steps": 1}
    refresh = arguments.pop("refresh", None)
    return PenaltySFTTrainer(
        model=model,
        args=trl.SFTConfig(str(folder), **(defaults | arguments)),
        train_dataset=datasets.Dataset.from_list(make_texts()),
        eval_dataset=datasets.Dataset.from_list(make_texts(4)) if "eval_strategy" in arguments else None,
        processing_class=make_tokenizer(),
        penalty=penalty,
        settings=make_settings(refresh),
    )


def make_penalty(weight=WEIGHT):
    penalty = istar.IStar(weight, ZETA)
    penalty.shrinkage_covariance = make_sigma()
    return penalty


def train_and_compute_changes(trainer):
    initial_parameters = copy.deepcopy(
        {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    )
    trainer.train()
    return {name: initial_parameters[name] - parameter.detach() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize(("name", "accumulation"), [("gpt2", 4), pytest.param("llama", 1, marks=pytest.mark.slow)])
def test_a_step_is_the_gradient_of_the_mean_of_task_loss_and_penalty(name, accumulation, tmp_path):
    arguments = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4}
    trainer = make_trainer(tmp_path, make_model(name), make_penalty(), **arguments)
    changes = train_and_compute_changes(trainer)
    assert len(trainer.batches) == accumulation
    assert any((batch["attention_mask"] == 0).any() for batch in trainer.batches)
    keys = ("input_ids", "attention_mask", "labels")
    steps = [[{key: batch[key] for key in keys}] for batch in trainer.batches]
    expected = expected_gradient(make_model(name), steps, WEIGHT, make_sigma(), ZETA, num_items=trainer.num_items)
    # The fused head computes the task loss in float32.
    assert_close({key: changes[key] for key in expected}, expected, rtol=1e-5, atol=1e-6)
    expected_without_penalty = expected_gradient(
        make_model(name), steps, 0.0, make_sigma(), ZETA, num_items=trainer.num_items
    )
    assert sum((expected[key] - expected_without_penalty[key]).norm() for key in expected) > 1e-2
    for batch, terms in zip(steps, trainer.terms, strict=True):
        assert_close(terms.value, 1 - naive_score(make_model(name), batch[0]), rtol=1e-9, atol=1e-9)


def naive_score(model, batch):
    batch = {key: value for key, value in batch.items() if key != "labels"}
    states = model(**batch, output_hidden_states=True, use_cache=False).hidden_states[1:]
    is_real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return algorithm_1(torch.cat([state[is_real] for state in states]), make_sigma(), ZETA, torch.linalg.eigvalsh)


@pytest.mark.filterwarnings("ignore::UserWarning:trl")
@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_tokens_count_where_batches_have_no_padding(packing, tmp_path):
    trainer = make_trainer(
        tmp_path,
        make_model("llama"),
        make_penalty(),
        padding_free=True,
        packing=packing,
        max_length=16 if packing else None,
    )
    changes = train_and_compute_changes(trainer)
    [batch], [terms] = trainer.batches, trainer.terms
    assert "attention_mask" not in batch
    assert len(batch["input_ids"]) == 1
    assert terms.points == 2 * batch["input_ids"].numel()
    batch = {key: batch[key] for key in ("input_ids", "position_ids")}
    assert_close(terms.value, 1 - naive_score(make_model("llama"), batch), rtol=1e-9, atol=1e-9)
    assert changes["model.layers.0.self_attn.q_proj.weight"].any()


@pytest.mark.parametrize(("name", "accumulation"), [("gpt2", 2), pytest.param("llama", 1, marks=pytest.mark.slow)])
def test_a_monitor_reads_the_tokens_of_each_due_step_next_to_a_penalty(name, accumulation, tmp_path):
    arguments = {"gradient_accumulation_steps": accumulation, "max_steps": 3, "learning_rate": 0.0}
    trainer = make_trainer(tmp_path, make_model(name), make_penalty(), eval_strategy="no", **arguments)
    trainer.eval_dataset = trainer.train_dataset
    callback = MonitorCallback(trainer, every=2, probe=1, alarms=[])
    trainer.add_callback(callback)
    trainer.train()
    assert callback.monitor.count == trainer.state.global_step == 3
    assert [reading.step for reading in callback.monitor.readings] == [0, 2]
    for reading in callback.monitor.readings:
        points = []
        for batch in trainer.batches[reading.step * accumulation :][:accumulation]:
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
            states = make_model(name)(**inputs, output_hidden_states=True).hidden_states
            points.append(stack(states[-1:], inputs["attention_mask"]).detach())
        expected = mean_pair_cosine(torch.cat(points).numpy())
        assert list(reading.values) == ["embeddings", "layer_1", "layer_2", "final_norm"]
        assert reading.values["final_norm"]["points"] == sum(map(len, points))
        assert reading.values["final_norm"]["inter_sim"] == pytest.approx(expected, rel=1e-9)
    assert math.isfinite(trainer.evaluate()["eval_layer_2_isoscore_unbiased"])


class PenaltyGRPOTrainer(PenaltyMixin, trl.GRPOTrainer):
    pass


@pytest.mark.slow
def test_batches_of_prompts_have_no_shrinkage_covariance_and_one_line_says_what_to_do(tmp_path):
    def make_grpo_trainer(penalty, refresh):
        settings = SGD | {"bf16": False, "gradient_checkpointing": False, "max_steps": 1, "report_to": "none"}
        settings |= {"num_generations": 2, "max_completion_length": 3, "per_device_train_batch_size": 2}
        return PenaltyGRPOTrainer(
            model=make_model("llama").float(),
            args=trl.GRPOConfig(str(tmp_path), **settings),
            train_dataset=datasets.Dataset.from_list([{"prompt": row["text"]} for row in make_texts(4)]),
            reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
            processing_class=make_tokenizer(),
            penalty=penalty,
            settings=make_settings(refresh),
        )

    message = r"^a batch for the shrinkage covariance has 2 values without names; .* before, and refresh=False$"
    with pytest.raises(istar.UserError, match=message):
        make_grpo_trainer(istar.IStar(WEIGHT, ZETA), "epoch").train()
    penalty = istar.IStar(WEIGHT, ZETA)
    trainer = make_grpo_trainer(penalty, None)
    ids = torch.arange(40).view(4, 10)
    penalty.shrinkage_covariance = istar.shrinkage_covariance(trainer.model, [{"input_ids": ids}])
    trainer.train()
    assert penalty.last.points > 0
