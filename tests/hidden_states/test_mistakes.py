"""What `attach` says of a loss that is forgotten, a second attachment, a removed one, and wrong arguments."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import istar
from istar.errors import UserError
from istar.hidden_states import EmbeddingPenalty, PenaltySettings, attach, attach_with_settings, shrinkage_covariance
from istar.regularizers import CosReg, IStar, Points, SetPoint
from tests.hidden_states.builders import INPUTS, SHAPE, UNLABELLED, bert, make_istar

FORGOTTEN = r"the penalties of two training passes in a row were not used.*attached\.loss\(\)"
TO_EMBEDDINGS = PenaltySettings(target="input_embeddings")


def train(model: nn.Module, num_passes: int) -> list[str]:
    """Run training passes without `loss()`, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_passes):
            model(**INPUTS).loss.backward()
    return [str(warning.message) for warning in caught]


# A forgotten loss ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [make_istar(), CosReg(1.0), IStar(1.0, zeta=0)])
def test_a_forgotten_loss_is_said_once_at_the_second_pass_that_was_not_used(penalty):
    model = bert()
    with attach(model, penalty):
        assert train(model, 2) == []
        with pytest.warns(UserWarning, match=FORGOTTEN) as caught:
            model(**INPUTS)
        assert len(caught) == 1
        assert "\n" not in str(caught[0].message)
        assert train(model, 4) == []


def test_a_used_loss_between_passes_that_are_not_used_says_nothing():
    model = bert()
    with attach(model, make_istar()) as attached:
        for _ in range(3):
            assert train(model, 2) == []
            attached.loss()


def test_passes_that_are_no_training_are_not_counted():
    model = bert()
    with attach(model, make_istar()) as attached:
        model.eval()
        assert train(model, 4) == []
        model.train()
        with torch.no_grad():
            for _ in range(4):
                model(**INPUTS)
        assert train(model, 1) == []
        attached.loss()
        attached.penalty.weight = 0.0
        assert train(model, 4) == []


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_whole_model_in_a_checkpoint_repeats_its_pass_and_says_nothing():
    model = bert()
    with attach(model, make_istar()) as attached:
        for _ in range(4):
            loss = checkpoint(lambda: model(**INPUTS).loss, use_reentrant=False)
            (loss + attached.loss()).backward()


@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_a_compiled_model_stays_one_graph_and_says_nothing():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    # Otherwise, the first pass sets the problem type, and the second one is compiled anew.
    model = bert(problem_type="single_label_classification")
    with attach(model, make_istar()):
        model.compile(backend=counter, fullgraph=True)
        for _ in range(4):
            assert train(model, 1) == []
    assert counter.frame_count == 1
    torch._dynamo.reset()


# A second attachment ------------------------------------------------------------------------------------------


def run_cell(model: nn.Module, **options: Any) -> Any:
    """Run the cell of a notebook: a new penalty of the same class on the same model."""
    penalty = make_istar(**options)
    return attach(model, penalty)


def test_a_second_attachment_replaces_the_first_with_one_line():
    model = bert()
    first = run_cell(model)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with pytest.warns(UserWarning, match="replaces") as caught:
        second = run_cell(model)
    [warning] = caught
    assert warning.filename == __file__
    assert str(warning.message) == f"{second} replaces {first}: the earlier penalty of these states is removed"
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    model(**INPUTS)
    second.loss()
    with pytest.raises(
        UserError, match=r"^HiddenStatePenalty\(.*\) was removed from its model; expected it to be attached again"
    ):
        first.loss()
    second.remove()


def test_an_attachment_without_a_name_is_replaced_too():
    """A cell that fails after `attach` leaves the hooks behind, and no variable."""
    model = bert()
    run_cell(model)
    gc.collect()
    with pytest.warns(UserWarning, match="replaces"):
        attached = run_cell(model)
    model(**INPUTS)
    attached.loss()


@pytest.mark.parametrize("wrap", [lambda model: nn.ModuleDict({"model": model}), lambda model: model.bert])
def test_a_model_is_known_within_another_module_and_without_its_head(wrap):
    model = bert()
    with attach(model, make_istar()), pytest.warns(UserWarning, match="replaces"):
        attach(wrap(model), make_istar()).remove()


@pytest.mark.parametrize(
    ("first", "second", "points"),
    [
        (make_istar([1]), make_istar([3]), Points()),
        (make_istar(), CosReg(1.0), Points()),
        (make_istar(), make_istar(), Points("last")),
        (make_istar(set_point=SetPoint(0.1, "below")), make_istar(set_point=SetPoint(0.4, "above")), Points()),
    ],
)
def test_penalties_of_other_classes_layers_points_or_set_points_add_up(first, second, points):
    model = bert()
    with attach(model, first) as first_watch, attach(model, second, points=points) as second_watch:
        model(**INPUTS)
        loss = first_watch.loss() + second_watch.loss()
    assert loss.requires_grad


