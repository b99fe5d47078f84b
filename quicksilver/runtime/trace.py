"""Every decision of a run: layer × sequence × slot. Saved, loaded, replayed."""

from __future__ import annotations

import dataclasses
import json
import lzma
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.pass_state import CacheMerge, Decisions, Eviction, Fusion, MLPMapping, PassState, Precision
from quicksilver.runtime.reading import parse_json

SCHEMA = "quicksilver-trace-2"
PACKED = ".xz"  # suffix of a file that `pack` made; `Trace.load` reads both
_ABOUT = "quicksilver"  # key of the one entry of metadata, a JSON object
_TENSORS = ("valid", "halt_layer", "halted_kv", "resume_layer", "kv_layer", "fused_layer")
# Kept as `fusions`, …
_EVENTS: dict[str, type[Any]] = {
    "fusion": Fusion, "precision": Precision, "merge": CacheMerge, "eviction": Eviction, "mapping": MLPMapping,
}  # fmt: skip


@dataclass(frozen=True)
class PassTrace(Decisions):
    """The decisions of one forward pass; tensors are (B, N), their meaning is that of `PassState`.

    `first_column` counts the columns cached before the pass.
    """

    n_layers: int
    first_column: int
    valid: torch.Tensor
    halt_layer: torch.Tensor
    halted_kv: torch.Tensor
    resume_layer: torch.Tensor
    kv_layer: torch.Tensor
    fused_layer: torch.Tensor
    fusions: tuple[Fusion, ...] = ()
    precisions: tuple[Precision, ...] = ()
    merges: tuple[CacheMerge, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    mappings: tuple[MLPMapping, ...] = ()

    @classmethod
    def of(cls, state: PassState, first_column: int) -> PassTrace:
        tensors = (getattr(state, name) for name in _TENSORS)
        events = (tuple(getattr(state, f"{name}s")) for name in _EVENTS)
        return cls(state.n_layers, first_column, *tensors, *events)

    def bits(self, layer: int) -> torch.Tensor:
        """(B, N) uint8: the width of tokens in `layer`."""
        bits = torch.full_like(self.valid, 16, dtype=torch.uint8)
        for precision in self.precisions:
            if precision.layer < layer:
                bits = torch.where(precision.bits > 0, precision.bits, bits)
        return bits

    @property
    def decided(self) -> bool:
        """Whether anything was decided about any token of the pass."""
        if any(getattr(self, f"{name}s") for name in _EVENTS):
            return True
        stopped = (self.halt_layer, self.kv_layer, self.fused_layer)
        return any(int(layers.min()) < self.n_layers - 1 for layers in stopped if layers.numel())

    def evicted(self, layer: int) -> torch.Tensor:
        """(B,) long: entries that left the cache of `layer` after the pass, whichever pass they came from."""
        counts = [e.gone.sum(1) for e in self.evictions if e.layer == layer]
        return sum(counts, self.valid.new_zeros(self.valid.shape[0], dtype=torch.long))

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PassTrace:
        """The same with every tensor (B, …) changed."""
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _TENSORS}
        for name in _EVENTS:
            events = getattr(self, f"{name}s")
            changed[f"{name}s"] = tuple(
                dataclasses.replace(event, **{part: change(tensor) for part, tensor in _parts(event)}) for event in events
            )
        return dataclasses.replace(self, **changed)

    def row(self, row: int) -> PassTrace:
        """One sequence of the pass, as a batch of one."""
        return self.mapped(lambda tensor: tensor[row : row + 1])

    def cpu(self) -> PassTrace:
        return self.mapped(torch.Tensor.cpu)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The same; what is alike for all tokens is held once."""
    first = tensor.flatten()[:1]
    return first.clone().expand(tensor.shape) if tensor.numel() > 1 and bool((tensor == first).all()) else tensor


def _parts(event: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an event."""
    return ((name, value) for name, value in vars(event).items() if name != "layer")


