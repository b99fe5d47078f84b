"""Annotated text: words with their classes and phrases, which tokens each word is, and where annotation comes from.

Treebanks (CoNLL-U files and bracketed trees) are read and checked. Text without tags is tagged: by a spaCy model where one is
installed, else by a perceptron trained on a treebank with gold tags. Not gold: with the tags comes a sentence that names the tagger
and the share of a held-out treebank's words that it tags right.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from itertools import chain, groupby, pairwise, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml

from quicksilver.data.sources import below
from quicksilver.data.spec import Part, TaggerConfig
from quicksilver.files import write_atomically
from quicksilver.runtime.errors import ConfigError, installing
from quicksilver.runtime.reading import read_bytes, read_json


@dataclass(frozen=True)
class Annotation:
    """Of a text with M words in S sentences.

    Attributes:
        tagset: `penn` or `upos`: which tags `tag` holds.
        start, end: (M,) int, characters of the text that the word takes up, end exclusive. Words ascend.
        tag: (M,) str, of that tag set; upos: (M,) str, the universal tag, empty where the treebank has none.
        sentence: (M,) int, number of the word's sentence; sentence_ids: (S,) str, its name in the treebank.
        joint_label, joint_words: (M,) str and int, label of the smallest constituent that holds this word and the next one of its
            sentence, and how many words that has; empty and 0 where the sentence ends or has no tree.
    """

    tagset: str
    start: np.ndarray
    end: np.ndarray
    tag: np.ndarray
    upos: np.ndarray
    sentence: np.ndarray
    sentence_ids: np.ndarray
    joint_label: np.ndarray
    joint_words: np.ndarray

    @property
    def has_trees(self) -> bool:
        """Whether any sentence has constituents."""
        return bool((self.joint_words > 0).any())

    @cached_property
    def digest(self) -> str:
        """sha256 of all of it."""
        whole = hashlib.sha256(self.tagset.encode())
        for column in (self.start, self.end, self.sentence, self.joint_words):
            whole.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        for words in (self.tag, self.upos, self.sentence_ids, self.joint_label):
            whole.update("\t".join(map(str, words)).encode())
        return whole.hexdigest()


CLASSES = ("determiner", "preposition", "conjunction", "pronoun", "auxiliary", "content", "other")
FUNCTION = CLASSES[:5]  # those that the paper calls function words
Reading = Literal["ours", "paper"]


@cache
def table() -> Mapping[str, Any]:
    """The yaml: tag set -> tag -> class, or [ours, the paper's]."""
    return yaml.safe_load(files(__package__).joinpath("word_classes.yaml").read_text(encoding="utf-8"))


def check_tags(tagset: str, tags: Sequence[str], places: Sequence[str]) -> None:
    """Raises ConfigError at the first tag that is not in the tag set, with its place."""
    known = table()[tagset]
    for tag, place in zip(tags, places, strict=True):
        if tag not in known:
            other = next((name for name in table() if tag in table()[name]), None)
            hint = f" It is one of {other}: dataset.reader=treebank{'-upos' if other == 'upos' else ''}." if other else ""
            raise ConfigError(f"{place}: {tag!r} is no tag of the {tagset} tag set ({', '.join(list(known)[:6])} …).{hint}")


def classes(annotation: Annotation, reading: Reading = "ours") -> np.ndarray:
    """The class of every word, (M,) str. `ours`: an auxiliary is what the treebank calls AUX, so that lexical verbs in the present
    tense are content words. `paper`: by the Penn tag alone, where MD, VBZ and VBP are "auxiliary verbs"."""
    entries = table()[annotation.tagset].items()
    by_tag = {tag: entry if isinstance(entry, str) else entry[reading == "paper"] for tag, entry in entries}
    found = np.array([by_tag[tag] for tag in annotation.tag], dtype=object)
    if reading == "ours":
        found[annotation.upos == "AUX"] = "auxiliary"
    return found.astype(str)


# Articles and determiners, prepositions, conjunctions, pronouns, auxiliaries, particles (after Huddleston and Pullum 2002, ch. 1 and 2).
_LIST = """
    a an the this that these those some any no every each either neither both all such what which whose of in to for with on
    at from by about as into like through after over between out against during without before under around among above
    below up down off near since until within along across behind beyond upon via per than and or but nor so yet if because
    although though while whereas unless whether when where how why i you he she it we they me him her us them my your his
    its our their mine yours hers ours theirs myself itself themselves who whom one be am is are was were been being have
    has had having do does did done will would shall should can could may might must not never there here also only then too
    very just
"""
FUNCTION_WORDS = frozenset(_LIST.split())
FUNCTION_OR_CONTENT = ("function", "content", "other")


def word_classes(tokens: Sequence[str]) -> list[str]:
    """The class of the word that each token is a part of: `function`, `content`, or `other` (no letters: digits, marks, white space).
    A token that begins with a space, or follows one that is no letter, begins a word."""
    within = [before[-1:].isalpha() and token[:1].isalpha() for before, token in pairwise(["", *tokens])]
    classes: list[str] = []
    for start, end in pairwise([*(i for i, inside in enumerate(within) if not inside), len(tokens)]):
        word = "".join(tokens[start:end]).strip().lower()
        kind = "other" if not any(map(str.isalpha, word)) else "function" if word in FUNCTION_WORDS else "content"
        classes += [kind] * (end - start)
    return classes


# What an option called `…_ids` may name instead of words (quicksilver.runs.parts): which tokens of a vocabulary are meant, by their text.
TOKEN_SETS: dict[str, Callable[[str], bool]] = {
    "@function_words": lambda text: text.strip().lower() in FUNCTION_WORDS,
    "@with_letters": lambda text: any(map(str.isalpha, text)),
    "@begins_with_a_letter": lambda text: text[:1].isalpha(),  # goes on with a word, after a token that ends with a letter
    "@ends_with_a_letter": lambda text: text[-1:].isalpha(),
}


def token_set(name: str, tokenizer: Any) -> list[int]:
    """Ids of the tokens of a vocabulary that belong to a set of `TOKEN_SETS`."""
    return [number for number in range(len(tokenizer)) if TOKEN_SETS[name](tokenizer.decode([number]))]


@dataclass(frozen=True)
class AnnotatedTokens:
    """Windows (W, N) of tokens over an annotated text; M words.

    Attributes:
        annotation: of the words.
        word: (W, N) int, the word a token belongs to, -1 where it is of none (white space). A token that touches several words belongs
            to the one with most characters in it, the first of equals.
        touched: (W, N) int, how many words a token touches.
        piece: (W, N) int, number of the token within its word, from 0; pieces: (W, N) int, how many tokens its word has in the text.
        occurrences: (W, N) int, how often the token occurs in the whole text.
        sentence_tokens: (W, N) int, how many tokens the sentence of its word has; 0 where it is of none.
    """

    annotation: Annotation
    word: np.ndarray
    touched: np.ndarray
    piece: np.ndarray
    pieces: np.ndarray
    occurrences: np.ndarray
    sentence_tokens: np.ndarray


def align(annotation: Annotation, ids: np.ndarray, offsets: np.ndarray, taken: np.ndarray) -> AnnotatedTokens:
    """Align the tokens of a text with its words. Raises ConfigError: a word that no token touches; names it. `ids` (T,) are the
    token ids of the whole text, `offsets` (T, 2) the characters that each takes up, end exclusive; `taken` (W, N) int says which
    tokens the windows hold."""
    start, end = annotation.start, annotation.end
    first = np.searchsorted(end, offsets[:, 0], side="right")  # first word that ends behind the token's beginning
    behind = np.searchsorted(start, offsets[:, 1], side="left")  # first word that begins behind the token's end
    touched = np.maximum(behind - first, 0)
    word = np.where(touched > 0, first, -1)
    for token in np.flatnonzero(touched > 1):
        candidates = np.arange(first[token], behind[token])
        shared = np.minimum(end[candidates], offsets[token, 1]) - np.maximum(start[candidates], offsets[token, 0])
        word[token] = candidates[shared.argmax()]
    reached = np.zeros(len(start) + 1, dtype=int)
    np.add.at(reached, first[touched > 0], 1)
    np.add.at(reached, behind[touched > 0], -1)
    if len(missed := np.flatnonzero(reached.cumsum()[:-1] == 0)):
        one = missed[0]
        place = f"(characters {start[one]} to {end[one]}, sentence {annotation.sentence_ids[annotation.sentence[one]]})"
        raise ConfigError(f"annotation and text do not align: no token of the model is of word {one} {place}.")
    belongs = word >= 0
    pieces = np.bincount(word[belongs], minlength=len(start))
    begins = np.concatenate([[True], word[1:] != word[:-1]])
    piece = np.arange(len(word)) - np.maximum.accumulate(np.where(begins, np.arange(len(word)), 0))
    lengths = np.bincount(annotation.sentence[word[belongs]], minlength=len(annotation.sentence_ids))
    columns = (word, touched, piece, np.where(belongs, pieces[word], 0), np.bincount(ids)[ids])
    of_sentence = np.where(belongs, lengths[annotation.sentence[word]], 0)
    return AnnotatedTokens(annotation, *(column[taken] for column in (*columns, of_sentence)))


# --- treebanks ------------------------------------------------------------------------------------------------------------------

_COLUMNS = 10


@dataclass
class Sentence:
    """One sentence.

    Attributes:
        name: its `sent_id`, or file and line.
        text: as it is written.
        begins: `document`, `paragraph` or "": what begins with it.
        forms, tags, upos: by word; `tags` are the treebank's own (XPOS).
        spans: by word, its characters in `text`, end exclusive.
        tree: (label, words) of the smallest constituent that holds each word and the next one; empty without a tree.
    """

    name: str
    text: str
    begins: str
    forms: list[str]
    tags: list[str]
    upos: list[str]
    spans: list[tuple[int, int]]
    tree: list[tuple[str, int]] = field(default_factory=list)


def sentences(content: str, source: str) -> list[Sentence]:
    """All sentences of a file; `source` is its name, for messages. Raises ConfigError: a line that is no CoNLL-U, a sentence
    without text, or words that are not in its text; names the first place."""
    numbered = enumerate((line.rstrip("\r") for line in content.split("\n")), 1)
    blocks = [list(lines) for blank, lines in groupby(numbered, lambda one: not one[1].strip()) if not blank]
    found = [_sentence(lines, source) for lines in blocks if any(not line.startswith("#") for _, line in lines)]
    if not found:
        raise ConfigError(f"{source} has no sentence: is it a CoNLL-U file?")
    return found


def _sentence(lines: list[tuple[int, str]], source: str) -> Sentence:
    comments: dict[str, str] = {}
    units: list[tuple[str, list[int]]] = []  # what is written as one, and the words that it stands for
    words: list[list[str]] = []  # form, universal tag, the treebank's tag
    covered = 0  # last word of the present multiword token
    for number, line in lines:
        if line.startswith("#"):
            key, _, value = line[1:].partition("=")
            comments[key.strip()] = value.strip()
            continue
        cells = line.split("\t")
        if len(cells) != _COLUMNS:
            raise ConfigError(f"{source}, line {number}: {len(cells)} columns where CoNLL-U has {_COLUMNS}, parted by tabs.")
        place, form = cells[:2]
        if "." in place:
            continue  # an empty node is not written
        if "-" in place:
            low, high = (int(end) if end.isdigit() else 0 for end in place.split("-", 1))
            if not len(words) < low <= high:
                raise ConfigError(f"{source}, line {number}: {place!r} is no range of words from {len(words) + 1} on.")
            units.append((form, list(range(low - 1, high))))
            covered = high
            continue
        if not place.isdigit() or int(place) != len(words) + 1:
            raise ConfigError(f"{source}, line {number}: word {place!r} where word {len(words) + 1} was expected.")
        if int(place) > covered:
            units.append((form, [len(words)]))
        words.append([form, *("" if tag == "_" else tag for tag in cells[3:5])])
    name = comments.get("sent_id", f"{source}, line {lines[0][0]}")
    if "text" not in comments:
        raise ConfigError(f"{source}, sentence {name}: it has no `# text = …`, so its words cannot be found in it.")
    if not covered <= len(words) > 0:
        raise ConfigError(f"{source}, sentence {name}: it has {len(words)} words, and a range up to {covered}.")
    begun = {key.partition(" ")[0] for key in comments}
    begins = "document" if "newdoc" in begun else "paragraph" if "newpar" in begun else ""
    forms, upos, tags = (list(column) for column in zip(*words, strict=True))
    spans = _spans(comments["text"], units, forms, f"{source}, sentence {name}")
    return Sentence(name, comments["text"], begins, forms, tags, upos, spans)


def _spans(text: str, units: list[tuple[str, list[int]]], forms: list[str], place: str) -> list[tuple[int, int]]:
    """Characters of every word. Words of one written unit share it in turn where they spell it, else each has all of it."""
    spans: dict[int, tuple[int, int]] = {}
    at, apart = 0, f"{place}: its words do not align with its text"
    for written, words in units:
        at = len(text) - len(text[at:].lstrip())
        if not text.startswith(written, at):
            raise ConfigError(f"{apart}: {written!r} was expected at character {at}, and there is {text[at : at + 20]!r}.")
        end = at + len(written)
        spelled = "".join(forms[word] for word in words) == written
        for word in words:
            spans[word] = (at, at + len(forms[word])) if spelled else (at, end)
            at = spans[word][1] if spelled else at
        at = end
    if left := text[at:].lstrip():
        raise ConfigError(f"{apart}: {left[:20]!r} at character {len(text) - len(left)} is no word.")
    return [spans[word] for word in range(len(forms))]


_BRACKET_OR_WORD = re.compile(r"\(\s*(?P<label>[^\s()]*)|\)|[^\s()]+")
_ESCAPED = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}


