import hashlib
import math
import os
from pathlib import Path

import numpy as np
import pytest

from isthmus.sites.trainer.corpus import load_corpus, unigram_entropy
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Data


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Ten files of 100 bytes in two folders, and an empty one."""
    for index in range(10):
        path = tmp_path / "texts" / ("a", "b")[index % 2] / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([48 + index]) * 100)
    (tmp_path / "texts" / "a" / "empty.txt").touch()
    return tmp_path


def data(*files: str, held_out: float = 0.2, max_bytes: int = 1 << 20) -> Data:
    return Data(files=files or ("texts/**/*.txt",), held_out=held_out, max_bytes=max_bytes)


def test_files_are_read_in_order_and_split_whole(texts: Path) -> None:
    corpus = load_corpus(data(), texts, 16)
    assert corpus.num_files == 10
    names = [f"{('a', 'b')[index % 2]}/{index}.txt" for index in range(10)]
    lowest = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:2]
    held_out = sorted(lowest)
    training = [name for name in sorted(names) if name not in held_out]
    for part, expected in ((corpus.training, training), (corpus.held_out, held_out)):
        assert part.tobytes() == b"".join(name[2].encode() * 100 for name in expected)
    assert corpus.unigram_entropy == pytest.approx(math.log(8), rel=1e-12)


def test_how_and_where_files_are_named_changes_nothing(texts: Path, tmp_path: Path) -> None:
    whole = load_corpus(data(), texts, 16)
    moved = tmp_path / "elsewhere" / "deep"
    moved.parent.mkdir()
    (texts / "texts").rename(moved)
    for files in (
        (str(moved / "**" / "*.txt"),),
        ("elsewhere/deep/*/*.txt", "elsewhere/../elsewhere/deep/b/*.txt"),
    ):
        again = load_corpus(data(*files), tmp_path, 16)
        assert again.digest == whole.digest
        assert np.array_equal(again.training, whole.training)


@pytest.mark.parametrize("change", ["content", "name", "split", "fewer"])
def test_the_digest_tells_corpora_apart(texts: Path, change: str) -> None:
    before = load_corpus(data(), texts, 16).digest
    target = texts / "texts" / "a" / "0.txt"
    held_out = 0.2
    if change == "content":
        target.write_bytes(b"0" * 99 + b"1")
    elif change == "name":
        target.rename(target.with_name("00.txt"))
    elif change == "split":
        held_out = 0.3
    else:
        target.unlink()
    assert load_corpus(data(held_out=held_out), texts, 16).digest != before


def test_max_bytes_cuts_the_last_file(texts: Path) -> None:
    corpus = load_corpus(data(max_bytes=250, held_out=0.0), texts, 16)
    assert corpus.training.tobytes() == b"0" * 100 + b"2" * 100 + b"4" * 50
    assert corpus.num_files == 3
    assert len(corpus.held_out) == 0


def test_held_out_text_is_enlarged_until_it_holds_a_window(texts: Path) -> None:
    corpus = load_corpus(data(held_out=0.01), texts, 250)
    assert len(corpus.held_out) == 300
    assert len(corpus.training) == 700


@pytest.mark.parametrize(
    ("given", "context", "where", "said"),
    [
        (data("texts/*.md"), 16, "trainer.data.files", "no file matches .*texts/[*].md"),
        (data("texts/a/0.txt/"), 1000, "trainer.data.held_out", "of 1 files"),
        (data("texts/a/0.txt", held_out=0.0), 100, "trainer.data.files", "has 100 bytes, fewer"),
        (data("texts/a/0.txt"), 16, "trainer.data.held_out", "leaves no file to learn from"),
        (data(held_out=0.999), 16, "trainer.data.held_out", "leaves no file to learn from"),
        (data("texts/a/empty.txt", held_out=0.0), 16, "trainer.data.files", "has 0 bytes"),
        # Python 3.13 matches it, with nothing.
        (data("texts/***/x"), 16, "trainer.data.files", "cannot be matched|no file matches"),
    ],
)
def test_what_is_wrong_is_said(
    texts: Path, given: Data, context: int, where: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_corpus(given, texts, context)
    assert [problem.path for problem in caught.value.problems] == [where]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(texts: Path) -> None:
    (texts / "texts" / "a" / "2.txt").chmod(0)
    with pytest.raises(ConfigError, match=r"2\.txt cannot be read: Permission denied"):
        load_corpus(data(), texts, 16)


def test_a_file_that_is_no_file_is_named(texts: Path) -> None:
    # Reading a process' own memory from address 0 fails for every user, root included.
    (texts / "texts" / "a" / "memory.txt").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"memory\.txt cannot be read: Input/output error"):
        load_corpus(data(), texts, 16)


def test_entropy_of_known_distributions() -> None:
    assert unigram_entropy(np.zeros(9, dtype=np.uint8)) == 0.0
    uniform = np.arange(256, dtype=np.uint8).repeat(3)
    assert unigram_entropy(uniform) == pytest.approx(math.log(256), rel=1e-12)


@pytest.mark.slow
def test_the_standard_library_is_there_without_tests_or_packages() -> None:
    corpus = load_corpus(Data(), Path("nowhere"), 128)
    assert corpus.num_files > 300
    assert len(corpus.training) > 5_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.training) < 0.2
    assert 2.8 < corpus.unigram_entropy < 3.6
    assert load_corpus(Data(), Path(), 128).digest == corpus.digest
