"""The text the reference models are trained on, and the text kept out of it.

Sources: WikiText-2 train, public-domain books, and the docstrings of the installed Python packages. Held out, and removed from the
training text wherever 13 consecutive words coincide (Brown et al. 2020, app. C): WikiText validation and test, books valid and test, and
`pydoc_data.topics` (the python-docs evaluation text).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from quicksilver.data.overlap import NGRAM_WORDS, ngrams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SOURCES = ("wiki", "books", "docstrings")


def python_docs() -> str:
    """The language reference every CPython carries (`pydoc_data.topics`), in the order of its keys."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key].strip() for key in sorted(topics))


def held_out_texts(data_root: Path) -> dict[str, str]:
    """Evaluation text by name. Raises FileNotFoundError naming the missing file."""
    paths = {
        "wikitext-103-valid": "wikitext-103/wiki.valid.tokens",
        "wikitext-103-test": "wikitext-103/wiki.test.tokens",
        "books-valid": "books/books_valid.txt",
        "books-test": "books/books_test.txt",
    }
    texts = {name: read_text(data_root / path) for name, path in paths.items()}
    texts["python-docs"] = python_docs()
    return texts


def read_text(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. Point --data-root (or QUICKSILVER_DATA) at a folder that holds wikitext-2/, wikitext-103/ and books/."
        )
    return path.read_text(encoding="utf-8")


def docstrings(roots: Iterable[Path]) -> Iterator[str]:
    """Every distinct docstring of at least 80 characters below `roots`, in path order; `pydoc_data` is held out and never opened."""
    seen: set[bytes] = set()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if "pydoc_data" in path.parts or "site-packages" in path.relative_to(root).parts:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # other people's invalid escapes are not our news
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, RecursionError):
                continue  # templates and test fixtures that are not meant to parse
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = ast.get_docstring(node, clean=False)
                    if text is None or len(text) < 80:
                        continue
                    text = inspect.cleandoc(text).encode("utf-8", "replace").decode()
                    digest = hashlib.sha1(text.encode(), usedforsecurity=False).digest()
                    if digest not in seen:
                        seen.add(digest)
                        yield text


def training_documents(data_root: Path) -> dict[str, list[str]]:
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
    site = Path(sysconfig.get_paths()["purelib"])
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    return {"wiki": wiki, "books": books, "docstrings": list(docstrings([site, stdlib]))}


@dataclass
class Overlap:
    """13-word overlap of the training text with what is held out, before and after the removal."""

    documents: int = 0
    removed: int = 0
    ngrams: int = 0
    shared_before: int = 0
    shared_after: int = 0
    by_held_out: dict[str, int] = field(default_factory=dict)


def remove_overlap(documents: dict[str, list[str]], held_out: dict[str, str]) -> tuple[dict[str, list[str]], dict[str, Overlap]]:
    """Drop every document that shares a 13-gram with held-out text, and count again what is left rather than assume it."""
    grams = {name: set(ngrams(text)) for name, text in held_out.items()}
    union = set().union(*grams.values())
    kept: dict[str, list[str]] = {}
    report: dict[str, Overlap] = {}
    for source, texts in documents.items():
        found = Overlap(by_held_out=dict.fromkeys(grams, 0))
        kept[source] = []
        for text in tqdm(texts, desc=f"overlap {source}", unit="doc", mininterval=2, file=sys.stderr):
            own = list(ngrams(text))
            shared = [g for g in own if g in union]
            found.documents += 1
            found.ngrams += len(own)
            found.shared_before += len(shared)
            for name, held in grams.items():
                found.by_held_out[name] += sum(g in held for g in shared)
            if shared:
                found.removed += 1
            else:
                kept[source].append(text)
        found.shared_after = sum(g in union for text in kept[source] for g in ngrams(text))
        report[source] = found
    return kept, report


def train_tokenizer(documents: dict[str, list[str]], vocab_size: int, per_source_bytes: int = 12_000_000) -> Tokenizer:
    """A byte-level BPE (GPT-2's pre-tokenisation) trained on the same number of bytes of each source."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def sample() -> Iterator[str]:
        for source in SOURCES:
            left = per_source_bytes
            for text in documents[source]:
                if left <= 0:
                    break
                left -= len(text)
                yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def prepare(data_root: Path, out: Path, vocab_size: int) -> dict:
    """Tokenizer and token streams (`{source}.bin`, uint16) in `out`; reused when they are already there for this vocabulary."""
    manifest_path = out / "corpus.json"
    if manifest_path.is_file():
        manifest = json.loads(manifest_path.read_text())
        if manifest["vocab_size"] == vocab_size:
            return manifest
    out.mkdir(parents=True, exist_ok=True)
    documents, overlap = remove_overlap(training_documents(data_root), held_out_texts(data_root))
    tokenizer = train_tokenizer(documents, vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    manifest = {"vocab_size": vocab_size, "ngram_words": NGRAM_WORDS, "sources": {}}
    for source in SOURCES:
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
        manifest["sources"][source] = {
            "documents": len(texts),
            "bytes": sum(len(t.encode()) for t in texts),
            "tokens": len(stream),
            "sha256": digest.hexdigest(),
            "overlap": overlap[source].__dict__,
        }
    manifest_path.write_text(json.dumps(manifest, indent=2))
    return manifest
