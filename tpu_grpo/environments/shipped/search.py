"""A tool that searches a corpus (a file of texts) and ranks the matches by SQLite's BM25 (Robertson & Zaragoza 2009).

The corpus is a .jsonl file (lines with ``text`` and an optional ``title``), a .txt file (passages divided by blank
lines), or ``builtin:search`` (facts about made-up towns). One process builds the index on first use, and stores it in
the package's cache directory for later episodes. Words are compared by their stems.
"""

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tpu_grpo.hosts.caching import cache_directory, exclusive
from tpu_grpo.records.short_texts import shortened
from tpu_grpo.records.untrusted_input import parse_json

_WORD = re.compile(r"\w+")
BUILTIN = "builtin:search"
_CORPUS_SEED = 20261124
_FORMAT = 1  # the version of the index, which is part of its name
_LONGEST_QUERY = 64  # words
_MAKES_BUILTIN = Path(__file__)


class Search:
    """The policy searches a corpus for what it needs to answer.

    Args:
        corpus: the path of the file, or builtin:search.
        top: how many passages a search returns.
        max_characters: a passage is cut after this many characters.
    """

    def __init__(self, corpus: str, top: int = 3, max_characters: int = 1000) -> None:
        for name, value in (("top", top), ("max_characters", max_characters)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        file = _MAKES_BUILTIN if corpus == BUILTIN else Path(corpus).expanduser()
        self._index = sqlite3.connect(f"file:{_index_of(file)}?mode=ro", uri=True)
        self._top, self._max_characters = top, max_characters

    def reset(self, **columns: Any) -> None:
        """Begin an episode, without an observation."""

    def search(self, query: str) -> str:
        """Search the corpus for passages that hold the words of a query.

        Args:
            query: Some words, such as a name and what you want to know.

        Returns:
            The best passages, numbered, best first.
        """
        if not isinstance(query, str):
            raise TypeError(f"query must be a text, got {query!r}")
        words = list(dict.fromkeys(_WORD.findall(query.lower())))[:_LONGEST_QUERY]
        if not words:
            raise ValueError("query must hold a word, got none")
        found = self._index.execute(
            "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), self._top),
        ).fetchall()
        shown, most = (f"{title}: {text}" if title else text for title, text in found), self._max_characters
        return "\n".join(f"[{n}] {shortened(text, most)}" for n, text in enumerate(shown, start=1)) or "nothing found"


def passages(corpus: Path) -> Iterator[tuple[str, str]]:
    """Read the passages of a corpus, as (title, text); the built-in corpus is generated.

    Raises:
        ValueError: for a file of another type, or a line that is not a JSON object with ``text``.
        OSError: for a file that cannot be read.
    """
    if corpus == _MAKES_BUILTIN:
        yield from (("", text) for text in _builtin_passages())
        return
    if corpus.suffix == ".txt":
        for block in re.split(r"\n\s*\n", corpus.read_text(encoding="utf-8")):
            if block.strip():
                yield "", " ".join(block.split())
        return
    if corpus.suffix != ".jsonl":
        raise ValueError(f"corpus must be a .jsonl or .txt file, or {BUILTIN}, got {corpus}")
    with corpus.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _record(line, f"{corpus}:{number}")


def _builtin_passages() -> list[str]:
    """Make the built-in corpus: 4096 facts of made-up towns such as "king of Tado: Leko", always the same."""
    import numpy as np  # needed only to make the corpus

    syllables = ("BDKLMNRSTV", "aeiou", "bdklmnrstv", "aiou")  # so that no two words have the same stem
    words = ["".join(letters) for letters in product(*syllables)]
    words = [words[i] for i in np.random.default_rng(_CORPUS_SEED).permutation(len(words))]
    towns, names, rng = words[:1024], words[1024:], np.random.default_rng([_CORPUS_SEED, 1])
    asked = list(product(("king", "lake", "port", "wine"), towns))
    facts = (asked[i] for i in rng.permutation(len(asked)))
    return [f"{kind} of {town}: {names[int(rng.integers(len(names)))]}" for kind, town in facts]


def _record(line: str, where: str) -> tuple[str, str]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where} must be JSON, got {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f"{where} must be an object with a text, as {{title, text}}, got {line.strip()[:100]}")
    return str(record.get("title") or ""), record["text"]


def _index_of(corpus: Path) -> Path:
    """Return the path of a corpus's index; build one if none is cached for its path, size and mtime."""
    known = corpus.stat()
    decides = [_FORMAT, str(corpus.absolute()), known.st_size, known.st_mtime_ns]
    directory = cache_directory() / "search"
    index = directory / f"{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]}.sqlite"
    if index.exists():
        return index
    directory.mkdir(parents=True, exist_ok=True)
    with exclusive(directory / f".{index.stem}.lock"):
        if not index.exists():
            unfinished = directory / f".{index.stem}.unfinished"
            unfinished.unlink(missing_ok=True)
            _make_index(corpus, unfinished)
            os.replace(unfinished, index)
    return index


def _make_index(corpus: Path, path: Path) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='porter unicode61')")
        connection.executemany("INSERT INTO passages VALUES (?, ?)", passages(corpus))
        connection.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        connection.commit()
    finally:
        connection.close()
