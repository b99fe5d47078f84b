"""Composing many runs that differ in a few words.

Hydra reads and merges every yaml again for each run, most of a second. Here what the groups give (`modules=[halting]`) is composed by Hydra
once; words that only give a value (`modules.halting.tau_drift=p10`) are then set in a copy of it, as Hydra does after its groups. What is
neither, and whatever goes wrong, Hydra composes from the start, so that its words are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from quicksilver.harness.choices import config_dir
from quicksilver.harness.config import RunConfig, check_words, run_config
from quicksilver.harness.explain import explain
from quicksilver.harness.hydra_section import check_files, check_hydra
from quicksilver.harness.launchers import forget_schemas
from quicksilver.harness.overrides import is_value, parsed, quoted, with_values
from quicksilver.runtime.errors import ConfigError


@contextmanager
def hydra_started(extra_dirs: Sequence[Path] = ()) -> Iterator[None]:
    """Within, Hydra composes from conf/ and from folders of the user's own.

    Raises:
        ConfigError: a folder that is not there, or a file in it that is no yaml.
    """
    for folder in extra_dirs:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder.")
    check_files(extra_dirs)
    Plugins.instance()  # finds the launchers that are installed
    forget_schemas()
    outer = GlobalHydra.instance().hydra  # a launcher's worker is started by a Hydra of its own
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            path: ConfigSearchPath = GlobalHydra.instance().config_loader().get_search_path()
            for folder in extra_dirs:
                # The schema stays last.
                path.prepend("command-line", f"file://{folder.absolute()}", anchor="schema")
            if extra_dirs:  # the loader keeps the sources it found
                _search_again(path)
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def _search_again(path: ConfigSearchPath) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    hydra.config_loader = ConfigLoaderImpl(config_search_path=path)


class Composer:
    """Composes run after run, within `hydra_started`."""

    def __init__(self, extra_dirs: Sequence[Path] = ()) -> None:
        """
        Args:
            extra_dirs: folders of the user's own, those of `hydra_started`.
        """
        self._extra_dirs = tuple(extra_dirs)
        self._bases: dict[tuple[str, ...], DictConfig] = {}
        self._checked: set[tuple[str, ...]] = set()

    def compose(self, overrides: Sequence[str]) -> RunConfig:
        """One run.

        Raises:
            ConfigError: as `quicksilver.harness.config.compose`.
        """
        overrides = quoted(overrides)
        return run_config(self._raw(overrides), overrides)

    def _raw(self, overrides: list[str]) -> DictConfig:
        try:
            read = [parsed(text) for text in overrides]
        except HydraException as error:
            raise ConfigError(explain(error, overrides, self._extra_dirs)) from error
        groups = tuple(text for text, override in zip(overrides, read, strict=True) if not is_value(override))
        if groups not in self._checked:
            check_words(groups, self._extra_dirs)
            self._checked.add(groups)
        if groups not in self._bases:
            try:
                self._bases[groups] = self._by_hydra([*groups])
            except ConfigError:
                return self._by_hydra(overrides)  # a value may be what is missing, and all words are worth naming
        try:
            return with_values(self._bases[groups], read)
        except OmegaConfBaseException:
            return self._by_hydra(overrides)

    def _by_hydra(self, overrides: list[str]) -> DictConfig:
        check_words(overrides, self._extra_dirs)
        try:
            cfg = hydra_compose("run", overrides, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain(error, overrides, self._extra_dirs)) from error
        check_hydra(cfg.hydra)
        with open_dict(cfg):
            del cfg["hydra"]
        return cfg
