"""Penalties on the rows of embedding matrices, against sums over all pairs and Algorithm 1."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from istar.errors import UserError
from istar.hidden_states import EmbeddingPenalty, PenaltySettings, attach_with_settings
from istar.regularizers import CosReg, IStar, Points
from istar.regularizers.points import Tokens
from tests.forks import run_in_processes
from tests.oracles import algorithm_1

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
VOCABULARY, WIDTH = 40, 8
INPUT, OUTPUT = "input_embeddings", "output_embeddings"


def embedding_penalty(model: Any, penalty: Any, target: str, rows: int | None = None, seed: int = 0) -> Any:
    return EmbeddingPenalty(model, penalty, PenaltySettings(target=target, rows=rows, seed=seed))


PENALTIES = {"cosreg": lambda: CosReg(0.7), "istar": lambda: IStar(-0.7, 0)}


def llama(is_tied: bool = False) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, vocab_size=VOCABULARY,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2, tie_word_embeddings=is_tied,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).double().train()


def naive_penalty(name: str, matrix: Tensor) -> Tensor:
    if name == "istar":
        return -0.7 * (1 - algorithm_1(matrix, torch.eye(WIDTH, dtype=torch.float64), 0.0, torch.linalg.eigvalsh))
    rows = [row / row.norm() for row in matrix]
    pairs = [a @ b for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j]
    return 0.7 * torch.stack(pairs).sum() / len(matrix) ** 2


@pytest.mark.parametrize("target", [INPUT, OUTPUT])
@pytest.mark.parametrize("name", PENALTIES)
def test_value_and_gradient_are_those_of_all_rows(name, target):
    model = llama()
    weights = {INPUT: model.model.embed_tokens.weight, OUTPUT: model.lm_head.weight}
    expected = naive_penalty(name, weights[target])
    (expected_gradient,) = torch.autograd.grad(expected, weights[target])
    watch = embedding_penalty(model, PENALTIES[name](), target)
    loss = watch.loss()
    assert_close(loss.detach(), expected.detach(), **CLOSE)
    loss.backward()
    assert_close(weights.pop(target).grad, expected_gradient, **CLOSE)
    assert [weight.grad for weight in weights.values()] == [None]
    assert watch.penalty.last.points == VOCABULARY
    assert watch.num_layers == 1


@pytest.mark.parametrize("name", PENALTIES)
def test_gradcheck(name):
    model = llama()
    watch = embedding_penalty(model, PENALTIES[name](), OUTPUT)
    initial_rows = model.lm_head.weight.detach()[:12].clone().requires_grad_()

    def penalty_of_rows(matrix: Tensor) -> Tensor:
        return watch.penalty.combine(watch.penalty.summarize([matrix], Tokens()))

    assert torch.autograd.gradcheck(penalty_of_rows, initial_rows, fast_mode=True)


def test_tied_embeddings_are_one_matrix_and_both_uses_of_it_have_a_gradient():
    model = llama(is_tied=True)
    losses = [embedding_penalty(model, CosReg(0.7), target).loss() for target in (INPUT, OUTPUT)]
    assert torch.equal(*losses)
    ids = torch.arange(6)[None]
    watch = embedding_penalty(model, CosReg(0.7), OUTPUT)
    (model(ids, labels=ids).loss + watch.loss()).backward()
    total = model.lm_head.weight.grad.clone()
    model.zero_grad()
    (model(ids, labels=ids).loss + naive_penalty("cosreg", model.lm_head.weight)).backward()
    assert_close(total, model.lm_head.weight.grad, **CLOSE)


def test_an_encoder_without_a_head_has_input_embeddings():
    model = hf.BertModel(hf.BertConfig(hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, vocab_size=30))
    assert attach_with_settings(model, CosReg(1.0), PenaltySettings(target=INPUT)).loss().requires_grad
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[3:5] = 0
    loss = embedding_penalty(model, CosReg(1.0), INPUT).loss()
    loss.backward()
    assert model.embeddings.word_embeddings.weight.grad.isfinite().all()


def test_rows_are_sampled_anew_without_repetition_and_exactly_again_from_a_saved_state():
    model = llama()
    samples: list[Tensor] = []

    class Recording(CosReg):
        def summarize_points(self, points: Tensor, indices: Tensor | None) -> Tensor:
            samples.append(points.detach())
            return super().summarize_points(points, indices)

    def draw_samples(attached: EmbeddingPenalty, times: int) -> list[Tensor]:
        samples.clear()
        for _ in range(times):
            attached.loss()
        return list(samples)

    torch.manual_seed(5)
    initial_rng_state = torch.get_rng_state()
    watch = embedding_penalty(model, Recording(1.0), OUTPUT, rows=15, seed=3)
    first_samples = draw_samples(watch, 2)
    saved_state = {name: value.clone() for name, value in watch.state_dict().items()}
    later_samples = draw_samples(watch, 3)
    assert torch.equal(torch.get_rng_state(), initial_rng_state)
    embedding_matrix = model.lm_head.weight
    for sample in (*first_samples, *later_samples):
        rows = [int((embedding_matrix == row).all(1).nonzero()) for row in sample]
        assert len(set(rows)) == 15
    assert not torch.equal(*first_samples)
    resumed_watch = embedding_penalty(model, Recording(1.0), OUTPUT, rows=15, seed=3)
    resumed_watch.load_state_dict(saved_state)
    assert all(torch.equal(*pair) for pair in zip(draw_samples(resumed_watch, 3), later_samples, strict=True))
    assert saved_state.keys() == {"process0.undefined", "process0.generator"}
    # A step with weight 0 draws as well, so that a schedule does not change the samples of later steps.
    skipping_watch = embedding_penalty(model, Recording(0.0), OUTPUT, rows=15, seed=3)
    assert draw_samples(skipping_watch, 2) == []
    skipping_watch.penalty.weight = 1.0
    assert torch.equal(draw_samples(skipping_watch, 1)[0], later_samples[0])


def test_the_mean_over_samples_of_rows_is_the_penalty_of_pairs():
    """The sum over pairs of rows sampled without replacement is unbiased: its mean is that over all pairs."""
    model = llama()
    watch = embedding_penalty(model, CosReg(1.0), OUTPUT, rows=10)
    with torch.no_grad():
        sampled_mean = torch.stack([watch.loss() for _ in range(600)]).mean() * 10**2 / (10 * 9)
        units = torch.nn.functional.normalize(model.lm_head.weight, dim=1)
        cosines = units @ units.T
        exact_mean = (cosines.sum() - cosines.trace()) / (VOCABULARY * (VOCABULARY - 1))
    assert_close(sampled_mean, exact_mean, rtol=0, atol=8e-3)


def test_weight_0_is_skipped_and_nothing_is_refreshed():
    watch = embedding_penalty(llama(), CosReg(1.0), OUTPUT)
    watch.loss()
    watch.penalty.weight = 0.0
    assert watch.loss() == 0
    assert watch.penalty.last is None
    assert watch.refresh([]) == 0
    with watch:
        pass


def test_frozen_embeddings_are_warned_of_once():
    model = llama()
    model.lm_head.requires_grad_(False)
    watch = embedding_penalty(model, CosReg(1.0), OUTPUT)
    with pytest.warns(UserWarning, match="the output embeddings are frozen") as caught:
        watch.loss()
    assert [warning.filename for warning in caught] == [__file__]
    watch.loss()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: embedding_penalty(llama(), CosReg(1.0), "embeddings"), "target=embeddings is not known"),
        (lambda: embedding_penalty(llama().model, CosReg(1.0), OUTPUT), "LlamaModel has no output embeddings"),
        (
            lambda: embedding_penalty(hf.BertForSequenceClassification(hf.BertConfig(
                hidden_size=8, num_hidden_layers=1, num_attention_heads=2)), CosReg(1.0), OUTPUT),
            "BertForSequenceClassification has no output embeddings.*expected a language model, or target=input_emb",
        ),
        (
            lambda: embedding_penalty(hf.CanineModel(hf.CanineConfig(
                hidden_size=8, num_hidden_layers=1, num_attention_heads=2)), CosReg(1.0), INPUT),
            "CanineModel has no input embeddings.*expected a language model, or target=hidden_states",
        ),
        (lambda: embedding_penalty(llama(), IStar(1.0, 0.4), OUTPUT), "has no shrinkage covariance.*IStar with zeta=0"),
        (lambda: embedding_penalty(llama(), CosReg(1.0), OUTPUT, rows=1), "rows=1 is too small"),
        (lambda: embedding_penalty(llama(), CosReg(1.0), OUTPUT, rows=41), "rows=41; expected 2 to 40"),
        (lambda: embedding_penalty(torch.nn.Linear(1, 1), CosReg(1.0), OUTPUT), "no transformers model in Linear"),
        (lambda: PenaltySettings(rows=3), "rows=3 needs target=input_embeddings or"),
        (lambda: PenaltySettings(Points("last"), OUTPUT), "target=output_embeddings has rows"),
    ],
    ids=range(10),
)  # fmt: skip
def test_what_has_no_embedding_matrix_is_refused_in_one_line(call: Any, message: str):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# Two processes ------------------------------------------------------------------------------------------------

IDS = torch.arange(24).reshape(4, 6) * 5 % VOCABULARY
CASES = [(name, rows) for name in PENALTIES for rows in (None, 20)]


def train(model: Any, unwrapped_model: Any, ids: Tensor, name: str, rows: int | None) -> Tensor:
    """Train three steps of plain SGD; returns all parameters, the last penalty and its number of points."""
    optimizer = torch.optim.SGD(unwrapped_model.parameters(), lr=0.5)
    watch = embedding_penalty(model, PENALTIES[name](), OUTPUT, rows)
    for _ in range(3):
        optimizer.zero_grad()
        (model(ids, labels=ids).loss + watch.loss()).backward()
        optimizer.step()
    terms = watch.penalty.last
    assert terms is not None
    penalty_and_points = torch.stack([terms.value.double(), terms.points.double()])
    return torch.cat([torch.nn.utils.parameters_to_vector(unwrapped_model.parameters()).detach(), penalty_and_points])


def run_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for name, rows in CASES:
        unwrapped_model = llama()
        results[f"{name} {rows}"] = train(
            DistributedDataParallel(unwrapped_model), unwrapped_model, IDS[2 * rank : 2 * rank + 2], name, rows
        )
    sharded = fully_shard(llama(), mesh=dist.init_device_mesh("cpu", (2,)))
    try:
        embedding_penalty(sharded, CosReg(1.0), OUTPUT)
    except UserError as error:
        results["sharded"] = str(error)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    # Skip the shutdown of the interpreter, in which the process group may abort.
    os._exit(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gloo")
    run_in_processes(run_worker, (str(folder),), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_two_processes_train_as_one(results, name, rows):
    model = llama()
    initial_parameters = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    expected = train(model, model, IDS, name, rows)
    assert (expected[:-2] - initial_parameters).abs().max() > 1e-2
    for result in results:
        assert_close(result[f"{name} {rows}"], expected, **CLOSE)


def test_a_sharded_matrix_is_refused_in_one_line(results):
    assert all("sharded over processes (FSDP)" in result["sharded"] for result in results)
