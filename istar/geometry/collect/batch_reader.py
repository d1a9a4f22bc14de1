"""Reads the hidden states of any model on batches of the caller: images, sound, proteins, texts or anything else."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from istar.errors import UserError, check_one_of, shorten
from istar.geometry.collect.state_rows import Channels, Places, leave_out_first, to_places
from istar.hidden_states.call_arguments import map_tensors, read_argument_names
from istar.hidden_states.model_modes import eval_mode, uncompiled
from istar.hidden_states.offloading import find_input_device
from istar.hidden_states.reader import HiddenStateReader
from istar.measures.numerics import full_precision


class BatchReader:
    """Reads the hidden states of a model on batches of any modality.

    The states of a transformers model are `embeddings`, `layer_1` to `layer_L` before a final norm, and `final_norm`
    after it. They are found in a trial on the first batch. The states of any other model are the outputs of the given
    modules, under their names in the model.

    The model runs in eval mode, without gradients, autocast and compilation, on its own device and in its own dtype:
    tensors of a batch are moved, and not cast. At the end of the context, each module has its mode back, and no hook is
    left, also after an error.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    >>> with BatchReader(net, torch.ones(5, 4), modules=["0", "2"]) as reader:
    ...     states, token_ids = reader.read(torch.ones(5, 4))
    >>> {name: tuple(places.values.shape) for name, places in states.items()}
    {'0': (5, 1, 3), '2': (5, 1, 2)}

    Args:
        model: any module.
        first_batch: a batch as for `read`; `modules` makes it unnecessary to run the model on it.
        modules: as for `istar.measure`, like the other arguments.
        mask: which places count. For speech models it may be of samples, see `to_places`.
        channels: where the width of a state with four dimensions is.
        special_tokens: "exclude" leaves out places that are not content. Two passes on noise find those that do not
            depend on the input.

    Attributes:
        names: names of the states, from the input to the output, or in the order of `modules`.
        norm: the final norm of a transformers model, if it has one.
        device: device that the batches go to.

    Raises:
        UserError: if the states cannot be found: for a model without weights (on meta) or one that does not run on the
            batch, an encoder-decoder, several stacks, or modules that the model does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        first_batch: Any,
        *,
        modules: Sequence[str | nn.Module] | None = None,
        mask: str | Callable[[Any], Tensor] | None = None,
        channels: Channels | None = None,
        special_tokens: Literal["include", "exclude"] = "include",
    ) -> None:
        check_one_of("special_tokens", special_tokens, ("include", "exclude"))
        if channels is not None:
            check_one_of("channels", channels, ("first", "last"))
        self.model, self.special_tokens, self._mask, self._channels = model, special_tokens, mask, channels
        self._excludes_special = special_tokens == "exclude"
        self._num_constant_places: int | None = None
        self._widths: dict[str, int] = {}
        has_parameters = next(model.parameters(), None) is not None
        self.device = find_input_device(model) if has_parameters else torch.device("cpu")
        if self.device.type == "meta":
            raise UserError(f"{type(model).__name__} is on meta, without weights; expected a model that is loaded")
        self._arguments = inspect.signature(model.forward).parameters
        self._takes_use_cache = "use_cache" in read_argument_names(model)
        with ExitStack() as stack:
            stack.enter_context(eval_mode(model))
            call = None if modules is not None else lambda: self._call_model(model, first_batch)
            self._reader = HiddenStateReader(model, modules=modules, call=call)
            stack.callback(self._reader.remove)
            self.names, self.norm = self._reader.names, self._reader.norm
            self._config = getattr(self._reader.base_model, "config", None)
            if self._excludes_special and modules is None and not _has_key(first_batch, "special_tokens_mask"):
                self._num_constant_places = self._find_constant_places(first_batch)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, batch: Any) -> tuple[dict[str, Places], Tensor | None]:
        """Return the states of a batch by name, and its token ids.

        A mapping is passed to the model as keywords, a tuple or list as arguments, and anything else as the only one.

        Returns:
            The places `(batch, places, d)` of each state, on the state's device; and `input_ids` of the batch, if a
            state has their shape `(batch, places)`, otherwise None.

        Raises:
            UserError: if the model cannot be called with the batch, a module of the caller is not called once, a mask
                has another shape than a state, or a state is not floating or has another width than before.
        """
        return self.arrange(self.run(batch)[1], batch)

    @torch.inference_mode()
    def run(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """Run the model on a batch; return its output, and the states by name as the model computes them."""
        with uncompiled(), full_precision(self.device):
            return self._call_model(lambda *args, **kwargs: self._reader.call(self.model, *args, **kwargs), batch)

    def arrange(self, states: Mapping[str, Tensor], batch: Any) -> tuple[dict[str, Places], Tensor | None]:
        """Return what `read` returns from the states of a batch that `run` has returned."""
        mask = self._find_mask(batch)
        places = {name: to_places(name, state, mask, self._channels, self._config) for name, state in states.items()}
        for name, (values, _) in places.items():
            width = self._widths.setdefault(name, values.shape[-1])
            if values.shape[-1] != width:
                raise UserError(f"{name} has width {values.shape[-1]}; expected {width} as in earlier batches")
        shapes = {name: values.shape[:2] for name, (values, _) in places.items()}
        if self._num_constant_places:
            # Other states, as after a pooling, have other places.
            names = [name for name, shape in shapes.items() if shape == shapes[self.names[0]]]
            places |= {name: leave_out_first(places[name], self._num_constant_places) for name in names}
        token_ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        return places, token_ids if token_ids is not None and token_ids.shape in shapes.values() else None

    def _call_model(self, call: Callable[..., Any], batch: Any) -> Any:
        args, kwargs = self._split_batch(map_tensors(batch, lambda values: values.to(self.device)))
        try:
            return call(*args, **kwargs)
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the types depend on the model
            names = [name for name in kwargs if name != "use_cache"]
            shown = ", ".join([*(f"a {type(value).__name__}" for value in args), *(f"{name}=" for name in names)])
            advice = "what its forward takes: leave out labels and other values"
            if any(isinstance(kwargs[name], list) for name in names):
                advice = 'tensors, as with return_tensors="pt"'
            raise UserError(
                f"{type(self.model).__name__} cannot be called with ({shown}): {shorten(error)}; expected batches of "
                + advice
            ) from error

    def _split_batch(self, batch: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return a batch as arguments and keywords of the model."""
        options = {"use_cache": False} if self._takes_use_cache else {}
        if not isinstance(batch, Mapping):
            return batch if isinstance(batch, list | tuple) else (batch,), options
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._arguments.values())
        # These are about the places. The model takes the mask if it can.
        left_out = {"special_tokens_mask"}
        if isinstance(self._mask, str) and not takes_any and self._mask not in self._arguments:
            left_out.add(self._mask)
        return (), options | {key: value for key, value in batch.items() if key not in left_out}

    def _find_mask(self, batch: Any) -> Tensor | None:
        """Return which places of a batch count, `(batch, places)`, apart from those that do not depend on the input."""
        key = self._mask if isinstance(self._mask, str) else "attention_mask"
        if isinstance(self._mask, str) and not _has_key(batch, key):
            raise UserError(f"the batch has no key {key}; expected mask= with a key of the batch, or a function")
        mask = None
        if callable(self._mask):
            given_mask = self._mask(batch)
            if given_mask is None:
                raise UserError("the function mask= returned None; expected which places count, (batch, places)")
            mask = _to_bool(given_mask)
        elif _has_key(batch, key):
            mask = _to_bool(batch[key])
        if self._excludes_special and self._num_constant_places is None:
            if not _has_key(batch, "special_tokens_mask"):
                raise UserError(
                    'the batch has no special_tokens_mask, which special_tokens="exclude" needs; expected a tokenizer '
                    "that was called with return_special_tokens_mask=True"
                )
            is_content = ~_to_bool(batch["special_tokens_mask"])
            mask = is_content if mask is None else mask
            if mask.shape != is_content.shape:
                raise UserError(
                    f"special_tokens_mask has shape {tuple(is_content.shape)}; expected {tuple(mask.shape)} as the mask"
                )
            mask = mask & is_content.to(mask.device)
        if mask is not None and mask.dim() != 2:
            raise UserError(f"the mask has shape {tuple(mask.shape)}; expected (batch, places): mask= a function")
        return mask

    def _find_constant_places(self, batch: Any) -> int | None:
        """Return how many first places of the first state do not depend on the input; None for texts."""
        if _has_key(batch, "input_ids"):
            return None
        generator = torch.Generator().manual_seed(0)

        def make_noise(values: Tensor) -> Tensor:
            noise = torch.randn(values.shape, generator=generator, device="cpu").to(values)
            return noise if values.is_floating_point() else values

        first, second = (self.run(map_tensors(batch, make_noise))[1][self.names[0]] for _ in range(2))
        if torch.equal(first, second):
            raise UserError(
                f"{self.names[0]} does not depend on the floating inputs of {type(self.model).__name__}, so that its "
                'special places are unknown; expected special_tokens="include"'
            )
        if first.dim() != 3:
            return 0
        are_equal = (first == second).all(-1).all(0)
        return int(are_equal.int().cumprod(0).sum())


def _has_key(batch: Any, key: str) -> bool:
    return isinstance(batch, Mapping) and key in batch


def _to_bool(values: Any) -> Tensor:
    # With a default device, `as_tensor` would also move tensors.
    return (values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")).bool()
