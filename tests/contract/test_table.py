"""Every class that can be compressed has a case."""

from __future__ import annotations

from tests.support.cases import CASES, tables


def test_no_registered_class_is_missing():
    covered = {key for case in CASES.values() for key in case.covers}
    assert {*tables("CLASSES"), *tables("FOREIGN")} - covered == set()
    assert covered - {*tables("CLASSES"), *tables("FOREIGN")} == set()
