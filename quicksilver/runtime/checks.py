"""What `apply` refuses: modules that do not go with the model, or with each other."""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError, UnsupportedModelError
from quicksilver.runtime.module import KINDS, RuntimeModule, SpanPolicy, TokenPolicy, Transform
from quicksilver.runtime.precision import PrecisionExecutor
from quicksilver.runtime.visibility import Span


def check_modules(arch: Architecture, modules: Sequence[RuntimeModule], decision_layers: Sequence[int] | None) -> None:
    """Bind `modules` to the model.

    Raises:
        ConfigError: a decision layer the model lacks, or at which a module would never be asked; a module of no kind, or that refuses the
            model; two that change the same thing.
        UnsupportedModelError: an attention implementation that cannot mask tokens by slot.
    """
    wrong = [layer for layer in decision_layers or () if not 0 <= layer < arch.n_layers]
    if wrong:
        raise ConfigError(f"decision_layers={wrong} do not exist: the model has layers 0 to {arch.n_layers - 1}.")
    for module in modules:
        if not isinstance(module, KINDS):
            raise ConfigError(
                f"{type(module).__name__} is no kind of runtime module: derive it from one or more of "
                f"{', '.join(kind.__name__ for kind in KINDS)}."
            )
    transforms = [module for module in modules if isinstance(module, Transform)]
    deciding = [module for module in modules if not isinstance(module, Transform)]
    for module in (*transforms, *sorted(deciding, key=lambda module: module.priority)):
        module.bind(arch)
    policies = [module for module in deciding if isinstance(module, TokenPolicy)]
    check_together(modules)
    _check_decision_layers(arch, policies, decision_layers)
    if deciding and arch.attention_implementation not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"attn_implementation={arch.attention_implementation!r} cannot mask tokens by slot; load the model with 'sdpa' or 'eager'."
        )
    _check_number_formats(transforms, policies)
    if arch.ranks.size > 1:
        _check_cut(transforms, policies)


def _check_cut(transforms: Sequence[Transform], policies: Sequence[TokenPolicy]) -> None:
    changing = [transform for transform in transforms if transform.changes_weights]
    whole = [type(one).__name__ for one in (*changing, *(policy for policy in policies if policy.precision is not None))]
    if whole:
        raise ConfigError(
            f"{whole[0]} changes what the weights are multiplied as, and this model's are cut among processes (tensor parallelism): spread its "
            "layers over the devices instead (model.device_map=auto), or leave the module out."
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


def _check_decision_layers(arch: Architecture, policies: Sequence[TokenPolicy], decision_layers: Sequence[int] | None) -> None:
    if not decision_layers:
        return
    for policy in policies:
        missing = sorted(policy.required_layers() - set(decision_layers))
        if missing:
            raise ConfigError(
                f"decision_layers={sorted(set(decision_layers))}: {type(policy).__name__} decides after layer "
                f"{', '.join(map(str, missing))} too. Add {'it' if len(missing) == 1 else 'them'}."
            )
        would = [layer for layer in range(arch.n_layers) if policy.acts_at(layer)]
        if would and set(decision_layers).isdisjoint(would):
            raise ConfigError(
                f"decision_layers={sorted(set(decision_layers))}: {type(policy).__name__} would never be asked, it acts after "
                f"layer {', '.join(map(str, would))}. Add one of these."
            )


def _check_number_formats(transforms: Sequence[Transform], policies: Sequence[TokenPolicy]) -> None:
    changed = [type(transform).__name__ for transform in transforms if transform.changes_weights]
    quantising = [type(policy).__name__ for policy in policies if policy.precision is not None]
    if len(quantising) > 1:
        raise ConfigError(f"{len(quantising)} modules set precision; give one.")
    if len(changed) > 1 or (changed and quantising):
        raise ConfigError(f"{' and '.join([*changed, *quantising])} all change what the weights are multiplied as; give one.")


def the_precision(policies: Sequence[TokenPolicy]) -> PrecisionExecutor | None:
    """Who executes widths, of policies that were checked."""
    return next((policy.precision for policy in policies if policy.precision is not None), None)


def the_span(layer: int, policies: Sequence[SpanPolicy]) -> Span | None:
    """How far back the queries of `layer` see.

    Raises:
        ConfigError: two policies limit it.
    """
    spans = [span for policy in policies if (span := policy.span(layer)) is not None]
    if len(spans) > 1:
        raise ConfigError(f"{len(spans)} modules limit how far back the queries of layer {layer} see; give one.")
    return spans[0] if spans else None
