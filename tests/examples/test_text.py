"""The text of the study: which files it is made of, how it is split, and how a model of it is scored."""

import importlib.metadata
import math

import pytest
import torch

from examples.benchmarks.study.text import VALIDATION_WINDOWS, Text, packages_text, read_sources

CPU = torch.device("cpu")


@pytest.fixture
def sources(tmp_path):
    """A folder whose text is `0123...` if its files are read in the order of their paths."""
    folder = tmp_path / "lib"
    for number, name in enumerate(["a.py", "a/b.py", "a/c/d.py", "aa.py", "b.py"]):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number) * 1000)
    for name in ("a/notes.txt", "site-packages/other.py", "a/dist-packages/other.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 1000)
    return folder


def test_sources_are_read_in_the_order_of_their_paths(sources):
    order = sorted(["a.py", "a/b.py", "a/c/d.py", "aa.py", "b.py"])
    text = read_sources(sources).decode()
    assert text == "".join((sources / name).read_text() for name in order)
    assert len(text) == 5000


def test_packages_give_each_text_once_and_no_data(tmp_path, monkeypatch):
    class Package:
        files = "a.py", "copy/a.py", "b.h", "weights.bin", "huge.txt", "gone.md"

        def locate_file(self, name):
            return tmp_path / name

    class Empty:
        files = None

    (tmp_path / "copy").mkdir()
    content = {"a.py": b"one", "copy/a.py": b"one", "b.h": b"two", "weights.bin": b"data", "huge.txt": b"x" * 2_000_001}
    for name, text in content.items():
        (tmp_path / name).write_bytes(text)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [Package(), Empty(), Package()])
    packages_text.cache_clear()
    assert packages_text() in (b"onetwo", b"twoone")
    data = Text(None, CPU, context=1, packages=packages_text() * 20)
    assert data.facts["dataset"] == "packages"
    assert data.facts["bytes"] == 120
    packages_text.cache_clear()


def test_last_tenth_is_for_validation_alone(sources):
    text = Text(sources, CPU, context=9)
    whole = torch.frombuffer(bytearray(read_sources(sources)), dtype=torch.uint8)
    assert torch.equal(text.train, whole[:4500])
    assert torch.equal(text.windows, whole[4500:].view(50, 10))
    assert text.facts["bytes"] == 5000
    starts = text.draw(200, 16, torch.Generator().manual_seed(0))
    assert 0 <= starts.min() < starts.max() <= 4490
    assert Text(sources, CPU, context=9).facts == text.facts
    (sources / "b.py").write_text("5" * 1000)
    assert Text(sources, CPU, context=9).facts["sha256"] != text.facts["sha256"]


def test_targets_are_the_bytes_that_follow(sources):
    text = Text(sources, CPU, context=9)
    inputs, targets = text.batch(torch.tensor([0, 996, 4490]))
    assert inputs.shape == targets.shape == (3, 9)
    for start, given, following in zip((0, 996, 4490), inputs, targets, strict=True):
        window = text.train[start : start + 10].long()
        assert torch.equal(torch.cat([given, following[-1:]]), window)
        assert torch.equal(given[1:], following[:-1])


def test_score_is_the_negative_loss_per_byte(sources):
    text = Text(sources, CPU, context=9)
    assert text.score(lambda inputs: torch.zeros(*inputs.shape, 256), None) == pytest.approx(-math.log(256))
    again = lambda inputs: 100.0 * torch.nn.functional.one_hot(inputs, 256)  # noqa: E731
    assert text.score(again, None) == pytest.approx(0, abs=1e-5)
    seen = []
    text.score(lambda inputs: seen.append(len(inputs)) or torch.zeros(*inputs.shape, 256), 7)
    assert seen == [7]


@pytest.mark.slow
def test_standard_library_is_large_enough_and_always_the_same():
    text = Text(None, CPU, context=256)
    assert text.windows.shape == (VALIDATION_WINDOWS, 257)
    assert text.facts == Text(None, CPU, context=256).facts
    assert text.facts["dataset"].startswith("stdlib-3.")


def test_too_short_a_text_is_refused(sources):
    with pytest.raises(ValueError, match=r"`--root` must hold more than 5010 bytes .* got 5000"):
        Text(sources, CPU, context=500)
