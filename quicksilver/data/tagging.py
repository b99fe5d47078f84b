"""Tags for text that has none: spaCy's English models where one is installed, else a perceptron trained on a treebank with gold tags.

Not gold: with the tags comes a sentence that names the tagger and the share of a held-out treebank's words that it tags right."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from quicksilver.data.annotation import Annotation, check_tags, table
from quicksilver.data.sources import below
from quicksilver.data.spec import TaggerConfig
from quicksilver.data.treebank import Sentence, sentences
from quicksilver.files import write_atomically
from quicksilver.runtime.errors import ConfigError, installing
from quicksilver.runtime.reading import read_bytes, read_json

SPACY_MODELS = ("en_core_web_trf", "en_core_web_lg", "en_core_web_md", "en_core_web_sm")
PERCEPTRON = "perceptron"
_WORD = re.compile(r"\S+")
_ENDS = frozenset(".?!")
_AUXILIARY = "|AUX"  # behind a tag: what the treebank's universal tag calls AUX
# Words that WikiText has and no treebank: what the tagger reads for them, and their tag whatever it says (it would take them for numbers and
# names): hyphens and points within a word, marks of a heading, dashes.
_MARKS = {"@-@": ("-", "HYPH"), "@,@": (",", ","), "@.@": (".", "."), "=": ("=", "NFP"), "–": ("–", ":"), "—": ("—", ":")}
_PASSES = 3  # over the training sentences
Tagged = list[tuple[str, bool]]  # Penn tag, and whether it is an auxiliary, by word


def tag_text(text: str, config: TaggerConfig, root: Path | None, cache: Path | None) -> tuple[Annotation, str]:
    """Annotation of a text whose words are parted by white space (WikiText), and the sentence that says whose tags these are.

    Args:
        root: data.root, where the treebanks of `config` lie.
        cache: folder that keeps the tags, as training and tagging take a minute.

    Raises:
        ConfigError: no tagger that was asked for, a missing treebank, a text without words.
    """
    words = [match.span() for match in _WORD.finditer(text)]
    if not words:
        raise ConfigError("the text has no word to be tagged.")
    forms = [text[start:end] for start, end in words]
    sentence, number = [], 0  # one ends with its mark, or with its line
    for form, (_, end), (following, _) in zip(forms, words, [*words[1:], (len(text), 0)], strict=True):
        sentence.append(number)
        number += form in _ENDS or "\n" in text[end:following]
    tags, said = _kept(text, forms, sentence, config, root, cache)
    plain = [tag.removesuffix(_AUXILIARY) for tag in tags]
    check_tags("penn", plain, [f"word {number} ({form}), {said}" for number, form in enumerate(forms, 1)])
    upos = np.array(["AUX" if tag.endswith(_AUXILIARY) else "" for tag in tags])
    starts, ends = np.array(words).T
    names = np.array([f"sentence {number + 1}" for number in range(sentence[-1] + 1)])
    return Annotation(
        "penn", starts, ends, np.array(plain), upos, np.array(sentence), names, np.full(len(words), ""), np.zeros(len(words), dtype=int)
    ), said  # fmt: skip


def _kept(
    text: str, forms: list[str], sentence: list[int], config: TaggerConfig, root: Path | None, cache: Path | None
) -> tuple[list[str], str]:
    """Tags, kept in `cache` by text, tagger and treebanks; and what is said of them."""
    chosen = _chosen(config.name)
    banks = [_treebank(below(root, name)) for name in (config.train, config.test)]
    digests = [hashlib.sha256(content).hexdigest() for content in (text.encode(), *banks)]
    key = hashlib.sha256(json.dumps([asdict(config), chosen, _MARKS, *digests]).encode()).hexdigest()
    path = None if cache is None else cache / f"tags-{key[:20]}.json"
    if path is not None and path.is_file():
        content = read_json(path)
        return content["tags"], content["said"]
    train, test = (
        sentences(content.decode("utf-8"), str(name)) for content, name in zip(banks, (config.train, config.test), strict=True)
    )
    tagger = _Perceptron(train) if chosen == PERCEPTRON else _Spacy(chosen)
    grouped: list[list[str]] = [[] for _ in range(sentence[-1] + 1)]
    for form, number in zip(forms, sentence, strict=True):
        grouped[number].append(_MARKS[form][0] if form in _MARKS else form)
    said_of = (tag + _AUXILIARY * auxiliary for one in tagger.tag(grouped) for tag, auxiliary in one)
    tags = [_MARKS[form][1] if form in _MARKS else tag for form, tag in zip(forms, said_of, strict=True)]
    found = tagger.tag([one.forms for one in test])
    right = [gold == tag for one, said in zip(test, found, strict=True) for gold, (tag, _) in zip(one.tags, said, strict=True)]
    said = f"tagged by {tagger.name}: {100 * sum(right) / len(right):.1f}% of the {len(right):,} words of {Path(config.test).name} are right"
    if path is not None:
        write_atomically(path, json.dumps({"tags": tags, "said": said}).encode())
    return tags, said


def _chosen(name: str) -> str:
    """`perceptron`, or the name of a spaCy model that is installed."""
    if name == PERCEPTRON:
        return name
    if name == "auto":
        return next((model for model in SPACY_MODELS if find_spec("spacy") and find_spec(model)), PERCEPTRON)
    if not (find_spec("spacy") and find_spec(name)):
        raise ConfigError(
            f"dataset.tagger.name={name}: that spaCy model is not installed. Install it (python -m spacy download {name}), or give "
            "dataset.tagger.name=perceptron, which is trained on a treebank."
        )
    return name


def _treebank(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise ConfigError(
            f"dataset.tagger: the treebank {path} cannot be read ({error.strerror}), which the tagger is trained or judged on. Give data.root=/folder, or "
            "dataset.tagger.train=… and dataset.tagger.test=…"
        ) from None


class _Perceptron:
    """NLTK's averaged perceptron, trained here."""

    def __init__(self, train: Sequence[Sentence]) -> None:
        try:
            from nltk.tag.perceptron import PerceptronTagger
        except ImportError:
            raise ConfigError(
                f"dataset.tagger.name=perceptron needs nltk, which is not installed: {installing('linguistics')}."
            ) from None
        self._tagger: Any = PerceptronTagger(load=False)
        gold = [
            [
                (form, tag + _AUXILIARY * (upos == "AUX"))
                for form, tag, upos in zip(one.forms, one.tags, one.upos, strict=True)
                if tag in table()["penn"]
            ]
            for one in train
        ]
        self._tagger.train([one for one in gold if one], nr_iter=_PASSES)
        self.name = f"an averaged perceptron (nltk {version('nltk')}) trained on {len(gold):,} sentences with gold tags"

    def tag(self, sentences: Sequence[Sequence[str]]) -> Iterator[Tagged]:
        for one in sentences:
            yield [(tag.removesuffix(_AUXILIARY), tag.endswith(_AUXILIARY)) for _, tag in self._tagger.tag(list(one))]


class _Spacy:
    """A spaCy model, given the words as they are."""

    def __init__(self, model: str) -> None:
        import spacy

        self._model: Any = spacy.load(model, exclude=["ner", "lemmatizer"])
        self.name = f"spaCy's {model} {version(model)}"

    def tag(self, sentences: Sequence[Sequence[str]]) -> Iterator[Tagged]:
        from spacy.tokens import Doc

        for document in self._model.pipe(Doc(self._model.vocab, words=list(one)) for one in sentences):
            yield [(token.tag_, token.pos_ == "AUX") for token in document]