class Tree(NamedTuple):
    """Leaves of a tree; and by leaf, label and number of leaves of the smallest constituent that holds it and the next one."""

    leaves: list[str]
    joints: dict[int, tuple[str, int]]


def trees(content: str, source: str) -> list[Tree]:
    """The bracketings of a file, in their order. A label is the part before `-` and `=` (function tags): NP of NP-SBJ. Raises
    ConfigError: brackets that do not close, or a word outside of all brackets; names the tree."""
    found = [Tree([], {})]  # the last one is open
    stack: list[tuple[str, int, list[int]]] = []  # label, first leaf, first leaves of the children but the first child
    for match in _BRACKET_OR_WORD.finditer(content):
        tree, place = found[-1], f"{source}, tree {len(found)}"
        token, leaf = match[0], len(tree.leaves)
        if token == ")":
            if not stack:
                raise ConfigError(f"{place}: a bracket closes that was not opened.")
            label, first, later = stack.pop()
            plain = re.split(r"(?<!^)[-=]", label)[0]
            for child in later:
                if child < leaf:  # an empty constituent joins nothing
                    tree.joints.setdefault(child - 1, (plain, leaf - first))
            if not stack:
                found.append(Tree([], {}))
            continue
        if stack and leaf > stack[-1][1]:
            stack[-1][2].append(leaf)
        if token[0] == "(":
            stack.append((match["label"], leaf, []))
        elif stack:
            tree.leaves.append(token)
        else:
            raise ConfigError(f"{place}: {token!r} stands outside of all brackets.")
    if stack:
        raise ConfigError(f"{source}, tree {len(found)}: {len(stack)} brackets are not closed.")
    return found[:-1]


