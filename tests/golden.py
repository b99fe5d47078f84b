"""The golden run: every module under both protocols, on a model and a text of the package, in seconds. Its numbers are in golden.json.

    python tests/golden.py            compare
    python tests/golden.py --write    write golden.json anew

Moving code must not change a number, and a record's identity does not look at code: this run is what tells the two apart
(`quicksilver.numerics`). It computes in float64 with exact products, so every processor gives the same decisions and counts, and the same
sums within 1e-9. `run(exact=False)` takes the formats and kernels of this processor instead: `BOUNDS` says how far they may be.
"""

import copy
import dataclasses
import gc
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from quicksilver import numerics
from quicksilver.baselines import number_formats
from quicksilver.baselines.number_formats import BFloat16
from quicksilver.data.windows import encode
from quicksilver.measure.audit import Audit
from quicksilver.measure.bench import Bench, run_measurements
from quicksilver.measure.flops import Flops
from quicksilver.measure.inside import look_inside
from quicksilver.measure.measurement import encoded
from quicksilver.measure.memory import Memory
from quicksilver.measure.perplexity import DenseLogits, Protocol, check_allowed, score
from quicksilver.measure.quality import Null, Quality
from quicksilver.models import loading
from quicksilver.models.spec import ModelConfig
from quicksilver.modules.calibration import calibrate_modules
from quicksilver.runs.choices import choices
from quicksilver.runs.parts import build_modules, module_entry
from quicksilver.runtime.architecture import architecture_of, linears_of
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.module import RuntimeModule, Transform
from quicksilver.runtime.quantized import kernels
from quicksilver.runtime.quantized.kernels import KERNELS, weight_of
from quicksilver.runtime.trace import Trace

_COMMAND = "python tests/golden.py --write"
GOLDEN = Path(__file__).with_name("golden.json")
TEXT = GOLDEN.with_suffix(".txt")  # what is scored and calibrated on
SAME = 1e-9  # relative bound on floats, on any processor
# How far negative log-likelihoods of a window may be from float64, relative, by number format. float32: 16 layers and sums of 48 tokens of
# numbers with an error of 2^-24 each. Threshold: float32, and an activation at a threshold falls on its other side, for one token of 48.
# Others: a state is rounded to 8 bits some hundred times.
BOUNDS = {"float32": 1e-5, "threshold": 1e-2, "bfloat16": 2e-2, "integer": 2e-2}
WINDOW, PROMPT, SCORED, CALIBRATING, BATCH = 48, 32, 2, 4, 2
LAYERS = (0, 3, 6, 9, 12, 15)  # of the model's 16
MODELS = {"all": "reference-gpt2", "continuation": "reference-llama"}

_STAGED = {"drop_before": 1, "drop_share": 0.2, "predict_before": 3, "protect_first": 2, "protect_last": 4}
# In 48 tokens and 6 layers some modules would do nothing. With these options they act; the others are as conf/modules has them.
ACTING: Mapping[str, Mapping[str, Any]] = {
    "fastest_linear": {"product": "int_mm"},  # which is the fastest is a property of the machine
    "fitted_prediction": {"save": None, "schedule": _STAGED, "missing_kv": "project"},  # too little text to fit here
    "halting_paper_b2": {"tau_drift": 170.0, "tau_entropy": 5.0},
    "halting_paper_fig9": {"tau_drift": 140.0},
    "halting_paper_g2": {"tau_drift": 170.0, "tau_entropy": 3.0},
    "heavy_hitter": {"heavy": 6, "recent": 6},
    "oracle_exit": {"save": 0.1, "head": "lens", "missing_kv": "project"},  # too little text to fit maps here
    "quicksilver": {"save": None, "schedule": _STAGED, "missing_kv": "project"},  # no translator is of the cut model
    "quicksilver_50": {"save": None, "schedule": {**_STAGED, "drop_share": 0.4}, "missing_kv": "project"},
    "sink_attention": {"window": 12},
    "sliding_window": {"window": 12},
    "token_fusion_attention": {"attention_queries": 8, "attention_pool": 3},
    "token_fusion_paper_g3": {"tau_fuse": 620.0},
}
# One changes `generate` alone; the other rounds weights, which in these models are bfloat16 numbers already.
IDLE = ("prompt_lookup", "bfloat16")
LEFT_OUT = (  # gates and linear MLPs belong to whole models (tests/fitting); the others are aliases: tests/runs/test_conf.py
    "learned_halting", "linear_mlp", "predicted_kv", "predicted_kv_50",
)  # fmt: skip
WITH = {"kv_skipping": "halting", "kv_skipping_paper_c4": "halting"}  # these ask about tokens that halted
TOGETHER = ("halting", "kv_skipping", "token_fusion", "adaptive_quantization")
MEASURED = (TOGETHER, ("halting",), ("token_fusion_capacity",), ("heavy_hitter",))  # they go through every pass without a clock