def test_a_removed_penalty_and_other_models_are_not_replaced():
    model = bert()
    attach(model, make_istar()).remove()
    with attach(model, make_istar()) as attached, attach(bert(), make_istar()):
        copied_model = copy.deepcopy(model)
        with attach(copied_model, make_istar()) as of_copy:
            copied_model(**INPUTS)
            of_copy.loss()
        model(**INPUTS)
        attached.loss()


def test_a_copied_attachment_is_replaced_on_its_copied_model_only():
    model = bert()
    with attach(model, make_istar()) as attached:
        copied_model, copied = copy.deepcopy((model, attached))
        with pytest.warns(UserWarning, match="replaces"):
            attach(copied_model, make_istar())
        with pytest.raises(UserError, match="was removed from its model"):
            copied.loss()
        model(**INPUTS)
        attached.loss()


def test_a_model_with_an_attached_penalty_is_freed():
    model = bert()
    attach(model, make_istar())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


# A removed penalty --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [PenaltySettings(), TO_EMBEDDINGS])
@pytest.mark.parametrize("is_called", [False, True])
def test_the_loss_of_a_removed_penalty_is_refused(settings, is_called):
    model = bert()
    attached = attach_with_settings(model, CosReg(1.0), settings)
    if is_called:
        model(**INPUTS)
    attached.remove()
    with pytest.raises(UserError, match=r"was removed from its model; expected it to be attached again") as error:
        attached.loss()
    assert "\n" not in str(error.value)


def test_a_forgotten_refresh_names_the_call():
    model = bert()
    with attach(model, IStar(zeta=0.4)) as attached:
        with pytest.raises(UserError, match=r"zeta=0\.4 .*attached\.refresh\(loader\)") as error:
            model(**INPUTS)
        attached.refresh([UNLABELLED])
        model(**INPUTS)
        attached.loss()
    assert "\n" not in str(error.value)


# Wrong arguments ----------------------------------------------------------------------------------------------


def masked_bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SHAPE))


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: attach("bert", CosReg()), "model is 'bert'; expected a Module"),
    (lambda: attach(None, CosReg()), "model is None; expected a Module"),
    (lambda: attach(hf.BertModel, CosReg()), "model is <class 'transformers.models.bert"),
    (lambda: attach("bert", CosReg(), modules=["*"]), "model is 'bert'; expected a Module"),
    (lambda: attach(CosReg(), bert()), "penalty is BertForSequenceClassification( (bert): BertModel("),
    (lambda: attach(bert(), CosReg), "penalty is <class 'istar.regularizers.cosreg.CosReg'>; expected a Penalty"),
    (lambda: attach(bert(), -1.0), "penalty is -1.0; expected a Penalty"),
    (lambda: attach(bert(), CosReg(), points="last"), "points is 'last'; expected a Points"),
    (lambda: attach(bert(), CosReg(), Points("last")), "one of modules is Points(which='last'"),
    (lambda: attach(bert(), CosReg(), [3]), "one of modules is 3; expected a str, such as"),
    (
        lambda: attach_with_settings(bert(), CosReg(), {"schedule": "linear"}),
        "settings is {'sche",
    ),
    (lambda: EmbeddingPenalty("bert", CosReg(), TO_EMBEDDINGS), "model is 'bert'; expected a Module"),
    (lambda: EmbeddingPenalty(masked_bert(), 1.0, TO_EMBEDDINGS), "penalty is 1.0; expected a Penalty"),
    (lambda: EmbeddingPenalty(masked_bert(), CosReg(), None), "settings is None; expected a PenaltySettings"),
    (lambda: shrinkage_covariance("bert", [UNLABELLED]), "model is 'bert'; expected a Module"),
    (
        lambda: PenaltySettings(shedule="linear"),
        "PenaltySettings: got an unexpected keyword argument 'shedule'; did you",
    ),
    (lambda: PenaltySettings(schedule=None), "schedule=None is not known; "),
    (lambda: Points(wich="last"), "Points: got an unexpected keyword argument 'wich'; did you mean which?; exp"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_wrong_arguments_are_refused_in_one_line(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert "expected" in str(error.value)


def test_one_module_needs_no_list():
    model = bert()
    results = []
    for modules in (model.bert.encoder.layer[1], [model.bert.encoder.layer[1]]):
        with attach(model, CosReg(1.0, layers="all"), modules) as attached:
            torch.manual_seed(0)
            model(**INPUTS)
            results.append(attached.loss())
    assert_close(results[0], results[1], rtol=0, atol=0)


def test_the_class_for_isinstance_is_public():
    assert isinstance(CosReg(), istar.Penalty)