def joints(tree: Tree, words: Sequence[str], place: str) -> list[tuple[str, int]]:
    """Of every word of a sentence, label and number of words of the smallest constituent that holds it and the next word; ("", 0)
    of the last one. `place` is for messages. Raises ConfigError: a tree that does not cover its words."""
    plain = partial(re.sub, "|".join(_ESCAPED), lambda found: _ESCAPED[found[0]])
    for number, (leaf, word) in enumerate(zip_longest(tree.leaves, words), 1):
        if leaf is None or word is None or plain(leaf) != plain(word):
            apart = f"word {number} is {word!r} in the sentence and {leaf!r} in the tree"
            raise ConfigError(f"{place}: the tree does not cover its words: {apart}.")
    return [*(tree.joints[number] for number in range(len(words) - 1)), ("", 0)]


_JOINED_BY = {"document": "\n\n", "paragraph": "\n", "": " "}
_CALIBRATES = "dev"  # the section of splits.md; all other documents are scored
_DOCUMENT = re.compile(r"\s*\* (\S+)")


def read_treebank(path: Path, part: Part, tagset: str) -> tuple[str, Annotation]:
    """Text and annotation of a treebank: a CoNLL-U file, which is one part, or a folder with `dep/*.conllu`, `const/*.ptb` and
    `splits.md` (GUM). `tagset` is `penn`, the treebank's own tags, or `upos`, the universal ones. Raises ConfigError: a missing
    file, annotation that does not align with its text or with its tree, an unknown tag; names the first place."""
    found = _of_folder(path, part) if path.is_dir() else sentences(_content(path), path.name)
    return joined(found, tagset)


