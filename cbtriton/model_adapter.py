"""Everything the engine needs from a transformers model, and everything it changes on one.

While attached, the model runs on the engine's attention function, in eval mode, and on a CPU with packed linear
layers; detaching puts back what was there, whatever happened in between. No weight and no configuration of the
caller's is changed otherwise.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from cbtriton.attention import HARMLESS_ARGUMENTS, AttentionCall
from cbtriton.cache_layout import CachedLayer
from cbtriton.kv_cache import LayerGeometry
from cbtriton.own_attention import OwnAttention
from cbtriton.own_cache import OwnCacheLayout, cached_logits, try_own_cache
from cbtriton.packed_linear import LinearGroup, PackedLinears, record_linear_groups
from cbtriton.positions import PositionEmbeddings, position_offset
from cbtriton.recurrent import MixerRecorder, RecurrentLayout
from cbtriton.rope import SwitchedRope

_logger = logging.getLogger(__name__)

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"})
# Layers of these types keep nothing of earlier tokens.
_OTHER_LAYER_TYPES = frozenset({"moe", "mlp"})
UNDERSTOOD_ARGUMENTS = (
    frozenset({"scaling", "sliding_window", "attention_chunk", "softcap", "s_aux", "alibi_slopes"}) | HARMLESS_ARGUMENTS
)
# Must not contain "flash" nor begin with "paged|": transformers gives those names a meaning.
_NAME_PREFIX = "cbtriton_"
# The dry run only has to be long enough for shapes to be told apart.
_DRY_RUN_TOKENS = 3
_MORE_DRY_RUN_TOKENS = 16
# What a model without attention keeps of its last token: pages count the tokens of all models.
_PLACEHOLDER = LayerGeometry(num_kv_heads=1, key_dim=1, value_dim=1, dtype=torch.uint8)
# Largest difference that rounding explains, relative to the largest number.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Two adapters may be made at a time.
_RESERVING = Lock()


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """What the model's attention calls look like, recorded in a dry run.

    Attributes:
        calls: Static properties of each attention call, in call order.
        geometries: Shape of the keys and values of each call that owns them, in call order.
        modules: The attention module of each call, in call order.
        activation_bytes_per_token: Bytes that each further token adds to what the pass held at a time.
        recurrent: The recurrent layers.
        own_cache: How the model runs on transformers' own cache; None where its attention is paged.
        embedding_size: Size of the vectors that the model takes in place of tokens; None where it takes none.
    """

    calls: tuple[AttentionCall, ...]
    geometries: tuple[LayerGeometry, ...]
    modules: tuple[nn.Module, ...]
    activation_bytes_per_token: int
    recurrent: RecurrentLayout = field(default_factory=RecurrentLayout)
    own_cache: OwnCacheLayout | None = None
    embedding_size: int | None = None

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes that a request keeps beside the pages, and that do not grow."""
        return self.recurrent.state_bytes if self.own_cache is None else self.own_cache.bytes_per_request

    @property
    def state_bytes_per_token(self) -> int:
        """Bytes that each of its tokens adds to them."""
        return 0 if self.own_cache is None else self.own_cache.bytes_per_token

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """What each of the calls that own keys and values keeps of a token; without any, a placeholder's."""
        if not self.calls:
            # The placeholder's pages bound the tokens of a cache that grows, and come and go beside one that does not.
            window = 1 if self.own_cache is None else 0
            return tuple(geometry.cached_layer(window) for geometry in self.geometries)
        windows: dict[int, list[int]] = {}
        for call in self.calls:
            windows.setdefault(call.owner, []).append(call.most_seen)
        # What several calls read stays as long as the one that sees furthest needs it.
        kept = (max(seen) if all(seen) else 0 for _, seen in sorted(windows.items()))
        return tuple(geometry.cached_layer(window) for geometry, window in zip(self.geometries, kept, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Belongings:
    """The modules of a model, and everything that hangs on them; tensors stand for where they lie.

    Equal ones mean that a captured step finds everything where it was. New values in the old places change nothing.
    """

    parts: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Belongings:
        """Those of the model as it is now."""
        parts: list[object] = []
        for module in model.modules():
            parts.append(module)
            for value in vars(module).values():
                # Parameters, buffers, submodules and hooks are kept in dictionaries.
                parts += value.values() if isinstance(value, dict) else [value]
        return cls(tuple(_Location.of(part) if isinstance(part, Tensor) else part for part in parts))

    def __eq__(self, other: object) -> bool:
        # By identity: nobody knows how the things that people hang on modules compare.
        return (
            isinstance(other, Belongings)
            and len(self.parts) == len(other.parts)
            and all(
                mine is theirs or (isinstance(mine, _Location) and mine == theirs)
                for mine, theirs in zip(self.parts, other.parts, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a tensor lies, and what is needed to read it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Location:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class UnsupportedModelError(ValueError):
    """The model cannot run packed and paged; the message names the reason."""


class ModelAdapter:
    """Attaches to one model at a time and runs its forward pass on packed tokens.

    Args:
        model: A transformers causal language model.
        packed_weights_limit_bytes: Packed copies of linear layers may take this much memory on a CPU.
    """

    def __init__(self, model: Any, packed_weights_limit_bytes: int) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.text_config = model.config.get_text_config()
        self._name = _reserve_name(self)
        self._limit = packed_weights_limit_bytes
        self._linear_groups: list[LinearGroup] = []
        self._packed: PackedLinears | None = None
        self._undo: list[Callable[[], None]] = []
        self._weights_seen: tuple[tuple[int, int], ...] = ()
        parameters = inspect.signature(model.forward).parameters
        # Models that pass on what they do not know may have a part that takes it.
        passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        self._takes_position_ids = passes_on or "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._position_offset = 0
        self._position_embeddings = PositionEmbeddings(model)
        self._rope = SwitchedRope(model)
        self._own_attention = OwnAttention(model)
        self._is_paged = True
        _refuse_encoder_decoders(model)

    # ---------------------------------------------------------------------------------------------- facts

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embedding: every valid token id is below this."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def vocab_size(self) -> int:
        """Size of the output distribution."""
        head = self.model.get_output_embeddings()
        return self.num_embeddings if head is None else head.weight.shape[0]

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model's positions allow, if it says so."""
        if not self._is_paged and self._rope.switch_length is not None:
            # A cache of transformers holds what was computed when the sequence was shorter.
            return self._rope.switch_length
        positions = getattr(self.text_config, "max_position_embeddings", None)
        return None if positions is None else positions - self._position_offset

    @property
    def rope_switch_length(self) -> int | None:
        """Sequences with more tokens than this have other rotary frequencies; None where none gets there."""
        return self._rope.switch_length if self._is_paged else None

    @property
    def pad_token_id(self) -> int | None:
        """The token for padding, if the model has one."""
        return getattr(self.text_config, "pad_token_id", None)

    @property
    def rounding(self) -> float:
        """How far results in the model's dtype may be apart for rounding, relative to the largest number."""
        return _ROUNDING.get(self.dtype, 8e-2)

    @property
    def is_attached(self) -> bool:
        """Whether the model runs on an engine's attention now."""
        return bool(self._undo)

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed copies of linear layers."""
        return 0 if self._packed is None else self._packed.packed_bytes

    # ------------------------------------------------------------------------------------- attach and detach

    def attach(self, attention: Callable[..., tuple[Tensor, None]]) -> None:
        """Puts the model on `attention`, if it is paged, in eval mode, with packed linear layers where they pay.

        Raises:
            RuntimeError: It is attached already.
        """
        if self._undo:
            raise RuntimeError("the model adapter is already attached; detach it first")
        try:
            if self._is_paged:
                self._switch_attention(attention)
                self._position_embeddings.attach()
                self._undo.append(self._position_embeddings.detach)
                self._rope.attach()
                self._undo.append(self._rope.detach)
            self._undo.append(_eval_mode(self.model))
            if self.device.type == "cpu":
                if self._packed is None:
                    self._packed = PackedLinears(self.model, memory_limit_bytes=self._limit, groups=self._linear_groups)
                self._packed.install()
                self._undo.append(self._packed.uninstall)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Puts back what `attach` changed; harmless when nothing is attached."""
        while self._undo:
            self._undo.pop()()

    def _switch_attention(self, attention: Callable[..., tuple[Tensor, None]]) -> None:
        from transformers import AttentionInterface

        configs = _configs_of(self.model)
        if any(str(config._attn_implementation_internal).startswith(_NAME_PREFIX) for config in configs):
            raise RuntimeError("the model is in use by another continuous batching manager; stop that one first")
        AttentionInterface.register(self._name, attention)
        self._undo.append(lambda: AttentionInterface.register(self._name, _detached))
        for config in configs:
            # The property would also overwrite what sub-configurations are set to.
            original = config._attn_implementation_internal
            config._attn_implementation_internal = self._name
            self._undo.append(lambda config=config, original=original: _set_attention(config, original))
        self._own_attention.attach(attention)
        self._undo.append(self._own_attention.detach)

    def weights_changed(self) -> bool:
        """Whether any weight is known to differ from what it was at the last call; changes of `Tensor.data` are not."""
        seen = tuple(
            (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
            for weight in map(_here, self.model.parameters())
        )
        changed = bool(self._weights_seen) and seen != self._weights_seen
        self._weights_seen = seen
        return changed

    def belongings(self) -> Belongings:
        """What the model is made of now."""
        return Belongings.of(self.model)

    # ------------------------------------------------------------------------------------------ forward passes

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logit_indices: Tensor,
        embeds: Sequence[tuple[int, Tensor]] = (),
        is_long: Tensor | None = None,
    ) -> Tensor:
        """Runs packed tokens through the model.

        Args:
            input_ids: `[num_tokens]` int64.
            position_ids: `[num_tokens]` int64.
            logit_indices: `[num_samples]` int64, tokens whose logits are wanted.
            embeds: Tokens, each by the first of some, that the model gets as vectors, `[some, embedding_size]`.
            is_long: `[num_tokens]` bool, whether their sequences are longer than `rope_switch_length`; None where that
                is None.

        Returns:
            `[num_samples, vocab_size]` in the model's dtype.
        """
        arguments: dict[str, Any] = {"use_cache": False}
        if embeds:
            vectors = self.model.get_input_embeddings()(input_ids)
            for begin, values in embeds:
                vectors[begin : begin + len(values)] = values
            arguments["inputs_embeds"] = vectors.unsqueeze(0)
        else:
            arguments["input_ids"] = input_ids.unsqueeze(0)
        if self._takes_position_ids:
            offset = self._position_offset
            arguments["position_ids"] = (position_ids + offset if offset else position_ids).unsqueeze(0)
        arguments |= self._own_attention.arguments(self.device)
        with self._position_embeddings.at(position_ids), self._rope.at(is_long):
            if self._takes_logits_to_keep:
                # Only these rows reach the head: logits of a whole prefill would dwarf everything else.
                return self.model(**arguments, logits_to_keep=logit_indices).logits[0]
            return self.model(**arguments).logits[0].index_select(0, logit_indices)

    @torch.no_grad()
    def plain_logits(self, token_ids: list[int]) -> Tensor:
        """Logits of one sequence through the unattached model, `[num_tokens, vocab_size]` float32."""
        restore = _eval_mode(self.model)
        try:
            input_ids = torch.tensor([token_ids], device=self.device)
            return self.model(input_ids=input_ids, use_cache=False).logits[0].float()
        finally:
            restore()

    @torch.no_grad()
    def expected_logits(self, token_ids: list[int], ends: Sequence[int], recurrent: RecurrentLayout) -> Tensor:
        """Logits `[num_tokens, vocab_size]` float32 that a sequence in pieces should have; the model is not attached.

        Those of a plain pass; but where recurrent layers do something else with a single token than with several, those
        of the model's own cache.

        Args:
            token_ids: The sequence.
            ends: Behind which tokens pieces end.
            recurrent: The recurrent layers.
        """
        if not recurrent.has_other_singles:
            return self.plain_logits(token_ids)
        restore = _eval_mode(self.model)
        try:
            return cached_logits(self.model, token_ids, ends)
        finally:
            restore()

    def inspect_layout(self) -> ModelLayout:
        """Finds out how the model can run, by running it.

        Models that cannot be paged run on transformers' own cache, after a warning that says why, where that gives what
        their plain pass gives.

        Raises:
            UnsupportedModelError: The model can be run in neither way.
        """
        try:
            _refuse_layer_types(self.model)
            return self._inspect_paged()
        except UnsupportedModelError as reason:
            return self.own_cache_layout(reason)

    @torch.no_grad()
    def own_cache_layout(self, reason: UnsupportedModelError) -> ModelLayout:
        """How the model runs on transformers' own cache, since it cannot be paged for this reason.

        Raises:
            UnsupportedModelError: That does not give what its plain pass gives; it is the reason itself.
        """
        restore = _eval_mode(self.model)
        try:
            own_cache = try_own_cache(self.model, self.plain_logits, self.rounding)
        finally:
            restore()
        if own_cache is None:
            raise UnsupportedModelError(
                f"{reason}; nor does its own cache give what it gives without one, so use model.generate for it"
            ) from reason
        _logger.warning(
            "running on transformers' own cache, one sequence of a step after the other, and without prefix cache, "
            "compiling and graphs: %s",
            reason,
        )
        self._is_paged = False
        few, more = (self._held_by_plain_pass(_DRY_RUN_TOKENS + number) for number in (0, _MORE_DRY_RUN_TOKENS))
        return ModelLayout((), (_PLACEHOLDER,), (), _bytes_per_token(few, more), own_cache=own_cache)

    def _held_by_plain_pass(self, num_tokens: int) -> int:
        with _HeldBytes() as held:
            self.model(input_ids=torch.zeros((1, num_tokens), dtype=torch.int64, device=self.device), use_cache=False)
        return held.peak

    @torch.no_grad()
    def _inspect_paged(self) -> ModelLayout:
        """Runs the model with a recording attention function, and again with more tokens to see what these take.

        Raises:
            UnsupportedModelError: The model does not route its attention through transformers' interface, or asks
                for something that the kernels do not do.
        """
        recorder, mixers = _Recorder(), MixerRecorder(self.rounding)
        self._undo.append(_eval_mode(self.model))
        try:
            self._switch_attention(recorder.forward)
            recording = record_linear_groups(self.model)
            with recording as self._linear_groups, recorder.masks_under(self._name), mixers.watch(self.model):
                self._dry_run(_DRY_RUN_TOKENS)
            recorder.stop()
            recurrent = self._inspect_recurrent(mixers, recorder.modules)
            # Before any pass without masks: code of a model's own may fail there.
            if not recorder.calls and not recurrent.mixers:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} does not call transformers' attention interface, so its attention "
                    "cannot be paged"
                )
            if self._takes_position_ids:
                self._position_offset = position_offset(self.model, self._own_attention.arguments(self.device))
            few, more = (self._dry_run(_DRY_RUN_TOKENS + number) for number in (0, _MORE_DRY_RUN_TOKENS))
            embedding_size = self._find_embedding_size()
        finally:
            self.detach()
        _check_windows(self.text_config, recorder.calls)
        return ModelLayout(
            tuple(recorder.calls),
            tuple(recorder.geometries) or (_PLACEHOLDER,),
            tuple(recorder.modules),
            activation_bytes_per_token=_bytes_per_token(few, more),
            recurrent=recurrent,
            embedding_size=embedding_size,
        )

    def _find_embedding_size(self) -> int | None:
        """That of the vectors which the model takes in place of tokens, if it does with them what it does with tokens.

        Some models look at the tokens once more, in layers or for positions.
        """
        if "inputs_embeds" not in inspect.signature(self.model.forward).parameters:
            return None
        positions = torch.arange(_DRY_RUN_TOKENS, device=self.device)
        # No two alike, and none that a model might take for padding.
        tokens = (positions + 5) % self.num_embeddings
        vectors = self.model.get_input_embeddings()(tokens)
        try:
            expected = self.forward(tokens, positions, positions)
            # Other tokens: whoever looks at them gives something else.
            actual = self.forward(tokens.flip(0), positions, positions, [(0, vectors)])
        except Exception:  # Whatever it is: the model does not run like this.
            _logger.debug("%s takes no vectors", type(self.model).__name__, exc_info=True)
            return None
        same = (actual - expected).abs().max() <= self.rounding * expected.abs().max()
        return vectors.shape[-1] if same else None

    def _inspect_recurrent(self, recorder: MixerRecorder, attention_modules: Sequence[nn.Module]) -> RecurrentLayout:
        layout = recorder.layout(self.model, attention_modules)
        expected = RECURRENT_LAYER_TYPES & set(getattr(self.text_config, "layer_types", None) or ())
        if expected and not layout.mixers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has layers of type {', '.join(sorted(expected))}, but none that keeps "
                "its state in a cache of transformers"
            )
        return layout

    def _dry_run(self, num_tokens: int) -> int:
        """Runs the model on so many tokens; returns the most bytes of tensors that it made and held at a time."""
        positions = torch.arange(num_tokens, device=self.device)
        with _HeldBytes() as held:
            # No row samples: logits do not grow with the tokens, and would hide what does.
            self.forward(torch.zeros_like(positions), positions, positions[:0])
        return held.peak

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's parameters and buffers, each once."""
        storages = {
            _address(tensor): _here(tensor).untyped_storage().nbytes()
            for tensor in (*self.model.parameters(), *self.model.buffers())
        }
        return sum(storages.values())

    def repeated_layers(self, layout: ModelLayout) -> tuple[nn.Module, ...]:
        """The decoder layers, where the model is a list of them and each attends once; else nothing.

        They can be compiled one by one: what a layer needs hangs on its modules.
        """
        if len(set(layout.modules)) < len(layout.modules):
            return ()
        owners: dict[nn.Module, nn.Module] = {}
        for parent in self.model.modules():
            if isinstance(parent, nn.ModuleList):
                for layer in parent:
                    # The outermost list has the first word.
                    for module in layer.modules():
                        owners.setdefault(module, layer)
        if any(module not in owners for module in layout.modules):
            return ()
        return tuple(dict.fromkeys(owners[module] for module in layout.modules))


class _HeldBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make within the context and that are still held, and their peak.

    What an operator needs for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._num_tensors: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_address(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, is_new=_address(tensor) not in given)
        return result

    def _note(self, tensor: Tensor, is_new: bool) -> None:
        address = _address(tensor)
        # Views are counted as long as what they show was made here.
        if not is_new and address not in self._num_tensors:
            return
        num_bytes = _here(tensor).untyped_storage().nbytes()
        if self._num_tensors[address] == 0:
            self._now += num_bytes
            self.peak = max(self.peak, self._now)
        self._num_tensors[address] += 1
        weakref.finalize(tensor, self._forget, address, num_bytes)

    def _forget(self, address: int, num_bytes: int) -> None:
        self._num_tensors[address] -= 1
        if self._num_tensors[address] == 0:
            del self._num_tensors[address]
            self._now -= num_bytes


def _address(tensor: Tensor) -> int:
    return _here(tensor).untyped_storage().data_ptr()


def _here(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that several processes share, or are about to."""
    while is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, names[0])
    return tensor


class _Recorder:
    """An attention function that notes what it is asked and returns zeros."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.modules: list[nn.Module] = []
        self.geometries: list[LayerGeometry] = []
        # Kept, so that no later tensor can be taken for one of them.
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._masks: list[tuple[Tensor, dict[str, int]]] = []
        self._is_recording = True

    def stop(self) -> None:
        """From now on it holds nothing and only returns zeros."""
        self._is_recording = False
        self._kept.clear()
        self._masks.clear()

    @contextmanager
    def masks_under(self, name: str) -> Iterator[None]:
        """Lets the model make masks within the context, and notes the window or the chunk of each."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

        def mask(*args: Any, **kwargs: Any) -> Tensor | None:
            made = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))
            if made is not None:
                self._masks.append((made, _seen_by(kwargs.get("mask_function"), kwargs.get("local_size") or 0)))
            return made

        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
        try:
            yield
        finally:
            # Where there is none under the name, no step makes masks.
            del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]

    def forward(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if self._is_recording:
            self._record(module, query, key, value, kwargs | self._window_of(attention_mask))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _window_of(self, attention_mask: Tensor | None) -> dict[str, int]:
        """That of the mask, where it is one: plain models see what their mask shows, whatever else they are told."""
        return next((seen for mask, seen in self._masks if mask is attention_mask), {})

    def _record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: Mapping[str, Any]) -> None:
        name = type(module).__name__
        unknown = {key for key, value in kwargs.items() if value is not None} - UNDERSTOOD_ARGUMENTS
        if unknown:
            raise UnsupportedModelError(f"{name} passes {sorted(unknown)} to its attention, which is not supported")
        if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
            raise UnsupportedModelError(f"{name} is not causal; only causal attention can be continued token by token")
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise UnsupportedModelError(
                f"{name} attends from {tuple(query.shape)} to {tuple(key.shape)}, which is not self-attention over "
                "one packed sequence"
            )
        owner = self._owner(key, value)
        window, chunk = kwargs.get("sliding_window") or 0, kwargs.get("attention_chunk") or 0
        if owner == len(self.calls):
            self.geometries.append(LayerGeometry(key.shape[1], key.shape[3], value.shape[3], key.dtype))
        self.calls.append(AttentionCall(window, chunk, kwargs.get("softcap") or 0.0, owner))
        self.modules.append(module)
        self._kept.append((key, value))

    def _owner(self, key: Tensor, value: Tensor) -> int:
        """The first call with the same keys and values: some models let layers attend to those of an earlier one."""
        for number, (other_key, other_value) in enumerate(self._kept):
            if key is other_key and value is other_value:
                return number
        return len(self.calls)


def _seen_by(mask_function: Callable[..., Any] | None, size: int) -> dict[str, int]:
    """What a mask of so many tokens, 0 for all, is to attention: a window that moves, or a chunk that stands still."""
    if size > 1 and mask_function is not None and _is_chunk(mask_function, size):
        return {"sliding_window": 0, "attention_chunk": size}
    return {"sliding_window": size}


def _is_chunk(mask_function: Callable[..., Any], size: int) -> bool:
    # The first token of the second chunk, whose window would begin with the second token of all.
    first, query, key = (torch.tensor(position) for position in (0, size, 1))
    try:
        return not mask_function(first, first, query, key)
    except IndexError:
        # It also looks up which tokens are parts of an image, and these are only known within the pass.
        return False


def _reserve_name(adapter: ModelAdapter) -> str:
    """A name for an attention function, the adapter's for as long as it lives.

    The first one that is free: compilers look up what they keep from earlier processes by the names in a graph.
    """
    from transformers import AttentionInterface

    names = AttentionInterface._global_mapping
    candidates = (f"{_NAME_PREFIX}{index}" for index in count())
    with _RESERVING:
        name = next(name for name in candidates if names.get(name, _given_back) is _given_back)
        names[name] = _detached
    # The name stays: a compiler may be going through all of them in another thread when this happens.
    weakref.finalize(adapter, names.__setitem__, name, _given_back)
    return name


def _given_back(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("the model's attention was called, and its manager is gone; attach another")


def _detached(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("the model's attention was called while no engine is attached; attach one first")


def _bytes_per_token(few: int, more: int) -> int:
    """What each token adds to what is held, from passes with some tokens and `_MORE_DRY_RUN_TOKENS` more."""
    return -(-max(0, more - few) // _MORE_DRY_RUN_TOKENS)


def _refuse_encoder_decoders(model: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder; only decoder-only models are supported"
        )


def _refuse_layer_types(model: Any) -> None:
    name = type(model).__name__
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    supported = ATTENTION_LAYER_TYPES | RECURRENT_LAYER_TYPES
    unsupported = sorted(layer_types - supported - _OTHER_LAYER_TYPES)
    if unsupported:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(unsupported)}; supported are {', '.join(sorted(supported))}"
        )


def _check_windows(text_config: Any, calls: list[AttentionCall]) -> None:
    """Refuses models whose window is known to their mask only: without a mask it would silently not apply."""
    layer_types: list[str] = list(getattr(text_config, "layer_types", None) or ())
    for kind, sizes in (
        ("sliding_attention", [call.window for call in calls]),
        ("chunked_attention", [call.chunk for call in calls]),
    ):
        expected, actual = layer_types.count(kind), sum(size > 0 for size in sizes)
        if actual < expected:
            raise UnsupportedModelError(
                f"the configuration names {expected} layers of type {kind}, but only {actual} attention calls say so, "
                "in neither their arguments nor their mask"
            )


def _configs_of(model: nn.Module) -> list[Any]:
    """All configuration objects that modules of the model read, each once."""
    pending = [module.config for module in model.modules() if hasattr(module, "config")]
    found: dict[int, Any] = {}
    while pending:
        config = pending.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            pending += [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    return list(found.values())


def _set_attention(config: Any, implementation: str | None) -> None:
    config._attn_implementation_internal = implementation


def _eval_mode(model: nn.Module) -> Callable[[], None]:
    """Puts the model into eval mode; the returned function puts each module back."""
    were_training = [module for module in model.modules() if module.training]
    model.eval()

    def restore() -> None:
        for module in were_training:
            module.training = True

    return restore
