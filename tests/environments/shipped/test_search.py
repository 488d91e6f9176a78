"""A corpus made of this project's own pages is searched."""

import json
import os
import threading
from pathlib import Path

import pytest

from tpu_grpo.environments.shipped import search
from tpu_grpo.environments.shipped.search import Search, passages
from tpu_grpo.hosts.caching import CACHE_VARIABLE

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "docs.jsonl"
    blocks = [(page.stem, block) for page in sorted(DOCS.glob("*.md")) for block in page.read_text().split("\n\n")]
    file.write_text("".join(json.dumps({"title": title, "text": block}) + "\n" for title, block in blocks))
    return file


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_pages_are_found_by_their_words(corpus: Path):
    environment = Search(str(corpus), top=2)
    assert environment.reset(question="...") is None
    found = environment.search("Which Gemma checkpoints are refused, Gemma 3?")
    assert found.startswith("[1] models: ")
    assert "\n[2] " in found
    assert "[3]" not in found
    assert environment.search("xylophonist zygotes") == "nothing found"


def test_ranks_are_those_of_bm25(tmp_path: Path):
    """Of two passages with the word the shorter is better, and a rare word weighs more than a common one."""
    file = write(
        tmp_path / "a.jsonl",
        "red fox " + "filler " * 30,
        "a red fox",
        "red hen",
        "red cat",
        "blue whale",
        "green frog",
        "grey wolf",
    )
    environment = Search(str(file), top=4)
    assert environment.search("foxes") == f"[1] a red fox\n[2] red fox {'filler ' * 30}"  # stems: foxes, fox
    assert environment.search("red fox").splitlines()[0] == "[1] a red fox"
    assert environment.search("red whale").splitlines()[0] == "[1] blue whale"


def test_quotes_and_operators_of_a_query_are_words(tmp_path: Path):
    environment = Search(str(write(tmp_path / "a.jsonl", "cats and dogs", "NEAR the sea")), max_characters=6)
    assert environment.search('"cats" AND (NOT') == "[1] cats a..."
    assert environment.search("near*") == "[1] NEAR t..."
    with pytest.raises(ValueError, match="query must hold a word"):
        environment.search("?!")


def test_text_files_are_divided_by_blank_lines(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n \n\nthree\n")
    assert list(passages(tmp_path / "a.txt")) == [("", "one two"), ("", "three")]


def test_the_builtin_corpus_needs_no_file():
    environment = Search("builtin:search", top=2)
    first, second = environment.search("king Tado").splitlines()
    assert first == "[1] king of Tado: Leko"
    assert second.split()[3] == "Tado:"  # a town's name says more than a kind of fact
    facts = [text for _, text in passages(search._MAKES_BUILTIN)]
    assert len({fact.partition(":")[0] for fact in facts}) == len(facts) == 4096
    assert facts[:3] == ["lake of Mota: Temo", "king of Bero: Ludu", "lake of Lami: Mumi"]  # it never changes


def test_an_index_is_made_once_and_again_when_the_file_has_changed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[Path] = []
    real = search._make_index
    monkeypatch.setattr(search, "_make_index", lambda corpus, path: (made.append(corpus), real(corpus, path)))
    file = write(tmp_path / "a.jsonl", "a red fox")
    threads = [threading.Thread(target=Search, args=(str(file),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [file]
    write(file, "a blue fox")
    os.utime(file, ns=(1, 1))
    assert Search(str(file)).search("fox") == "[1] a blue fox"
    assert len(made) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"body": 1}\n', r"a\.jsonl:2 must be an object with a text"),
        ("a.jsonl", "no json\n", r"a\.jsonl:1 must be JSON"),
        ("a.csv", "x", r"corpus must be a \.jsonl or \.txt file, or builtin:search, got .*a\.csv"),
    ],
)
def test_a_corpus_that_cannot_be_read_leaves_no_index(tmp_path: Path, cache: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        Search(str(tmp_path / name))
    assert list(cache.rglob("*.sqlite")) == []
