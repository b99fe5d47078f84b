"""The base class of a runtime module: one mechanism, which decides and never executes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from quicksilver.runtime.architecture import Architecture
    from quicksilver.runtime.precision import PrecisionExecutor
    from quicksilver.runtime.state import CacheView, LayerView, Span, TokenState


class RuntimeModule(ABC):
    """Looks at the tokens of a layer and says what shall become of them from the next layer on.

    `priority` orders the modules at one layer: halting 10, KV skipping 20, fusion 30, quantization 40 (paper 2.4).
    `lookahead` lets a module that looks ahead act outside a prompt too (the paper's variant); every number it touches is marked.
    """

    priority: ClassVar[int] = 50
    lookahead: bool = False

    @property
    def causal(self) -> bool:
        """True when a decision about token t reads tokens up to t only (DESIGN §3)."""
        return True

    @property
    def copies_kv(self) -> bool:
        """True when halted tokens may keep the K/V of the layer they halted at: the runtime must then remember them."""
        return getattr(self, "missing_kv", None) == "copy"

    @property
    def proportional_attention(self) -> bool:
        """True when a super-token shall draw attention in proportion to the tokens it stands for."""
        return False

    @property
    def merges_cache(self) -> bool:
        """True when `merge_cache` may do something: it is asked after every pass but the first."""
        return False

    @property
    def evicts_cache(self) -> bool:
        """True when `evict` may do something: it is asked after every pass."""
        return False

    def sums_attention(self, layer: int) -> bool:
        """True where `evict` will ask for `view.attention`: the runtime then adds up what each entry receives, pass by pass. That takes
        the q·k product of all queries once more; its cost is in the ledger."""
        return False

    def span(self, layer: int) -> Span | None:
        """How far back the queries of a layer see; None: as far as the model has it. No decision about a token, so in no trace."""
        return None

    @property
    def precision(self) -> PrecisionExecutor | None:
        """Who executes the widths this module decides; None for a module that decides none."""
        return None

    def null(self, seed: int) -> RuntimeModule | None:
        """The same mechanism at the same budget with the choice left to chance, where replaying its decisions on other tokens would
        make no sense; None: it would."""
        return None

    def bind(self, architecture: Architecture) -> None:  # noqa: B027  (optional)
        """Called once by `apply`: check the options against the model and resolve fractions of depth. Raises ConfigError."""

    def acts_at(self, layer: int) -> bool:
        """False where `decide` would do nothing: no view is built then."""
        return True

    def wants_attention(self, layer: int) -> bool:
        """True where `decide` will ask for `view.attention_received`, `view.keys` or `view.attention_output`."""
        return False

    @abstractmethod
    def decide(self, view: LayerView, tokens: TokenState) -> None:
        """Look at `view`, call the verbs of `tokens`."""

    def merge_cache(self, view: CacheView) -> torch.Tensor | None:
        """Which K/V entries of a layer become one: (B, K) long, the column that carries each from now on, its own where nothing
        happens. A group goes into its own last present entry, K and V as the mean weighted by size. None: nothing happens."""
        return None

    def evict(self, view: CacheView) -> torch.Tensor | None:
        """Which K/V entries of a layer leave the cache for good: (B, K) bool. None: nothing happens."""
        return None


class Transform(RuntimeModule):
    """Changes the model itself for the length of `apply` (its weights, its settings) and decides nothing about tokens.

    For what is compared with the mechanisms: another number format, another way to generate. It stands in the list of modules like
    one, so that it is configured, measured and compared with the dense model in the same way.

    `changes_weights`: it does not go with a module that quantises them.
    """

    changes_weights: ClassVar[bool] = True

    @abstractmethod
    def applied(self, architecture: Architecture) -> AbstractContextManager[None]:
        """Change the model, and leave nothing of it behind."""

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        """Nothing: it is never asked."""