def joined(found: Sequence[Sentence], tagset: str = "penn") -> tuple[str, Annotation]:
    """Sentences as one text with its annotation."""
    text = ""
    spans: list[tuple[int, int]] = []
    for sentence in found:
        text += _JOINED_BY[sentence.begins] if text else ""
        spans += [(len(text) + start, len(text) + end) for start, end in sentence.spans]
        text += sentence.text
    upos = [tag for sentence in found for tag in sentence.upos]
    tags = upos if tagset == "upos" else [tag for sentence in found for tag in sentence.tags]
    places = [f"sentence {one.name}, word {number} ({form})" for one in found for number, form in enumerate(one.forms, 1)]
    check_tags(tagset, tags, places)
    labels, words = zip(*(joint for one in found for joint in one.tree or [("", 0)] * len(one.forms)), strict=True)
    numbers, names = [i for i, one in enumerate(found) for _ in one.forms], [one.name for one in found]
    return text, Annotation(tagset, *map(np.array, (*zip(*spans, strict=True), tags, upos, numbers, names, labels, words)))


def _of_folder(folder: Path, part: Part) -> list[Sentence]:
    sections = (section.splitlines() for section in _content(folder / "splits.md").split("\n## ")[1:])
    if (listed := next((lines for lines in sections if lines and lines[0].strip() == _CALIBRATES), None)) is None:
        raise ConfigError(f"splits.md has no section {_CALIBRATES!r}: it says which documents calibrate.")
    calibrating = {match[1] for match in map(_DOCUMENT.match, listed) if match}
    found: list[Sentence] = []
    for name in sorted(path.stem for path in (folder / "dep").glob("*.conllu")):
        if (name in calibrating) != (part == "calibration"):
            continue
        document = sentences(_content(folder / "dep" / f"{name}.conllu"), f"{name}.conllu")
        parsed = trees(_content(folder / "const" / f"{name}.ptb"), f"{name}.ptb")
        if len(parsed) != len(document):
            apart = f"{name} has {len(document)} sentences in dep/ and {len(parsed)} trees in const/"
            raise ConfigError(f"{folder}: {apart}: they are not of one release.")
        for sentence, tree in zip(document, parsed, strict=True):
            sentence.tree = joints(tree, sentence.forms, f"{name}.ptb, sentence {sentence.name}")
        found += document
    if not found:
        purpose = "calibrate on" if part == "calibration" else "score"
        raise ConfigError(f"{folder} has no document to {purpose}: {folder}/dep/*.conllu.")
    return found


