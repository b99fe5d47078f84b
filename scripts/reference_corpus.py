"""The text the reference models are trained on, and the text kept out of it.

Sources: WikiText-2 train, public-domain books, the docstrings of the installed Python packages; for the models that use far context also
the source code of packages under permissive licences, and questions about facts that stand further back. Held out, and removed from the
training text wherever 13 consecutive words coincide (Brown et al. 2020, app. C): WikiText validation and test, books valid and test,
`pydoc_data.topics` (the python-docs evaluation text) and, for the models that use far context, the packages of python-source.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import random
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from quicksilver.data.made_here import PACKAGES, python_source
from quicksilver.data.overlap import NGRAM_WORDS, ngrams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SOURCES = ("wiki", "books", "docstrings")
FAR_SOURCES = (*SOURCES, "code", "recall")
_PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|Zlib|Unlicense)", re.I)
_RESTRICTIVE = re.compile(r"GPL|GNU|MPL|Mozilla|EUPL|proprietary|NVIDIA", re.I)
_CODE_BYTES, _CODE_BYTES_OF_ONE = 45_000_000, 6_000_000  # of all packages, and at most of one
_RECALL_DOCUMENTS = 16_000
_TOKENIZER_BYTES = 12_000_000  # of each source
_NO_CODE = ("site-packages", "pydoc_data", "encodings", "idlelib", "lib2to3", "turtledemo")  # folders of the standard library


def python_docs() -> str:
    """The language reference every CPython carries (`pydoc_data.topics`), in the order of its keys."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key].strip() for key in sorted(topics))


def held_out_texts(data_root: Path) -> dict[str, str]:
    """Evaluation text by name. Raises FileNotFoundError naming the missing file."""
    wikitext = {f"wikitext-103-{part}": f"wikitext-103/wiki.{part}.tokens" for part in ("valid", "test")}
    books = {f"books-{part}": f"books/books_{part}.txt" for part in ("valid", "test")}
    return {name: read_text(data_root / path) for name, path in (wikitext | books).items()} | {"python-docs": python_docs()}


def read_text(path: Path) -> str:
    if not path.is_file():
        folders = "wikitext-2/, wikitext-103/ and books/"
        raise FileNotFoundError(f"{path} is missing. Point --data-root (or QUICKSILVER_DATA) at a folder that holds {folders}.")
    return path.read_text(encoding="utf-8")


def docstrings(roots: Iterable[Path]) -> Iterator[str]:
    """Every distinct docstring of at least 80 characters below `roots`, in path order; `pydoc_data` is held out and never opened."""
    seen: set[str] = set()
    for top, path in ((root, path) for root in roots for path in sorted(root.rglob("*.py"))):
        if "pydoc_data" in path.parts or "site-packages" in path.relative_to(top).parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other people's invalid escapes are not our news
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError):
            continue  # templates and test fixtures that are not meant to parse
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                raw = ast.get_docstring(node, clean=False) or ""
                text = inspect.cleandoc(raw).encode("utf-8", "replace").decode()
                if len(raw) >= 80 and text not in seen:
                    seen.add(text)
                    yield text