# --- the cases ------------------------------------------------------------------------------------------------------------------
def cases() -> dict[str, dict[str, Any]]:
    """Every case: its key, the protocol's name and the entries of `modules`."""
    found: dict[str, dict[str, Any]] = {}
    for protocol in MODELS:
        found[f"dense {protocol}"] = {"protocol": protocol, "modules": {}}
        selections = [(name, *([WITH[name]] if name in WITH else [])) for name in choices("modules") if name not in LEFT_OUT]
        for names in [*selections, TOGETHER]:
            entries: dict[str, Any] = {}
            for name in names:
                key, entry = module_entry(name)
                entries[key] = entry | dict(ACTING.get(name, {}))
            if names == TOGETHER and protocol == "all":
                entries["token_fusion"]["lookahead"] = True  # or the protocol would refuse it
            found[f"{'+'.join(names)} {protocol}"] = {"protocol": protocol, "modules": entries}
    return found


# --- float64 ------------------------------------------------------------------------------------------------------------------
class _InFloat64(TorchFunctionMode):
    """What asks torch for float32 gets float64."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if not kwargs and len(args) == 1:  # most calls read a shape or a device
            return func(*args)
        given = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*[torch.float64 if value is torch.float32 else value for value in args], **given)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """float64 for every float, and products of codes or of bfloat16 weights that are not rounded."""
    exact = dataclasses.replace(KERNELS["int_mm"], bound=None, lacks=lambda weight, rows: None)  # nothing to prove

    def product(rows: torch.Tensor, transposed: torch.Tensor) -> torch.Tensor:
        return rows.double() @ transposed.double()

    applied = BFloat16.applied

    @contextmanager
    def widened(self: BFloat16, architecture: Any) -> Iterator[None]:
        with applied(self, architecture):
            for module in architecture.model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.dtype == torch.bfloat16:
                        module._parameters[name] = torch.nn.Parameter(parameter.double(), requires_grad=False)
            yield

    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        stack.enter_context(mock.patch.object(kernels, "multiply", product))
        stack.enter_context(mock.patch.dict(kernels.KERNELS, int_mm=exact))
        stack.enter_context(mock.patch.object(number_formats, "DYNAMIC_INT8", (exact,)))
        stack.enter_context(mock.patch.object(BFloat16, "applied", widened))
        stack.enter_context(_InFloat64())
        yield


# --- running them ---------------------------------------------------------------------------------------------------------------
class _Bench:
    """A model of the package, cut to six layers, and its windows of `TEXT`."""

    def __init__(self, protocol: str, exact: bool) -> None:
        name = MODELS[protocol]
        config = ModelConfig(name=name, path=f"embedded:{name}")
        loaded = loading.load(config, loading.locate(config))
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        layers = architecture_of(self.model).layers
        kept = torch.nn.ModuleList([layers[i] for i in LAYERS])
        for number, layer in enumerate(kept):
            for part in layer.modules():
                if hasattr(part, "layer_idx"):
                    vars(part)["layer_idx"] = number
        setattr(self.model.base_model, "h" if protocol == "all" else "layers", kept)
        self.model.config.num_hidden_layers = len(kept)
        if exact:
            self.model.double()
        self.protocol: Protocol = Protocol(protocol, WINDOW, PROMPT, BATCH)
        self.windows = encode(" ".join(TEXT.read_text(encoding="utf-8").split()), self.tokenizer, WINDOW, SCORED + CALIBRATING)
        self.scored, self.calibrating = self.windows.ids[:SCORED], self.windows.ids[SCORED:]
        self.dense = DenseLogits(self.model, self.protocol)

    def modules(self, entries: Mapping[str, Any], calibrations: Path) -> list[RuntimeModule]:
        modules = build_modules(copy.deepcopy(dict(entries)), self.tokenizer)
        calibrate_modules(modules, calibrations, self.model, self.calibrating, batch_size=CALIBRATING)
        return modules


def run(exact: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cases one after the other, each with its numbers under `numbers`, or under `refused` the protocol that does not take it.

    Args:
        exact: False: in float32, and by this processor's kernels. Passes beside scoring are left out, and `format` names the number format.
    """
    benches: dict[str, _Bench] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if exact:
            stack.enter_context(exact_arithmetic())
        for key, case in cases().items():
            protocol = case["protocol"]
            if protocol not in benches:
                benches[protocol] = _Bench(protocol, exact)
                gc.freeze()  # a peak of memory is preceded by a collection, which need not look at models and libraries each time
            bench = benches[protocol]
            entries = case["modules"] if exact else _as_offered(case["modules"], bench)
            try:
                check_allowed(build_modules(entries), bench.protocol)
            except ConfigError:
                yield key, case | {"refused": protocol}
                continue
            modules = bench.modules(entries, folder / protocol)
            if exact and key.rpartition(" ")[0] in {"dense", *("+".join(names) for names in MEASURED)}:
                yield key, case | {"numbers": _all_passes(bench, modules)}
                continue
            dense = bench.dense if modules else None
            scores = score(bench.model, bench.scored, bench.protocol, bench.windows.token_bytes, modules=modules, dense=dense)
            bytes_kept = {"kv_bytes_billed": scores.kv_bytes_billed, "kv_bytes_resident": scores.kv_bytes_resident}
            found = case | {"numbers": _of_scores(scores.windows, scores.trace) | bytes_kept}
            yield key, found if exact else found | {"format": coarsest(modules)}