def _content(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        remedy = "Give another data.root=/folder or dataset.files.test=…"
        raise ConfigError(f"{path} is missing: the treebank is not whole. {remedy}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


# --- tags that are not gold -----------------------------------------------------------------------------------------------------

SPACY_MODELS = ("en_core_web_trf", "en_core_web_lg", "en_core_web_md", "en_core_web_sm")
PERCEPTRON = "perceptron"
_WORD = re.compile(r"\S+")
_ENDS = frozenset(".?!")
_AUXILIARY = "|AUX"  # behind a tag: what the treebank's universal tag calls AUX
# Words that WikiText has and no treebank: what the tagger reads for them, and their tag whatever it says (it would take them for numbers and
# names): hyphens and points within a word, marks of a heading, dashes.
_MARKS = {"@-@": ("-", "HYPH"), "@,@": (",", ","), "@.@": (".", "."), "=": ("=", "NFP"), "–": ("–", ":"), "—": ("—", ":")}
_PASSES = 3  # over the training sentences
Tagger = Callable[[Iterable[list[str]]], Iterator[list[str]]]  # Penn tags by sentence; `_AUXILIARY` behind those of auxiliaries


def tag_text(text: str, config: TaggerConfig, root: Path | None, cache: Path | None) -> tuple[Annotation, str]:
    """Annotation of a text whose words are parted by white space (WikiText), and the sentence that says whose tags these are. The
    treebanks of `config` lie in `root`; `cache` keeps the tags, as training and tagging take a minute. Raises ConfigError: no
    tagger that was asked for, a missing treebank, a text without words."""
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
    upos = ["AUX" if tag.endswith(_AUXILIARY) else "" for tag in tags]
    names, count = [f"sentence {number + 1}" for number in range(sentence[-1] + 1)], len(words)
    return Annotation("penn", *np.array(words).T, *map(np.array, (plain, upos, sentence, names, [""] * count, [0] * count))), said


def _kept(
    text: str, forms: list[str], sentence: list[int], config: TaggerConfig, root: Path | None, cache: Path | None
) -> tuple[list[str], str]:
    """Tags, kept in `cache` by text, tagger and treebanks; and what is said of them."""
    chosen = _chosen(config.name)
    banks = [_treebank(below(root, name)) for name in (config.train, config.test)]
    digests = [hashlib.sha256(content).hexdigest() for content in (text.encode(), *banks)]
    key = hashlib.sha256(json.dumps([asdict(config), chosen, _MARKS, *digests]).encode()).hexdigest()
    path = None if cache is None else cache / f"tags-{key[:20]}.json"
    if path is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):  # not there yet, or damaged: tagged again
            content = read_json(path)
            return content["tags"], content["said"]
    train, test = (
        sentences(content.decode("utf-8"), str(name)) for content, name in zip(banks, (config.train, config.test), strict=True)
    )
    tagger, tag_all = _perceptron(train) if chosen == PERCEPTRON else _spacy(chosen)
    grouped: list[list[str]] = [[] for _ in range(sentence[-1] + 1)]
    for form, number in zip(forms, sentence, strict=True):
        grouped[number].append(_MARKS.get(form, (form,))[0])
    tags = [_MARKS.get(form, ("", tag))[1] for form, tag in zip(forms, chain.from_iterable(tag_all(grouped)), strict=True)]
    gold, found = (tag for one in test for tag in one.tags), chain.from_iterable(tag_all(one.forms for one in test))
    right = [tag == said.removesuffix(_AUXILIARY) for tag, said in zip(gold, found, strict=True)]
    share = f"{100 * sum(right) / len(right):.1f}% of the {len(right):,} words of {Path(config.test).name}"
    said = f"tagged by {tagger}: {share} are right"
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
        remedy = "Give data.root=/folder, or dataset.tagger.train=… and dataset.tagger.test=…"
        why = f"cannot be read ({error.strerror}), which the tagger is trained or judged on"
        raise ConfigError(f"dataset.tagger: the treebank {path} {why}. {remedy}") from None


def _perceptron(train: Sequence[Sentence]) -> tuple[str, Tagger]:
    """NLTK's averaged perceptron, trained here: what is said of it, and itself."""
    try:
        from nltk.tag.perceptron import PerceptronTagger
    except ImportError:
        needs = f"needs nltk, which is not installed: {installing('linguistics')}"
        raise ConfigError(f"dataset.tagger.name=perceptron {needs}.") from None
    tagger: Any = PerceptronTagger(load=False)
    known, gold = table()["penn"], []
    for one in train:
        words = zip(one.forms, one.tags, one.upos, strict=True)
        gold.append([(form, tag + _AUXILIARY * (upos == "AUX")) for form, tag, upos in words if tag in known])
    tagger.train([one for one in gold if one], nr_iter=_PASSES)
    name = f"an averaged perceptron (nltk {version('nltk')}) trained on {len(gold):,} sentences with gold tags"
    return name, lambda sentences: ([tag for _, tag in tagger.tag(one)] for one in sentences)


def _spacy(model: str) -> tuple[str, Tagger]:
    """A spaCy model, given the words as they are: what is said of it, and itself."""
    import spacy
    from spacy.tokens import Doc

    loaded: Any = spacy.load(model, exclude=["ner", "lemmatizer"])

    def tag(sentences: Iterable[list[str]]) -> Iterator[list[str]]:
        for document in loaded.pipe(Doc(loaded.vocab, words=one) for one in sentences):
            yield [token.tag_ + _AUXILIARY * (token.pos_ == "AUX") for token in document]

    return f"spaCy's {model} {version(model)}", tag