def code_documents() -> list[str]:
    """Source files of the standard library and of installed packages under permissive licences, without tests and without repeats."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    left_out = {*_NO_CODE, *PACKAGES["test"], *PACKAGES["calibration"]}
    groups = [[p for p in stdlib.rglob("*.py") if not left_out & set(p.relative_to(stdlib).parts)]]
    for package in metadata.distributions():
        about = package.metadata
        named = [about.get_all(key, [""])[0][:200] for key in ("License", "License-Expression")]
        said = " ".join([*named, *(c for c in about.get_all("Classifier", []) if c.startswith("License"))])
        if _PERMISSIVE.search(said) and not _RESTRICTIVE.search(said):
            groups.append([Path(str(f.locate())) for f in package.files or () if f.suffix == ".py"])
    kept: dict[bytes, str] = {}  # by digest: the order is drawn, and equal files are one
    for files in groups:
        found: dict[bytes, str] = {}
        for path in files:
            code = not {"test", "tests", "testing", "_vendor"} & set(path.parts) and path.is_file()
            if code and 1500 <= path.stat().st_size <= 150_000:
                text = path.read_text(encoding="utf-8", errors="replace")
                narrow, digits = max(map(len, text.splitlines())) <= 400, sum(map(str.isdigit, text))
                if narrow and digits <= 0.15 * len(text):  # no tables of data
                    found[hashlib.sha256(text.encode()).digest()] = text
        kept |= dict(_up_to(found, _CODE_BYTES_OF_ONE))
    return [text for _, text in _up_to(kept, _CODE_BYTES)]


def _up_to(texts: dict[bytes, str], size: int) -> Iterator[tuple[bytes, str]]:
    for digest in sorted(texts):
        size -= len(texts[digest])
        if size < 0:
            return
        yield digest, texts[digest]


def recall_documents(fillers: list[str]) -> Iterator[str]:
    """Facts, a passage, then the facts again or questions about them, in another order. The words are drawn from the fillers; those of
    far-recall are none of them."""
    from quicksilver.data import made_here

    draw = random.Random(11)
    counts = Counter(word for text in fillers[:400] for word in re.findall(r"[A-Za-z][a-z]{3,8}\b", text))
    tested = {*made_here._ADJECTIVES, *made_here._THINGS, *made_here._PLACES}
    words = [word for word in sorted(counts, key=lambda w: (-counts[w], w))[150:6000] if word.lower() not in tested]
    lower, names = [w for w in words if w.islower()], [w for w in words if not w.islower()]
    for _ in range(_RECALL_DOCUMENTS):
        n = draw.randint(2, 14)
        one, two, three, some = (draw.sample(of, n) for of in (lower, lower, lower, names))
        number = [str(draw.randint(2, 999)) for _ in range(n)]
        triples = list(zip(one, two, three, strict=True))
        forms = [
            [(f"Where is the {a} {b}? In the {c}.",) * 2 for a, b, c in triples],
            [(f"The {a} {b} is in the {c}.", f"Where is the {a} {b}? In the {c}.") for a, b, c in triples],
            [(f"{a} has the {b} {c}.", f"Who has the {b} {c}? {a}.") for a, b, c in zip(some, one, two, strict=True)],
            [(f"{a} = {b}",) * 2 for a, b in zip(one, number, strict=True)],
            [(f'"{a}": "{b}",', f'assert table["{a}"] == "{b}"') for a, b in zip(one, two, strict=True)],
            [(f"def {a}_{b}(self, {c}):", f"        self.{a}_{b}({c})") for a, b, c in triples],
        ]
        pairs, filler, length = draw.choice(forms), draw.choice(fillers), draw.choice((0, 120, 300, 600, 1200))
        start = draw.randrange(max(1, len(filler) - length))
        told, asked = "\n".join(said for said, _ in pairs), "\n".join(asked for _, asked in draw.sample(pairs, n))
        yield "\n\n".join([told, filler[start : start + length], asked])


def training_documents(data_root: Path, sources: tuple[str, ...] = SOURCES) -> dict[str, list[str]]:
    """Documents by source, before anything is removed: an article, about 8 kB of a book, or a docstring each."""
    wiki = re.split(r"\n (?== [^=])", read_text(data_root / "wikitext-2/train_article_order_shuffled.txt"))
    paragraphs = read_text(data_root / "books/books_train.txt").split("\n\n")
    books, piece = [], ""
    for paragraph in paragraphs:
        piece += paragraph + "\n\n"
        if len(piece) > 8192:
            books.append(piece)
            piece = ""
    books.append(piece)
    roots = [Path(sysconfig.get_paths()[name]) for name in ("purelib", "stdlib")]
    found = {"wiki": wiki, "books": books, "docstrings": list(docstrings(roots))}
    if "code" in sources:
        found["code"] = code_documents()
        fillers = random.Random(5).sample([*books, *wiki, *found["code"]], 3000)
        found["recall"] = list(recall_documents(fillers))
    return found


def remove_overlap(
    documents: dict[str, list[str]], held_out: dict[str, str]
) -> tuple[dict[str, list[str]], dict[str, dict[str, Any]]]:
    """Drop every document that shares a 13-gram with held-out text.

    Returns:
        By source the documents that are left, and how many documents and 13-grams there were, were removed and are shared: before, and counted
        again in what is left rather than assumed.
    """
    grams = {name: set(ngrams(text)) for name, text in held_out.items()}
    union = set().union(*grams.values())
    kept: dict[str, list[str]] = {}
    report: dict[str, dict[str, Any]] = {}
    for source, texts in documents.items():
        kept[source], n_grams, shared = [], 0, list[int]()
        for text in tqdm(texts, desc=f"overlap {source}", unit="doc", mininterval=2, file=sys.stderr):
            own = list(ngrams(text))
            n_grams += len(own)
            there = [g for g in own if g in union]
            shared += there
            if not there:
                kept[source].append(text)
        report[source] = {
            "documents": len(texts), "removed": len(texts) - len(kept[source]), "ngrams": n_grams, "shared_before": len(shared),
            "shared_after": sum(g in union for text in kept[source] for g in ngrams(text)),
            "by_held_out": {name: sum(g in held for g in shared) for name, held in grams.items()},
        }  # fmt: skip
    return kept, report


def train_tokenizer(documents: dict[str, list[str]], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (GPT-2's pre-tokenisation) trained on the same number of bytes of each source."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def sample() -> Iterator[str]:
        for source in documents:
            left = _TOKENIZER_BYTES
            for text in documents[source]:
                if left <= 0:
                    break
                left -= len(text)
                yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sample(), how)
    return tokenizer


def prepare(data_root: Path, out: Path, vocab_size: int, sources: tuple[str, ...] = SOURCES, known: Path | None = None) -> dict:
    """Tokenizer and token streams in `out` (`{source}.bin`, uint16; where their documents begin: `{source}.starts.npy`).

    The tokenizer is trained on the text, unless `known` names one. Streams of this vocabulary and these sources are reused.
    """
    from tokenizers import Tokenizer

    manifest_path = out / "corpus.json"
    if manifest_path.is_file():
        manifest = json.loads(manifest_path.read_text())
        if manifest["vocab_size"] == vocab_size and tuple(manifest["sources"]) == sources:
            return manifest
    out.mkdir(parents=True, exist_ok=True)
    found = training_documents(data_root, sources)
    source_code = {f"python-source-{part}": python_source(part) for part in PACKAGES} if "code" in sources else {}
    documents, overlap = remove_overlap(found, held_out_texts(data_root) | source_code)
    tokenizer = train_tokenizer(documents, vocab_size) if known is None else Tokenizer.from_file(str(known))
    tokenizer.save(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    manifest = {"vocab_size": vocab_size, "ngram_words": NGRAM_WORDS, "sources": {}}
    for source in sources:
        digest = hashlib.sha256()
        ids: list[np.ndarray] = []
        texts = documents[source]
        for i in tqdm(range(0, len(texts), 512), desc=f"tokenise {source}", mininterval=2, file=sys.stderr):
            batch = texts[i : i + 512]
            digest.update("".join(batch).encode())
            for encoding in tokenizer.encode_batch_fast(batch):
                ids.append(np.array([*encoding.ids, end], dtype=np.uint16))
        stream = np.concatenate(ids)
        stream.tofile(out / f"{source}.bin")
        np.save(out / f"{source}.starts.npy", np.cumsum([0, *(len(document) for document in ids[:-1])]))
        manifest["sources"][source] = {
            "documents": len(texts), "bytes": sum(len(t.encode()) for t in texts), "tokens": len(stream), "sha256": digest.hexdigest(),
            "overlap": overlap[source],
        }  # fmt: skip
    manifest_path.write_text(json.dumps(manifest, indent=2))
    return manifest
