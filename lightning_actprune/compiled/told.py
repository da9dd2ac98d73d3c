"""Who is told what was decided of compiled code, also where that comes out of a cache.

The pass over a joint graph tells those that listen while it runs. Code that comes out of a cache, or that an earlier
training has compiled, runs without a pass. So inductor's code of a forward carries what was decided (``calls``), and
says it when it runs: once to each listener, and not to those that the pass has told. Where the joint graph is made anew
and its code comes out of a cache, the pass has told what only the code knows how the partitioner has settled.
"""

from __future__ import annotations

import json

import torch

from lightning_actprune.compiled.report import Row


class Rows(list[Row]):
    """What a listener was told.

    Attributes:
        texts: By which texts of settled rows.
        open: Of each graph that was packed and is not settled, the place of its first row, and how many there are.
        passed: Whether a graph was packed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts = set[str]()
        self.open: list[tuple[int, int]] = []
        self.passed = False

    def packed(self, rows: list[Row]) -> None:
        """Take in what was decided of a graph, which is not settled."""
        self.open.append((len(self), len(rows)))
        self.passed = True
        self += rows

    def settled(self, rows: list[Row]) -> None:
        """Take in what a graph saves, in place of what was decided of it if that is here."""
        for place in reversed(self.open):
            start, count = place
            if list(map(_key, self[start : start + count])) == list(map(_key, rows[:count])):
                self.open.remove(place)
                self[start : start + count] = rows
                self.open = [(at if at < start else at + len(rows) - count, n) for at, n in self.open]
                return
        self += rows


_listening: tuple[Rows, ...] = ()
_latest: str | None = None


def listening() -> tuple[Rows, ...]:
    """Return those that listen; another tuple once they are others."""
    return _listening


def listen(rows: Rows) -> None:
    """Tell ``rows`` from now on."""
    global _listening
    _listening = (*_listening, rows)


def leave(rows: Rows) -> None:
    """Tell ``rows`` no longer."""
    global _listening
    _listening = tuple(others for others in _listening if others is not rows)


def settle(rows: list[Row]) -> None:
    """Tell what the graph saves whose forward is compiled next, and note it for its code."""
    global _latest
    _latest = _written(rows)
    for others in _listening:
        others.texts.add(_latest)
        others.settled(rows)


def take_settled() -> str | None:
    """Return that, once."""
    global _latest
    text, _latest = _latest, None
    return text


class Report:
    """What was decided of a graph; its code calls it whenever forward runs.

    Args:
        text: From ``take_settled``.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._told: tuple[Rows, ...] | None = None

    def __call__(self) -> None:
        """Tell those that listen and do not know."""
        if self._told is not _listening:
            self._told = _listening
            for rows in _listening:
                if self._text not in rows.texts:
                    rows.texts.add(self._text)
                    rows.settled(_read(self._text))


def _key(row: Row) -> tuple[object, ...]:
    """Return what is the same of a row before and after it is settled."""
    return row.name, row.readers, row.shape, row.dtype, row.bits


def _written(rows: list[Row]) -> str:
    return json.dumps([row._replace(dtype=str(row.dtype).removeprefix("torch.")) for row in rows])  # type: ignore[arg-type]


def _read(text: str) -> list[Row]:
    rows = []
    for name, readers, shape, dtype, *others in json.loads(text):
        rows.append(Row(name, tuple(readers), tuple(shape), getattr(torch, dtype), *others))
    return rows
