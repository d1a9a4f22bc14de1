"""The shrinkage covariance Sigma_S, the covariance of a model's hidden states over part of the training data."""

import functools
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from istar.errors import UserError
from istar.hidden_states.attached_penalty import NUM_POINTS
from istar.hidden_states.call_arguments import Arguments, map_tensors
from istar.hidden_states.model_modes import eval_mode, preserve_rng_states
from istar.hidden_states.reader import HiddenStateReader
from istar.hidden_states.sharding import is_sharded_module
from istar.measures.accumulator import sum_over_processes, world_size
from istar.measures.isoscores import check_covariance
from istar.measures.layer_sums import LayerSums, count_points
from istar.measures.moments import Moments
from istar.regularizers.points import ALL_POINTS, Layers, Points, check_same_width

LABEL_NAMES = ("labels", "label", "label_ids", "start_positions", "end_positions")
"""Names of model arguments for labels."""
PACKING_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Names of arguments for packed documents, which models of transformers take without declaring them."""

Signatures = Mapping[nn.Module, inspect.Signature]
"""Signatures of the modules that may be called."""


def shrinkage_covariance(
    model: nn.Module,
    loader: Iterable[Any],
    num_points: int | None = NUM_POINTS,
    layers: Layers = "all",
    include_padding: bool = False,
    sync: bool = True,
    group: dist.ProcessGroup | None = None,
    modules: Sequence[str | nn.Module] | None = None,
    points: Points = ALL_POINTS,
) -> Tensor:
    """Compute the covariance of a model's hidden states over batches of data, for `IStar.shrinkage_covariance`.

    See Section 3 of *Stable Anisotropic Regularization*. The model runs in eval mode without gradients, in the
    precision of the surrounding `torch.autocast`, if any. Afterwards, its training mode and the states of all random
    number generators are restored. The points are streamed, so that memory is O(d^2).

    Args:
        model: see `istar.attach`.
        loader: batches in random order: mappings of argument names of the model, or tensors of token ids. Labels are
            ignored, unless the points depend on them. Names that the model does not know are ignored as in training if
            there is an `attention_mask`; without one they are refused, because one of them may be the mask. A decoder
            that attends to an encoder needs `encoder_hidden_states`. With `modules`, also sequences of the model's
            arguments.
        num_points: number of points (tokens x selected layers, of all processes) to use. None, or a number above the
            available points, uses all batches.
        layers: see `istar.regularizers.points.select_layers`.
        include_padding: count padding tokens as points.
        sync: compute one matrix from the points of all processes, instead of one per process.
        group: process group for `sync`; None is the default group.
        modules: see `istar.attach`.
        points: which tokens are points; by default all that are not padding. If they depend on the labels, the model
            runs with its head.

    Returns:
        `(d, d)`, float32 on the model's device.

    Raises:
        UserError: for fewer than 2 points, points that are not finite or all equal, layers of different widths, or
            a loader or batches that do not fit the model.
    """
    return to_covariance(
        hidden_state_moments(model, loader, num_points, layers, include_padding, sync, group, modules, points)
    )


def to_covariance(moments: Moments) -> Tensor:
    """Return the covariance of the moments, float32.

    Raises:
        UserError: if it is zero or not finite.
    """
    covariance = moments.covariance()
    check_covariance(covariance, "the shrinkage covariance")
    return covariance.float()


def hidden_state_moments(
    model: nn.Module,
    loader: Iterable[Any],
    num_points: int | None,
    layers: Layers,
    include_padding: bool,
    sync: bool,
    group: dist.ProcessGroup | None,
    modules: Sequence[str | nn.Module] | None,
    points: Points,
) -> Moments:
    """Compute the moments of a model's points in batches of data. The arguments are as in `shrinkage_covariance`.

    With `sync`, all processes run the same number of forward passes, as sharded models require: after its last batch, a
    process repeats this batch without counting it again.
    """
    if num_points is not None and num_points < 2:
        raise UserError(f"num_points is {num_points}; expected at least 2")
    # Datasets may have `__getitem__` alone.
    if isinstance(loader, Mapping) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise UserError(
            f"the loader for the shrinkage covariance is a {type(loader).__name__}; expected an iterable of batches, "
            "such as a DataLoader or a list of batches"
        )
    points.check_include_padding(include_padding)
    reader = HiddenStateReader(
        model,
        layers,
        lambda states, tokens: [(state, tokens.indices_of(state)) for state in states],
        lambda: True,
        modules=modules,
        points=points,
        include_padding=include_padding,
    )
    device = next(model.parameters()).device
    called_module = _choose_module_to_call(model, reader.head_model if points.need_labels else reader.base_model)
    signatures = {
        part: inspect.signature(part.forward) for part in (called_module, reader.base_model, reader.head_model)
    }
    ignored_names = () if points.need_labels else LABEL_NAMES
    has_other_processes = sync and world_size(group) > 1
    # By the widths of the layers: the modules of a user may be called more often in one pass than in another.
    sums: dict[tuple[int, ...], LayerSums] = {}
    num_points_so_far = 0
    inputs: Any = None

    def has_enough(has_batch: bool) -> bool:
        """Return whether no process has a batch, or all processes together have enough points."""
        totals = [num_points_so_far, int(has_batch)]
        if has_other_processes:
            totals = sum_over_processes(torch.tensor(totals, device=device), group).tolist()
        return totals[1] == 0 or (num_points is not None and totals[0] >= num_points)

    try:
        with preserve_rng_states(device), eval_mode(model), torch.no_grad():
            # A DataLoader draws a random number when its iterator is created, so this is inside the context.
            batches = itertools.chain(loader, itertools.repeat(None))
            for batch in itertools.takewhile(lambda batch: not has_enough(batch is not None), batches):
                # Without a batch, this process repeats its previous inputs, for as long as another one has batches.
                inputs = inputs if batch is None else _prepare_inputs(batch, device, ignored_names)
                if inputs is None:
                    continue
                _call_module(called_module, inputs, reader if modules is None else None, signatures)
                layers = reader.take()
                num_points_in_batch = 0 if batch is None else sum(count_points(layers))
                if num_points_in_batch:
                    widths = tuple(state.shape[-1] for state, _ in layers)
                    check_same_width(widths)
                    if widths not in sums:
                        sums[widths] = LayerSums(layers)
                    sums[widths].add(layers)
                    num_points_so_far += num_points_in_batch
                del layers  # Otherwise, the states of two batches would be in memory.
    finally:
        reader.remove()
    # Without data, the result is empty. A process without data needs the width of the others for the all-reduce.
    width = torch.tensor(max((widths[0] for widths in sums), default=1), device=device)
    if has_other_processes:
        dist.all_reduce(width, dist.ReduceOp.MAX, group=group)
    all_moments = (layer_sums.moments() for layer_sums in sums.values())
    moments = functools.reduce(Moments.merge, all_moments, Moments(int(width), device))
    return moments.all_reduce(group) if has_other_processes else moments


def _choose_module_to_call(model: nn.Module, module: nn.Module) -> nn.Module:
    """Return the module to call for the hidden states: `module`, a part of the model, or if necessary the whole model.

    With FSDP2, only the root module gathers the parameters. With prompt learning (PEFT), the outer model adds the
    prompt.
    """
    is_prompt_learning = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    return model if is_sharded_module(model) or is_prompt_learning else module


def _prepare_inputs(batch: Any, device: torch.device, ignored_names: Sequence[str]) -> Any:
    if isinstance(batch, Mapping):
        batch = {name: value for name, value in batch.items() if name not in ignored_names}
    # The host does not wait for a GPU. CUDA reads memory that is not pinned before `to` returns.
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


def _call_module(module: nn.Module, inputs: Any, reader: HiddenStateReader | None, signatures: Signatures) -> None:
    """Call a module with a batch; `reader` reads a transformers model, and is None for other models."""
    named = inputs if isinstance(inputs, Mapping) else {}
    unnamed = inputs if isinstance(inputs, list | tuple) else [] if inputs is named else [inputs]
    fault = "" if reader is None else _find_fault(module, named, unnamed, reader, signatures)
    if reader is not None:
        reader.batch = named
    if reader is not None and module is reader.base_model:
        ids = unnamed[0] if unnamed else named.get("input_ids")
        # The heads for multiple choice flatten ids of shape (batch, choices, tokens).
        if isinstance(ids, Tensor) and ids.dim() == 3 and not ids.is_floating_point():
            module = reader.head_model
    signature = signatures[module]
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if reader is not None and inspect.Parameter.VAR_KEYWORD not in kinds:
        named = {name: value for name, value in named.items() if name in signature.parameters}
    try:
        signature.bind(*unnamed, **named)
    except TypeError:
        fault = fault or (f"the names {', '.join(named)}" if named else f"{len(unnamed)} values without names")
    if fault:
        raise UserError(
            f"a batch for the shrinkage covariance has {fault}; expected arguments of {type(module).__name__} by "
            'name, such as {"input_ids": ids, "attention_mask": mask} of shape (batch, tokens). If a trainer has other '
            "batches, set penalty.shrinkage_covariance = istar.shrinkage_covariance(model, batches) before, and "
            "refresh=False"
        )
    module(*unnamed, **named)


def _find_fault(
    module: nn.Module, named: Arguments, unnamed: Sequence[Any], reader: HiddenStateReader, signatures: Signatures
) -> str:
    base_model: Any = reader.base_model
    parts = (base_model, reader.head_model)
    # The order of arguments differs between models: labels could become token types.
    if len(unnamed) > 1:
        return f"{len(unnamed)} values without names"
    if base_model.main_input_name != "input_ids":
        return ""
    # Most models ignore unknown names, as training does. Without a mask, one of the names may be the mask.
    known = {name for signature in signatures.values() for name in signature.parameters}
    unknown = [name for name in named if name not in known and name not in PACKING_NAMES]
    if unknown and "attention_mask" not in named:
        return f"the unknown names {', '.join(unknown)} and no attention_mask"
    # A module around the model, called for FSDP2 or prompt learning, may have other arguments.
    if module not in parts:
        return ""
    ids = unnamed[0] if unnamed else named.get("input_ids")
    if ids is None and named.get("inputs_embeds") is None:
        return "no input_ids"
    if ids is not None and not isinstance(ids, Tensor):
        return f"input_ids of type {type(ids).__name__}"
    if ids is not None and ids.dim() != 2 and (ids.dim() != 3 or base_model is reader.head_model):
        return f"input_ids of shape {tuple(ids.shape)}"
    if named.get("encoder_hidden_states") is None and "encoder_hidden_states" in signatures[base_model].parameters:
        # The two stacks of T5 have one class, with an attribute `is_decoder`.
        is_second_stack = base_model.config.is_encoder_decoder and getattr(base_model, "is_decoder", True)
        if is_second_stack or getattr(base_model.config, "add_cross_attention", False):
            name = type(base_model).__name__
            return f"no encoder_hidden_states, such as model.get_encoder()(source_ids)[0], to which {name} attends"
    return ""
