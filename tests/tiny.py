"""What the runtime's tests are made of: a tiny random model of every family, ragged batches, and policies whose decisions are known.

Nothing here is a test. Models are cached: tests must leave them as they found them, which is an invariant of its own.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import thinning
import torch
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quicksilver.modules import Halting
from quicksilver.modules.fitted import BoundTranslator, ModelShape, Translator, model_digest
from quicksilver.modules.linear_mlp import LinearMap, MLPMaps
from quicksilver.runtime import (
    MISSING_KV,
    Architecture,
    ConfigError,
    LayerView,
    QuickSilverError,
    Run,
    RuntimeModule,
    TokenPolicy,
    TokenState,
    apply,
)
from quicksilver.runtime.trace import Trace

VOCABULARY = 61
LAYERS = 5
WIDTH = 32
POSITIONS = 96
SLIDING_WINDOW = 7
FAMILIES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen2-mixed", "qwen3", "smollm3", "gpt_neox", "olmo2", "phi3", "gemma2", "gemma3",
)  # fmt: skip
MODEL_TYPES = {"qwen2-mixed": "qwen2", "gemma3": "gemma3_text"}
EAGER_ONLY = ("gemma2",)  # caps the scores of its attention, which sdpa cannot
STORIES = "stories260K"
MODELS = (*FAMILIES, STORIES)
# Families whose layers differ most: the quick suite meets its invariants by some of them. All models meet the first of them there (dense is
# dense) and the rest in `make test-all`.
UNALIKE = ("gpt2", "llama", "qwen2-mixed", "gpt_neox", "gemma2")


def thinned(names: Sequence[str]) -> list[Any]:
    """Families, those that are like another one marked slow."""
    return [name if name in UNALIKE else pytest.param(name, marks=pytest.mark.slow) for name in names]


def unlike_first(names: Sequence[str]) -> list[str]:
    """Families, those that differ most before the others."""
    return sorted(names, key=lambda name: name not in UNALIKE)


def data_folder() -> Path:
    """The data folder: `QUICKSILVER_DATA`, else ../shared/data. Skips the test where it is absent."""
    root = Path(os.environ.get("QUICKSILVER_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not root.is_dir():
        pytest.skip("no data folder: set QUICKSILVER_DATA, or put the files of docs/design.md §9 into ../shared/data")
    return root


# -- models ----------------------------------------------------------------------------------------------------------------------
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
GEMMA: dict[str, Any] = dict(head_dim=16, query_pre_attn_scalar=9, sliding_window=SLIDING_WINDOW)
# What the config of a family has beside the sizes that all share.
OWN: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=POSITIONS), "mistral": dict(sliding_window=SLIDING_WINDOW),
    "qwen2-mixed": dict(use_sliding_window=True, sliding_window=SLIDING_WINDOW, max_window_layers=2), "qwen3": dict(head_dim=16),
    "gemma2": GEMMA | dict(attn_logit_softcapping=1.5, final_logit_softcapping=3.0), "gemma3": GEMMA | dict(layer_types=KINDS),
}  # fmt: skip


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A random model of `family`, in eval mode; `changes` go into its config.

    Biases and norms are random too, so that a projection which forgets one shows; `qwen2-mixed` has full layers below sliding ones.
    """
    sizes: dict[str, Any] = dict(vocab_size=VOCABULARY, initializer_range=0.15, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    if family != "gpt2":
        sizes |= dict(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=40, max_position_embeddings=POSITIONS
        )  # fmt: skip
    if family not in ("gpt2", "gpt_neox"):
        sizes |= dict(num_key_value_heads=2)
    torch.manual_seed(len(family))
    config = AutoConfig.for_model(MODEL_TYPES.get(family, family), **sizes | OWN.get(family, {}) | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if family in EAGER_ONLY else None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@functools.cache
def load(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of that name: a family, or the trained stories260K. Skips the test where the data folder is absent."""
    if name == STORIES:
        model = AutoModelForCausalLM.from_pretrained(data_folder() / STORIES).eval()
    else:
        model = build(name)
    model.set_attn_implementation("eager" if name in EAGER_ONLY else attention)
    return model.to(dtype)


def ids(rows: int, tokens: int, seed: int = 0, low: int = 1) -> torch.Tensor:
    """(rows, tokens) long: random tokens from `low` on."""
    return torch.randint(low, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


# -- batches ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Batch:
    """Sequences of token ids, padded on the left to the longest of them and by `extra` columns more."""

    rows: tuple[tuple[int, ...], ...]
    extra: int = 0

    @property
    def width(self) -> int:
        return max(map(len, self.rows)) + self.extra

    @property
    def is_padded(self) -> bool:
        return any(len(row) < self.width for row in self.rows)

    @property
    def ids(self) -> torch.Tensor:
        """(B, N) long. What stands in the padding is not 0: it must not matter."""
        return torch.tensor([[(7 * i + 3) % VOCABULARY for i in range(self.width - len(row))] + list(row) for row in self.rows])

    @property
    def mask(self) -> torch.Tensor:
        """(B, N) long, 0 for padding."""
        return torch.tensor([[0] * (self.width - len(row)) + [1] * len(row) for row in self.rows])

    def inputs(self) -> dict[str, torch.Tensor]:
        if not self.is_padded:
            return {"input_ids": self.ids}
        return {"input_ids": self.ids, "attention_mask": self.mask, "position_ids": (self.mask.cumsum(1) - 1).clamp(min=0)}

    def real(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The rows of x (B, N, ...) without their padding."""
        return [x[i, self.width - len(row) :] for i, row in enumerate(self.rows)]

    def alone(self, i: int) -> "Batch":
        return Batch((self.rows[i],))


LONG = Batch((tuple(range(1, 33)),))
EVEN = Batch((tuple(range(1, 25)), tuple(range(30, 54))))
RAGGED = Batch((tuple(range(1, 29)), tuple(range(30, 48))))


def token_ids(low: int = 1, high: int = 16) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, VOCABULARY - 1), min_size=low, max_size=high).map(tuple)


def batches(low: int = 1, high: int = 16, padded: bool | None = None) -> st.SearchStrategy[Batch]:
    """One to three rows; padded: True, False, or None for either."""
    free = st.builds(Batch, st.lists(token_ids(low, high), min_size=1, max_size=3).map(tuple), st.integers(0, 3))
    even = st.tuples(st.integers(1, 3), st.integers(low, high)).flatmap(
        lambda shape: st.lists(token_ids(shape[1], shape[1]), min_size=shape[0], max_size=shape[0]).map(tuple).map(Batch)
    )
    if padded is None:
        return st.one_of(even, free)
    return free.filter(lambda batch: batch.is_padded) if padded else even


def chunkings(n: int) -> st.SearchStrategy[list[int]]:
    """Ways to cut n columns into passes: anywhere, or a prompt and single tokens after it; at a few places in the quick suite."""
    most = n - 1 if thinning.whole else min(n - 1, 4)
    anywhere = st.sets(st.integers(1, max(n - 1, 1)), max_size=most)
    decoded = st.integers(0, most).map(lambda tokens: set(range(n - tokens, n)))
    return st.one_of(anywhere, decoded).map(lambda cuts: [stop - start for start, stop in pairwise([0, *sorted(cuts), n])])


# -- policies --------------------------------------------------------------------------------------------------------------------
def chance(seed: int, layer: int, slots: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) that depends on nothing but (seed, layer, slot, id); float32, the shape of `slots`."""
    x = (slots * 7919 + ids * 104729 + layer * 1299709 + seed * 15485863 + 1) % 2147483647
    for _ in range(3):
        x = (x * 48271 + 12345) % 2147483647
        x = x ^ (x >> 7)
    return (x % 10007).float() / 10007


@functools.lru_cache(16)
def random_translators(architecture: Architecture) -> dict[int, BoundTranslator]:
    """A map to K and V of about the size of the layers' own, for every layer that a token may halt after; the same for all modules of a run."""
    shape = ModelShape.of(architecture)
    return {layer: BoundTranslator(_random_translator(shape, layer + 1), architecture) for layer in range(shape.n_layers - 2)}


@functools.cache
def _random_translator(shape: ModelShape, layer: int) -> Translator:
    later = (shape.n_layers - 1 - layer, 2, shape.n_kv_heads, shape.head_dim)
    weight = torch.randn(1 + shape.width, *later, generator=torch.Generator().manual_seed(layer)) / shape.width**0.5
    return Translator(layer, weight, shape, weights_digest="random")


def random_mlp_maps(architecture: Architecture) -> MLPMaps:
    """Maps of about the size of the MLPs, for all layers but the first; three neurons of each stay."""
    layers, width, kept = tuple(range(1, architecture.n_layers)), architecture.width, (0, 5, 2)
    weight = torch.randn(len(layers), 1 + width + 3, width, generator=torch.Generator().manual_seed(3)) / width**0.5
    return MLPMaps(layers, weight, ModelShape.of(architecture), model_digest(architecture.model), neurons=(kept,) * len(layers))


@dataclass
class MapsMLPs(TokenPolicy):
    """Random maps stand in for the MLPs of tokens that a hash chooses."""

    share: float = 0.6
    priority, halts = 5, False

    def bind(self, architecture: Architecture) -> None:
        self._maps = random_mlp_maps(architecture).of_layers([1, 3], architecture)

    @property
    def mlp_maps(self) -> dict[int, LinearMap]:
        return self._maps

    def acts_at(self, layer: int) -> bool:
        return layer == 0

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        tokens.map_mlp(chance(5, 0, view.slots, view.input_ids) < self.share, self._maps)


class Halts(TokenPolicy):
    """Halts tokens by its `missing_kv`."""

    missing_kv: str

    @property
    def copies_kv(self) -> bool:
        return self.missing_kv in ("copy", "mixed")

    def bind(self, architecture: Architecture) -> None:
        self._architecture = architecture

    @property
    def translators(self) -> dict[int, BoundTranslator]:
        return random_translators(self._architecture) if self.missing_kv in ("predict", "mixed") else {}

    def _halt(self, view: LayerView, tokens: TokenState, mask: torch.Tensor, mode: str | None = None) -> None:
        mode = mode or self.missing_kv
        if mode == "predict" and view.layer == view.n_layers - 2:
            mode = "project"  # no layer is left to predict for
        translator = self.translators[view.layer] if mode == "predict" else None
        tokens.halt(mask, missing_kv=mode, resume_layers=getattr(self, "resume_layers", 0), translator=translator)


@dataclass
class Hashed(Halts):
    """Causal: whether a token halts, how, and whether its K/V is skipped, is a hash of layer, slot and token id.

    Args:
        halt, skip: rates per layer.
        missing_kv: a mode, or "mixed": the mode is drawn for each token.
        first_pass: nothing is decided before it.
        protect: first tokens of a sequence that are left alone (0: even the first one may go).
    """

    halt: float = 0.3
    skip: float = 0.0
    missing_kv: str = "project"
    resume_layers: int = 0
    protect: int = 1
    seed: int = 0
    first_pass: int = 0

    priority = 10

    def halts(self, layer: int, slots: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (chance(self.seed, layer, slots, ids) < self.halt) & (slots >= self.protect)

    def skips(self, layer: int, slots: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (chance(self.seed + 1000, layer, slots, ids) < self.skip) & (slots >= self.protect)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        if view.pass_index < self.first_pass:
            return
        halts = self.halts(view.layer, view.slots, view.input_ids)
        if self.missing_kv == "mixed":
            how = (chance(self.seed + 2000, 0, view.slots, view.input_ids) * len(MISSING_KV)).long()
            for code, mode in enumerate(MISSING_KV):
                self._halt(view, tokens, halts & (how == code), mode)
        else:
            self._halt(view, tokens, halts)
        if self.skip:
            tokens.skip_kv(self.skips(view.layer, view.slots, view.input_ids))

    def expected_halt_layer(self, slots: torch.Tensor, ids: torch.Tensor, n_layers: int) -> torch.Tensor:
        """The same decisions, worked out without a runtime: int16, the shape of `slots`."""
        depth = torch.full(slots.shape, n_layers - 1, dtype=torch.int16)
        for layer in reversed(range(n_layers - 1)):
            depth[self.halts(layer, slots, ids)] = layer
        return depth


@dataclass
class Capacity(Halts):
    """Non-causal, for prompts: after each layer the share of a row's tokens that is active falls to `share` of the row.

    The least attended tokens halt first (`signal="attention"`), or those that move least ("drift"). Rows of one batch that differ in
    length keep different numbers of tokens.
    """

    share: float = 0.5
    at: tuple[int, ...] = (1,)
    signal: str = "drift"
    missing_kv: str = "drop"
    resume_layers: int = 0
    priority, causal = 10, False

    def acts_at(self, layer: int) -> bool:
        return layer in self.at

    def wants_attention(self, layer: int) -> bool:
        return self.signal == "attention" and layer in self.at

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        attention = self.signal == "attention"
        score = view.attention_received(last_queries=4) if attention else (view.after - view.before).norm(dim=-1)
        # Equal tokens move alike, and rounding would choose among them: the slot breaks such ties.
        score = score + 1e-3 * chance(0, view.layer, view.slots, torch.zeros_like(view.slots))
        free = tokens.active & (view.slots > 0) & (view.slots < view.n_tokens - 1)
        surplus = tokens.active.sum(1, keepdim=True) - (view.n_tokens * self.share).ceil().long()
        rank = score.masked_fill(~free, torch.inf).argsort(dim=1).argsort(dim=1)
        self._halt(view, tokens, free & (rank < surplus))


@dataclass
class SkipLeastAttended(TokenPolicy):
    """Non-causal KV skipping inside the prompt: the tokens that receive less attention than `below` lose their K/V."""

    below: float = 0.05
    reduce: str = "max"
    priority, causal = 20, False

    def wants_attention(self, layer: int) -> bool:
        return layer % 2 == 0

    acts_at = wants_attention

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        received = view.attention_received(None, self.reduce)
        tokens.skip_kv((received < self.below) & (view.slots > 0))


@dataclass
class Never(TokenPolicy):
    """Looks at everything, decides nothing."""

    attention: bool = False
    entropy: bool = False

    def wants_attention(self, layer: int) -> bool:
        return self.attention

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        if self.attention:
            view.attention_received(2)
        if self.entropy:
            view.logit_entropy_nats(tokens.active)
        tokens.halt(torch.zeros_like(tokens.active), missing_kv="drop")


@dataclass
class HaltAll(Halts):
    """Every token stops after layer `at`."""

    at: int
    missing_kv: str = "drop"
    resume_layers: int = 0

    def acts_at(self, layer: int) -> bool:
        return layer == self.at

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        self._halt(view, tokens, tokens.active)


class Does(TokenPolicy):
    """Calls `act(view, tokens)` after every layer, or after `at` alone; `facts` are further attributes of the policy."""

    causal, copies_kv = True, False

    def __init__(
        self, act: Callable[[LayerView, TokenState], object] = lambda view, tokens: None, at: int | None = None, **facts: Any
    ):
        self.act, self.at = act, at
        vars(self).update(facts)

    def acts_at(self, layer: int) -> bool:
        return self.at in (None, layer)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        self.act(view, tokens)


def hashed(missing_kv: Sequence[str] = (*MISSING_KV, "mixed"), protect: int = 1) -> st.SearchStrategy[Hashed]:
    return st.builds(
        Hashed, halt=st.sampled_from([0.1, 0.3, 0.6]), skip=st.sampled_from([0.0, 0.3]), missing_kv=st.sampled_from(missing_kv),
        resume_layers=st.integers(0, 2), protect=st.just(protect), seed=st.integers(0, 99),
    )  # fmt: skip


def causal_policies() -> st.SearchStrategy[list[RuntimeModule]]:
    """One or more causal modules, alone and together; those of thresholds read floating-point states."""
    stops = st.builds(
        Halting, tau_drift=st.sampled_from([0.3, 0.6, 0.9]), tau_entropy=st.sampled_from([None, 3.4, 3.7]), window=st.just((0.0, 1.0)),
        protect_first=st.just(1), missing_kv=st.sampled_from(["drop", "project", "copy", "zero"]), resume_layers=st.integers(0, 2),
    )  # fmt: skip
    maps = st.builds(MapsMLPs, share=st.sampled_from([0.3, 1.0]))
    return st.one_of(*(st.tuples(*one).map(list) for one in ([hashed()], [stops], [hashed(("drop",)), stops], [maps, hashed()])))


def prompt_policies() -> st.SearchStrategy[list[RuntimeModule]]:
    """Non-causal ones: what they know of a prompt is legitimate."""
    capacity = st.builds(
        Capacity, share=st.sampled_from([0.3, 0.6]), at=st.sampled_from([(0,), (1, 2), (0, 1, 2, 3)]), missing_kv=st.sampled_from(MISSING_KV),
        signal=st.sampled_from(["drift", "attention"]), resume_layers=st.integers(0, 2),
    )  # fmt: skip
    skipping = st.builds(SkipLeastAttended, reduce=st.sampled_from(["max", "mean"]))
    return st.one_of(*(st.tuples(*one).map(list) for one in ([capacity], [skipping], [capacity, skipping], [capacity, hashed()])))


def policies() -> st.SearchStrategy[list[RuntimeModule]]:
    return st.one_of(causal_policies(), prompt_policies())


# -- running ---------------------------------------------------------------------------------------------------------------------
@dataclass
class Outcome:
    """logits (B, N, V); the run, with its trace."""

    logits: torch.Tensor
    run: Run

    @property
    def trace(self) -> Trace:
        return self.run.trace


@torch.no_grad()
def forward(
    model: PreTrainedModel, batch: Batch, modules: Sequence[RuntimeModule], *, chunks: Sequence[int] | None = None, **options: Any
) -> Outcome:
    """The logits of `batch` under `modules`: in one pass without a cache, or in passes of `chunks` columns with one."""
    inputs = batch.inputs()
    with apply(model, modules, **options) as run:
        if chunks is None:
            return Outcome(model(**inputs, use_cache=False).logits, run)
        return Outcome(torch.cat([out.logits for out in passes(model, inputs, chunks)], dim=1), run)


def passes(model: PreTrainedModel, inputs: dict[str, torch.Tensor], chunks: Sequence[int], cache: Any = None) -> list[Any]:
    """Forward `inputs` in passes of `chunks` columns; the model's outputs."""
    outputs, start = [], 0
    for size in chunks:
        stop = start + size
        part = {name: x[:, :stop] if name == "attention_mask" else x[:, start:stop] for name, x in inputs.items()}
        outputs.append(model(**part, past_key_values=cache, use_cache=True))
        cache, start = outputs[-1].past_key_values, stop
    return outputs


def decisions(batch: Batch, trace: Trace) -> list[dict[str, torch.Tensor]]:
    """By row, of its real tokens, all passes joined: halt_layer, halted_kv, resume_layer, kv_layer, (n,) each, and the bits in every layer, (n, L)."""
    names = ("halt_layer", "halted_kv", "resume_layer", "kv_layer")
    joined = {name: torch.cat([getattr(p, name) for p in trace.passes], dim=1) for name in names}
    widths = [torch.stack([p.bits(layer) for layer in range(trace.n_layers)], dim=-1) for p in trace.passes]
    joined["bits"] = torch.cat(widths, dim=1)
    return [{name: batch.real(joined[name])[i] for name in joined} for i in range(len(batch.rows))]


def assert_same_decisions(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> None:
    for row, (left, right) in enumerate(zip(a, b, strict=True)):
        for name in left:
            assert torch.equal(left[name], right[name]), f"row {row}: {name} {left[name].tolist()} against {right[name].tolist()}"


def assert_close(a: Sequence[torch.Tensor] | torch.Tensor, b: Sequence[torch.Tensor] | torch.Tensor, atol: float = 1e-5) -> None:
    """Equal to 1e-5, as docs/design.md §8 has it for float32; of values beyond 10, as a trained model's logits are, to a millionth of the largest."""
    for left, right in zip(a, b, strict=True):
        largest = float(right.abs().max()) if right.numel() else 0.0
        torch.testing.assert_close(left, right, atol=atol * max(1.0, largest / 10), rtol=1e-5)


def assert_same_run(batch: Batch, one: Outcome, other: Outcome, atol: float = 1e-5) -> None:
    """The same decisions about real tokens, and their logits as close as `assert_close` has it."""
    assert_close(batch.real(one.logits), batch.real(other.logits), atol)
    assert_same_decisions(decisions(batch, one.trace), decisions(batch, other.trace))


@contextmanager
def refused(says: str = "", error: type[Exception] = ConfigError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """What is done inside is refused in one line that `says` matches."""
    with pytest.raises(error, match=says or None) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def _apart_from_weights(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """All that may be left on a model: attributes, hooks, an instance's own forward, other parameters, gradients, the configs."""
    configs = (getattr(model, name, None) for name in ("config", "generation_config"))
    found: list[tuple[str, Any]] = [("config", config and config.to_dict()) for config in configs]
    for name, module in model.named_modules():
        own = {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")}
        found += [(f"{name}.{k}", dict(v) if isinstance(v, dict) else v) for k, v in own.items()]
    shared = model.named_parameters(remove_duplicate=False)
    return found + [(name, (id(p), p.dtype, p.requires_grad, id(p.grad))) for name, p in shared]


@contextmanager
def left_untouched(model: torch.nn.Module) -> Iterator[None]:
    """What is done inside leaves nothing on the model, and its weights as they were."""
    before, weights = _apart_from_weights(model), {name: value.clone() for name, value in model.state_dict().items()}
    yield
    assert [pair for pair in zip(before, _apart_from_weights(model), strict=True) if pair[0] != pair[1]] == []
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@contextmanager
def unless_blind(model: PreTrainedModel) -> Iterator[list[QuickSilverError]]:
    """Eager attention refuses a query without a key: in a sliding window that can happen to any token. Not empty when it did."""
    refused: list[QuickSilverError] = []
    try:
        yield refused
    except QuickSilverError as error:
        if model.config._attn_implementation != "eager" or "no key left" not in str(error):
            raise
        refused.append(error)
