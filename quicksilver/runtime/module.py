"""Kinds of runtime modules: what a mechanism may decide about. A module decides and never executes.

| Kind | Decides | Asked |
|---|---|---|
| `TokenPolicy` | which tokens halt, are fused, lose their K/V, or are quantised | after a layer |
| `MergePolicy` | which K/V entries of the cache become one | after a pass |
| `EvictionPolicy` | which K/V entries leave the cache | after a pass |
| `SpanPolicy` | how far back the queries of a layer see | once, by `apply` |
| `Transform` | nothing about tokens: it changes the model itself | when the context opens |

A module that is of two kinds has two of these base classes: token fusion decides about tokens in a prompt and about the cache while
decoding."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.errors import ConfigError, UnsupportedModelError
from quicksilver.runtime.ledger import BETA
from quicksilver.runtime.options import Options
from quicksilver.runtime.visibility import Span

if TYPE_CHECKING:
    from quicksilver.runtime.pass_state import TokenState
    from quicksilver.runtime.translation import KVTranslator, MLPMap
    from quicksilver.runtime.view import CacheView, LayerView


class PrecisionExecutor(ABC):
    """Executes the widths that `TokenState.set_bits` decided.

    Attributes:
        kernel: what computed the products of quantised tokens, for the record.
        beta: what the paper's ledger charges a token by its width, relative to 16 bits.
    """

    kernel: str
    beta: Mapping[int, float] = BETA

    @abstractmethod
    def run_layer(self, layer: nn.Module, bits: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`call()`, which runs `layer`, with the inputs of its linear layers coded at `bits` (B, A) uint8; returns what it returns."""

    @abstractmethod
    def quantize_dequantize_kv(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """K or V (B, H_kv, M, head_dim) as it reads after having been coded at `bits` (B, M); zeros stay zeros."""

    @abstractmethod
    def new_store(self) -> CacheLayer:
        """A cache layer that keeps entries packed at their `bits` fact and returns what `quantize_dequantize_kv` would give."""

    def quantize_dequantize_states(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """The residual stream (B, M, D) right after widths were decided; bits (B, M), 16 where nothing was said."""
        return states


NumberFormat = Literal["float32", "bfloat16", "integer"]  # ascending: what two processors may differ by


class RuntimeModule(Options):
    """What all kinds share. Derive from a kind, not from this: `apply` refuses a module of no kind.
    The options of a dataclass are checked by their annotations (`quicksilver.runtime.options`).

    `priority` orders the modules at one layer: halting 10, KV skipping 20, fusion 30, quantization 40 (paper 2.4).
    `lookahead` lets a module that looks ahead act outside a prompt too (the paper's variant); every number it touches is marked.
    """

    priority: ClassVar[int] = 50
    lookahead: bool = False
    _bound_to: ClassVar[weakref.ref[Any] | None] = None  # of an instance, by `check_modules`

    @property
    def causal(self) -> bool:
        """True when a decision about token t reads tokens up to t only (docs/design.md §3)."""
        return True

    @property
    def kernel(self) -> str | None:
        """Which kernel computed the matrix products that this module changed, for the record; None: it changed none."""
        return None

    @property
    def number_format(self) -> NumberFormat:
        """What its products are rounded to; how far two processors may differ follows from it (docs/identity.md)."""
        return "float32"

    def bind(self, architecture: Architecture) -> None:
        """Called once by `apply`: check the options against the model and resolve fractions of depth. Raises ConfigError."""

    def bound_to(self) -> object:
        """The model it was last bound to; None: none that still exists."""
        return None if self._bound_to is None else self._bound_to()

    def null(self, seed: int) -> RuntimeModule | None:
        """The same mechanism at the same budget with the choice left to chance, where replaying its decisions on other tokens would
        make no sense; None: it would."""
        return None


class TokenPolicy(RuntimeModule, ABC):
    """Looks at the tokens of a layer and says what becomes of them from the next layer on.

    `halts` is False for a policy that never halts a token: what follows halting needs another that may.
    """

    halts: ClassVar[bool] = True

    @property
    def follows_halting(self) -> bool:
        """True when it acts on tokens as they halt: alone it would do nothing."""
        return False

    @abstractmethod
    def decide(self, view: LayerView, tokens: TokenState) -> None:
        """Look at `view`, call the verbs of `tokens`."""

    def acts_at(self, layer: int) -> bool:
        """False where `decide` would do nothing: no view is built then."""
        return True

    def required_layers(self) -> frozenset[int]:
        """Layers after which it must be asked: `decision_layers` without one of them are refused."""
        return frozenset()

    def wants_attention(self, layer: int) -> bool:
        """True where `decide` will ask for `view.attention_received`, `view.keys` or `view.attention_output`."""
        return False

    @property
    def copies_kv(self) -> bool:
        """True when halted tokens may keep the K/V of the layer they halted at: the runtime must then remember them."""
        return False

    @property
    def translators(self) -> Mapping[int, KVTranslator]:
        """What predicts the K/V of tokens that this policy halts with `missing_kv="predict"`, by the layer they halt after; a replay of
        its trace needs them."""
        return {}

    @property
    def mlp_maps(self) -> Mapping[int, MLPMap]:
        """What stands in for the MLPs of tokens that this policy says, by layer; a replay of its trace needs them."""
        return {}

    @property
    def proportional_attention(self) -> bool:
        """True when a super-token draws attention in proportion to the tokens it stands for."""
        return False

    @property
    def precision(self) -> PrecisionExecutor | None:
        """What executes the widths this policy decides; None for a policy that decides none."""
        return None

    @property
    def kernel(self) -> str | None:
        return None if self.precision is None else self.precision.kernel

    @property
    def number_format(self) -> NumberFormat:
        return "float32" if self.precision is None else "integer"


class MergePolicy(RuntimeModule, ABC):
    """Decides between two passes which K/V entries of a layer become one."""

    @property
    def merges_cache(self) -> bool:
        """False when `merge_cache` would do nothing: it is not asked then."""
        return True

    @abstractmethod
    def merge_cache(self, view: CacheView) -> torch.Tensor | None:
        """Asked after every pass but the first, layer by layer.

        Returns:
            (B, K) long, the column that carries each entry from now on, its own where nothing happens. A group goes into its own
            last present entry, K and V as the mean weighted by size. None: nothing happens.
        """


class EvictionPolicy(RuntimeModule, ABC):
    """Decides between two passes which K/V entries of a layer leave the cache for good."""

    @property
    def evicts_cache(self) -> bool:
        """False when `evict` would do nothing: it is not asked then."""
        return True

    def sums_attention(self, layer: int) -> bool:
        """True where `evict` will ask for `view.attention`: the runtime then adds up what each entry receives, pass by pass. That takes
        the q·k product of all queries once more; its cost is in the ledger."""
        return False

    @abstractmethod
    def evict(self, view: CacheView) -> torch.Tensor | None:
        """Asked after every pass, layer by layer: (B, K) bool, True for what leaves. None: nothing happens."""


class SpanPolicy(RuntimeModule, ABC):
    """Limits how far back queries see. That is a property of a layer and no decision about a token, so no trace holds it."""

    @abstractmethod
    def span(self, layer: int) -> Span | None:
        """How far back the queries of `layer` see; None: as far as the model has it."""


class Transform(RuntimeModule, ABC):
    """Changes the model itself for the length of `apply`: its weights, or its settings.

    For what is compared with the mechanisms: another number format, another way to generate. It stands in the list of modules like
    one, so that it is configured, measured and compared with the dense model in the same way.

    `changes_weights`: it does not go with a module that quantises them.
    """

    changes_weights: ClassVar[bool] = True

    @property
    def skippable_flops(self) -> int:
        """Floating-point operations so far that ran and that a kernel could have left out, such as products with a zero: taken off the
        nominal ledger. It only grows."""
        return 0

    @abstractmethod
    def applied(self, architecture: Architecture) -> AbstractContextManager[None]:
        """Change the model, and leave nothing of it behind."""


KINDS: tuple[type[RuntimeModule], ...] = (TokenPolicy, MergePolicy, EvictionPolicy, SpanPolicy, Transform)


def list_of_modules(modules: Iterable[RuntimeModule]) -> list[RuntimeModule]:
    """What `apply` was given, read once; raises ConfigError for anything but modules, each of them once."""
    if isinstance(modules, RuntimeModule | str | Mapping) or not isinstance(modules, Iterable):
        raise ConfigError(
            f"modules={modules!r:.80} is no list of modules: give one, such as [Halting()], or [] for the dense model."
        )
    found = list(modules)
    for i, module in enumerate(found):
        if not isinstance(module, KINDS):
            name = type(module).__name__ if isinstance(module, RuntimeModule) else f"{module!r:.80}"
            raise ConfigError(
                f"{name} is no kind of runtime module: derive it from one or more of {', '.join(kind.__name__ for kind in KINDS)}."
            )
        if any(module is other for other in found[:i]):
            raise ConfigError(f"{type(module).__name__} stands in the list of modules twice, as one object: give it once.")
    return found


def layers_asked(arch: Architecture, decision_layers: Iterable[int] | None) -> frozenset[int] | None:
    """`decision_layers` as a set; raises ConfigError for none, for no whole numbers and for layers the model lacks."""
    if decision_layers is None:
        return None
    if isinstance(decision_layers, str | bytes) or not isinstance(decision_layers, Iterable):
        raise ConfigError(
            f"decision_layers={decision_layers!r:.80} is no list of layers: give one, such as [3, 7], or None for all."
        )
    found: list[Any] = list(decision_layers)
    if not found:
        raise ConfigError("decision_layers=[]: no module would ever be asked. Give one or more layers, or None for all.")
    wrong = [n for n in found if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < arch.n_layers]
    if wrong:
        raise ConfigError(f"decision_layers={wrong} do not exist: the model has layers 0 to {arch.n_layers - 1}.")
    return frozenset(map(int, found))


def check_modules(arch: Architecture, modules: Sequence[RuntimeModule], decision_layers: frozenset[int] | None) -> None:
    """Bind `modules` to the model.

    Raises:
        ConfigError: decision layers at which a module would never be asked; a module that refuses the model; two that change the same thing.
        UnsupportedModelError: an attention implementation that cannot mask tokens by slot.
    """
    transforms = [module for module in modules if isinstance(module, Transform)]
    deciding = [module for module in modules if not isinstance(module, Transform)]
    for module in (*transforms, *sorted(deciding, key=lambda module: module.priority)):
        module.bind(arch)
        object.__setattr__(module, "_bound_to", weakref.ref(arch.model))
    policies = [module for module in deciding if isinstance(module, TokenPolicy)]
    check_together(modules)
    _check_decision_layers(arch, policies, decision_layers)
    if deciding and arch.attention_implementation not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"attn_implementation={arch.attention_implementation!r} cannot mask tokens by slot; load the model with 'sdpa' or 'eager'."
        )
    changed = [type(transform).__name__ for transform in transforms if transform.changes_weights]
    quantising = [type(policy).__name__ for policy in policies if policy.precision is not None]
    if len(quantising) > 1:
        raise ConfigError(f"{len(quantising)} modules set precision; give one.")
    changed += quantising
    if len(changed) > 1:
        raise ConfigError(f"{' and '.join(changed)} all change what the weights are multiplied as; give one.")
    if changed and arch.ranks.size > 1:
        raise ConfigError(
            f"{changed[0]} changes what the weights are multiplied as, and this model's are cut among processes (tensor parallelism): "
            "spread its layers over the devices instead (model.device_map=auto), or leave the module out."
        )


def check_together(modules: Sequence[RuntimeModule]) -> None:
    """Refuse a module that would do nothing beside the others.

    Raises:
        ConfigError: it follows halting, and no other module may halt a token.
    """
    policies = [module for module in modules if isinstance(module, TokenPolicy)]
    for policy in policies:
        if policy.follows_halting and not any(other.halts for other in policies if other is not policy):
            raise ConfigError(
                f"{type(policy).__name__} acts on tokens as they halt, and no module here halts any: add one, such as Halting "
                "(modules=[halting,…]), or choose another criterion (criterion=attention, modules=[kv_skipping_attention])."
            )


def _check_decision_layers(arch: Architecture, policies: Sequence[TokenPolicy], decision_layers: frozenset[int] | None) -> None:
    if decision_layers is None:
        return
    for policy in policies:
        missing = sorted(policy.required_layers() - decision_layers)
        if missing:
            raise ConfigError(
                f"decision_layers={sorted(decision_layers)}: {type(policy).__name__} decides after layer "
                f"{', '.join(map(str, missing))} too. Add {'it' if len(missing) == 1 else 'them'}."
            )
        would = [layer for layer in range(arch.n_layers) if policy.acts_at(layer)]
        if would and decision_layers.isdisjoint(would):
            raise ConfigError(
                f"decision_layers={sorted(decision_layers)}: {type(policy).__name__} would never be asked, it acts after "
                f"layer {', '.join(map(str, would))}. Add one of these."
            )


def the_span(layer: int, policies: Sequence[SpanPolicy]) -> Span | None:
    """How far back the queries of `layer` see.

    Raises:
        ConfigError: two policies limit it.
    """
    spans = [span for policy in policies if (span := policy.span(layer)) is not None]
    if len(spans) > 1:
        raise ConfigError(f"{len(spans)} modules limit how far back the queries of layer {layer} see; give one.")
    return spans[0] if spans else None