def coarsest(modules: list[RuntimeModule]) -> str:
    """The number format with the widest bound; `threshold` of a module that leaves out activations below one."""
    if any(isinstance(module, Transform) and module.skippable_flops for module in modules):
        return "threshold"
    return max((module.number_format for module in modules), key=list(BOUNDS).index, default="float32")


def _as_offered(entries: Mapping[str, Any], bench: _Bench) -> dict[str, Any]:
    """With the first kernel of small numbers that this processor has, where the case names one."""
    if "fastest_linear" not in entries:
        return dict(entries)
    weights = [weight_of(linear) for linear in linears_of(architecture_of(bench.model).layers)]
    for name in ("int_mm", "qlinear", "weight_only", "bfloat16"):
        if all(KERNELS[name].fits(weight, WINDOW) for weight in weights):
            return {"fastest_linear": {**entries["fastest_linear"], "product": name}}
    raise AssertionError("no kernel of small numbers is offered here, not even bfloat16")


def _of_scores(windows: Any, trace: Trace | None) -> dict[str, Any]:
    columns = {name: windows[name].tolist() for name in windows.columns if name != "window"}
    return {"active_tokens": trace.active_counts().tolist(), "decisions": _digest(trace), "windows": columns}


def _all_passes(bench: _Bench, modules: list[RuntimeModule]) -> dict[str, Any]:
    windows = dataclasses.replace(bench.windows, ids=bench.scored)
    shared = Bench(bench.model, windows, bench.protocol, modules, batch_windows=BATCH)
    passes = {"quality": Quality(), "null": Null(), "audit": Audit(probes=1), "flops": Flops(), "memory": Memory()}
    found = {name: encoded(result) for name, result in run_measurements(shared, passes).items()}
    numbers = _of_scores(shared.frame, shared.trace)
    for name in ("kv_bytes_billed", "kv_bytes_resident"):
        numbers[name] = found["quality"][name]
    numbers["null"], numbers["batch_flops"] = found.get("null"), found["flops"]
    numbers["kv_bytes_by_layer"] = found["memory"]["kv_bytes_by_layer"]
    numbers["audit"] = {name: found["audit"][name] for name in ("max_abs_logit", "positions")}
    # Of what was seen inside a text: the sum of each signal's sizes over layers and tokens.
    arrays = look_inside(bench.model, bench.scored[0, :PROMPT], modules).arrays
    numbers["inside"] = {name: float(array.nan_to_num().double().abs().sum()) for name, array in sorted(arrays.items())}
    return numbers


def _digest(trace: Trace) -> str:
    """Of every decision; the weights of fusions are floats and show in the sums."""
    whole = hashlib.sha256()
    for one in trace.passes:
        names = ("valid", "halt_layer", "halted_kv", "resume_layer", "kv_layer", "fused_layer")
        arrays = [getattr(one, name) for name in names]
        for events, of in (("fusions", "into"), ("precisions", "bits"), ("merges", "into"), ("evictions", "gone")):
            for event in getattr(one, events):
                whole.update(f"{events} {event.layer} ".encode())
                arrays.append(getattr(event, of))
        for array in arrays:
            whole.update(f"{tuple(array.shape)} ".encode() + array.long().cpu().numpy().astype("<i8").tobytes())
    return whole.hexdigest()[:16]