@dataclass
class Trace:
    """The passes of a run, in order.

    Raises:
        ConfigError: `load` of a file that is not a trace, or of another schema.
    """

    n_layers: int
    passes: list[PassTrace] = field(default_factory=list)

    def active_counts(self) -> torch.Tensor:
        """(L,) long: active tokens in each layer, summed over passes and sequences."""
        return torch.tensor([sum(int(p.active(layer).sum()) for p in self.passes) for layer in range(self.n_layers)])

    def compact(self) -> Trace:
        """The same in less memory: a dense run of any length holds a few numbers a pass."""
        return Trace(self.n_layers, [one.mapped(_once) for one in self.passes])

    @classmethod
    def concat(cls, traces: Iterable[Trace]) -> Trace:
        traces = list(traces)
        depths = {t.n_layers for t in traces}
        if len(depths) != 1:
            raise ConfigError(f"Traces of models with {sorted(depths)} layers cannot be joined.")
        return cls(depths.pop(), [p for t in traces for p in t.passes])

    def save(self, path: Path | str) -> None:
        tensors, about = self.to_tensors()
        # One entry: safetensors writes several in an order of its own, and the same trace shall be the same bytes.
        save_file(tensors, str(path), metadata={_ABOUT: json.dumps(about)})

    def to_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All of it: tensors by name, and what json has of the rest."""
        tensors: dict[str, torch.Tensor] = {}
        for i, one in enumerate(self.passes):
            tensors |= {  # clones: passes share tensors, which safetensors refuses
                f"{i:06d}.{name}": getattr(one, name).cpu().clone(memory_format=torch.contiguous_format) for name in _TENSORS
            }
            for name in _EVENTS:
                for k, event in enumerate(getattr(one, f"{name}s")):
                    for part, tensor in _parts(event):
                        kept = tensor.to("cpu", torch.int32 if tensor.dtype == torch.long else tensor.dtype)
                        tensors[f"{i:06d}.{name}.{k}.{event.layer}.{part}"] = kept.contiguous()
        return tensors, {"schema": SCHEMA, "n_layers": self.n_layers, "first_columns": [p.first_column for p in self.passes]}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], about: Mapping[str, Any]) -> Trace:
        """Of what `to_tensors` gave."""
        n_layers, firsts = int(about["n_layers"]), [int(first) for first in about["first_columns"]]
        decided: list[dict[str, torch.Tensor]] = [{} for _ in firsts]
        events: list[dict[str, dict[int, dict[str, Any]]]] = [{kind: {} for kind in _EVENTS} for _ in firsts]
        for name, tensor in tensors.items():
            i, kind, *of_event = name.split(".")
            if of_event:
                k, layer, part = of_event
                event = events[int(i)][kind].setdefault(int(k), {"layer": int(layer)})
                event[part] = tensor.long() if tensor.dtype == torch.int32 else tensor
            else:
                decided[int(i)][kind] = tensor
        passes = []
        for first, own, happened in zip(firsts, decided, events, strict=True):
            whole: dict[str, Any] = {name: own[name] for name in _TENSORS}
            whole |= {f"{kind}s": tuple(_EVENTS[kind](**of[k]) for k in sorted(of)) for kind, of in happened.items()}
            passes.append(PassTrace(n_layers, first, **whole))
        return cls(n_layers, passes)

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        try:
            with _plain(Path(path)) as plain, safe_open(str(plain), framework="pt") as file:
                about = parse_json((file.metadata() or {}).get(_ABOUT, "{}"))
                if about.get("schema") != SCHEMA:
                    raise ConfigError(
                        f"{path} has schema {about.get('schema')!r}; this version reads {SCHEMA!r}. Make the trace again."
                    )
                return cls.from_tensors({name: file.get_tensor(name) for name in file.keys()}, about)  # noqa: SIM118  (not a dict)
        except ConfigError:
            raise
        except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, OSError) as error:
            raise ConfigError(f"{path} is not a readable trace: {error}") from error


def pack(path: Path) -> bytes:
    """The file of a trace, by xz: a hundredth of its bytes, as most decisions are alike. The same file gives the same bytes."""
    with _plain(path) as plain:
        return lzma.compress(plain.read_bytes(), preset=9)


@contextmanager
def _plain(path: Path) -> Iterator[Path]:
    """The file as safetensors reads it, unpacked where it is packed."""
    if path.suffix != PACKED:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / path.stem
        try:
            unpacked.write_bytes(lzma.decompress(path.read_bytes()))
        except (EOFError, lzma.LZMAError) as error:
            raise ValueError(str(error)) from error
        yield unpacked
