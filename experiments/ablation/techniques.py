"""Settings that several tables have, as data: the four mechanisms as Table 11 runs them, plain baselines, and this package's own schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from quicksilver.report.artefacts import Row

# claim in reported.yaml -> module in conf/modules, what the paper calls it; in the paper's order, which is also that of adding
MECHANISMS = {
    "halting": ("halting", "Token halting"),
    "kv_skipping": ("kv_skipping", "KV skipping"),
    "fusion": ("token_fusion", "Token fusion"),
    "quantization": ("adaptive_quantization", "Quantization"),
}


# The model of conf/run.yaml. Its settings are those of every model that none were searched for.
FIRST = "far-gpt2"


def of_each(row: Row, overrides: Mapping[str, tuple[str, ...]]) -> Row:
    """The row with the overrides of each model, by its name."""
    return replace(row, overrides=overrides[FIRST], of_model=overrides)


def options(module: str, **values: object) -> tuple[str, ...]:
    """The overrides that give these options of a module their values."""
    return tuple(f"modules.{module}.{name}={value}" for name, value in values.items())


# Tokens of a prompt -> the shares of them that truncation keeps, so that it saves 40 and 50% of the work: late tokens attend to more.
KEPT = {128: (0.61, 0.512), 256: (0.62, 0.524), 448: (0.635, 0.538), 960: (0.66, 0.57)}


def truncations(prompt_tokens: int) -> dict[str, tuple[str, ...]]:
    """Settings that keep the newest tokens of such a prompt, at 40 and at 50% of its work. Nothing is fitted, and no layer sees what is cut."""
    cut = (("prompt_truncation", *options("prompt_truncation", keep=share)) for share in KEPT[prompt_tokens])
    return dict(zip(("truncated", "truncated_50"), cut, strict=True))


TRUNCATIONS = truncations(448)
# Fusion at a fixed share of each prompt, so that its null (random neighbours) has the same budget.
FUSION = options("token_fusion", rule="capacity", tau_fuse="null")
# Alone, KV skipping cannot follow halting (2.2): it skips the half of the tokens that gets least attention (C.2).
ALONE = options("kv_skipping", criterion="attention", skipped_share=0.5, min_depth=0.4)
# name -> modules, then overrides. All that drop, fuse, cut or predict tokens save about 40% of a prompt's work, but for those called otherwise.
SETTINGS: dict[str, tuple[str, ...]] = {
    "attention": ("halting_attention",),
    "position": ("halting_attention", "modules.halting.signal=position"),
    "drift": ("halting_attention", "modules.halting.signal=drift"),
    "random": ("halting_attention", "modules.halting.signal=random"),
    "fusion": ("token_fusion_attention",),
    **TRUNCATIONS,
    "truncated_ends": (*TRUNCATIONS["truncated"], "modules.prompt_truncation.which=ends"),
    "learned": ("learned_halting",),
    # The model's own schedules (docs/predicted-kv.md).
    "40": ("quicksilver",),
    "50": ("quicksilver_50",),
    "60": ("quicksilver", "modules.quicksilver.save=0.6"),
    "bfloat16": ("bfloat16",),
    "int8": ("int8_dynamic",),
    "blocks": ("block_attention",),
}


def row_of(
    panel: str, section: str, key: str, technique: str, modules: str, *always: str, overrides: tuple[str, ...] = ()
) -> Row:
    """The row of a run with `modules` (separated by commas, empty: dense) between what its whole panel has and further overrides."""
    words = (*always, f"modules=[{modules}]", *overrides)
    return Row(panel, section, key, technique, words, tuple(modules.split(",")) if modules else ())


# key -> what is printed, and the name of its settings where the key does not say it
Members = Mapping[str, str | tuple[str, str]]


def composed(panel: str, section: str, key: str, technique: str, parts: Sequence[tuple[str, ...]], *always: str) -> Row:
    """The row of several settings (modules, then overrides) together."""
    overrides = tuple(word for one in parts for word in one[1:])
    return row_of(panel, section, key, technique, ",".join(one[0] for one in parts), *always, overrides=overrides)


def chosen(
    panel: str, members: Members, *always: str, section: str = "", settings: Mapping[str, tuple[str, ...]] = SETTINGS
) -> Iterator[Row]:
    """A row for each key, with what is printed; the key's last parts name its settings (`40.bfloat16` has two), or a second text does."""
    for key, printed in members.items():
        technique, name = (printed, key) if isinstance(printed, str) else printed
        found = [settings[part] for part in name.split(".") if part in settings]
        assert found, f"{name} names no setting"
        yield composed(panel, section, key, technique, found, *always)


def panel_rows(
    panel: str, sections: Mapping[str, Members], *always: str, own: Mapping[str, tuple[str, ...]] | None = None
) -> Iterator[Row]:
    """Dense and the rows of a panel by section; `own`: settings of this table beside the shared ones."""
    yield row_of(panel, "", "dense", "Dense", "", *always)
    for section, members in sections.items():
        yield from chosen(panel, members, *always, section=section, settings=SETTINGS | dict(own or {}))


def steps(panel: str, *always: str, reported: str = "") -> Iterator[Row]:
    """Every mechanism alone, then one after another; `reported`: before the row's key, the id of what the paper says of it."""
    for heading in ("Isolated", "Cumulative"):
        modules, overrides = "", tuple[str, ...]()
        for claim, (module, technique) in MECHANISMS.items():
            more = FUSION if claim == "fusion" else ()
            if heading == "Cumulative":
                technique, modules, overrides = f"+ {technique}", f"{modules},{module}".strip(","), (*overrides, *more)
            else:
                modules, overrides = module, ALONE if claim == "kv_skipping" else more
            key = f"{heading.lower()}.{claim}"
            found = row_of(panel, heading, key, technique, modules, *always, overrides=overrides)
            yield replace(found, reported=f"{reported}{key}") if reported else found