# --- comparing ------------------------------------------------------------------------------------------------------------------
def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """What of `found` is not what was expected, one line each; floats within `SAME` are equal, further keys no matter."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        inside = [(one, found.get(key), f"{where}.{key}" if where else str(key)) for key, one in expected.items()]
        return [line for part in inside for line in differences(*part)]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [line for i, pair in enumerate(zip(expected, found, strict=True)) for line in differences(*pair, f"{where}[{i}]")]
    if isinstance(expected, float) and isinstance(found, float | int):
        same = abs(found - expected) <= SAME * max(abs(expected), 1e-3)
    else:
        same = expected == found and type(expected) is type(found)
    return [] if same else [f"{where}: {found!r}, not {expected!r}"]


def _places(content: Any, where: str = "") -> set[str]:
    """Where something stands in nested objects."""
    entries = content.items() if isinstance(content, Mapping) else ()
    return {where}.union(*(_places(one, f"{where}.{key}") for key, one in entries))


def load() -> dict[str, Any]:
    """golden.json: `numerics_version` and `cases`."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def compare(golden: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise a QuickSilverError where the golden run (`found`, of `run`) is not what is written down (`golden`, of `load`): what differs, and what to
    do about it."""
    if golden["numerics_version"] != numerics.VERSION:
        raise QuickSilverError(
            f"quicksilver/numerics.py says version {numerics.VERSION} and {GOLDEN.name} is of version {golden['numerics_version']}: "
            f"write it anew with `{_COMMAND}`."
        )
    known = golden["cases"]
    unwritten = [key for key in [*found, *known] if (key in found) != (key in known)] + _changed_with_their_modules(known, found)
    unwritten += [key for key in found if key in known and _places(found[key]) > _places(known[key])]
    if unwritten:
        raise QuickSilverError(
            f"{GOLDEN.name} is not of today's modules and measurements ({', '.join(unwritten[:4])}): run `{_COMMAND}`. No version is to be "
            "raised."
        )


def _changed_with_their_modules(known: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Cases whose numbers changed because their modules' options did; a QuickSilverError where those of others changed."""
    changed = {}
    for key in found.keys() & known.keys():
        before, now = ({part: case.get(part) for part in ("numbers", "refused")} for case in (known[key], found[key]))
        if lines := differences(before, now):
            changed[key] = lines
    broken = [key for key in found if key in changed and known[key]["modules"] == found[key]["modules"]]
    if broken:
        key = broken[0]
        raise QuickSilverError(
            f"The numbers of {len(broken)} of {len(found)} golden cases changed and the numerics version did not; the first is "
            f"{key}: {'; '.join(changed[key][:3])}. If the change is meant, raise VERSION in quicksilver/numerics.py, say there why, and "
            f"run `{_COMMAND}`. If not, undo it: existing records would no longer be what this code computes."
        )
    return [key for key in found if key in changed]


def rounding(found: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any]) -> dict[str, float]:
    """By case of `run(exact=False)`, the largest relative difference of a window's negative log-likelihood from float64, which golden.json has."""
    apart = {}
    for key, case in found.items():
        if "numbers" in case:
            ours, theirs = (torch.tensor(one["numbers"]["windows"]["nll_nats"]).double() for one in (case, known[key]))
            apart[key] = float(((ours - theirs).abs() / theirs).max())
    return apart


def written() -> dict[str, Any]:
    """The content of golden.json as this code computes it; a QuickSilverError where numbers changed and the version did not, and of a decision
    that hangs on the last digits."""
    found = dict(run())
    for key, case in run(exact=False):
        if case.get("format") == "float32" and case["numbers"]["decisions"] != found[key]["numbers"]["decisions"]:
            raise QuickSilverError(f"{key}: a decision differs in float32, so it hangs on the last digits. Choose other options.")
    if GOLDEN.is_file() and (golden := load())["numerics_version"] == numerics.VERSION:
        _changed_with_their_modules(golden["cases"], found)
    return {"numerics_version": numerics.VERSION, "cases": found}


def main() -> None:
    """Compare, or write; exit 1 when the numbers are not those written down."""
    try:
        if sys.argv[1:] == ["--write"]:
            content = written()  # a line for each case, so that a difference between two versions of the file names the cases
            cases = ",\n".join(f"  {json.dumps(key)}: {json.dumps(case)}" for key, case in content["cases"].items())
            text = f'{{"numerics_version": {content["numerics_version"]}, "cases": {{\n{cases}\n}}}}\n'
            GOLDEN.write_text(text, encoding="utf-8")
            print(f"{GOLDEN} is of numerics version {numerics.VERSION}.")
        elif sys.argv[1:]:
            raise ConfigError(f"{' '.join(sys.argv[1:])}: the only option is --write.")
        else:
            compare(load(), dict(run()))
            print(f"The golden run gives the numbers of version {numerics.VERSION}.")
    except QuickSilverError as error:
        print(f"quicksilver: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
