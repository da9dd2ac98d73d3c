"""The benchmark of long trainings: which runs it starts where, and that it goes on where it stopped."""

from __future__ import annotations

import json
import threading

import pytest

from examples.benchmarks import accuracy, long
from examples.benchmarks.study import tasks


@pytest.fixture
def started(monkeypatch):
    """Trainings that end at once, but for those with seed 9: the command and GPU of each."""
    found, lock = [], threading.Lock()

    class Done:
        returncode, stderr = 0, ""

    def run(command, env, **_):
        with lock:
            found.append((command[2:], env["CUDA_VISIBLE_DEVICES"]))
        args = accuracy.parse(command[2:])
        [setting], [seed] = args.settings, args.seeds
        if seed != 9:
            told = {name: getattr(args, name) for name in ("task", "epochs", "lr", "compile", "dim", "depth")}
            told |= {"dataset": "packages"} if args.packages else {"dataset": "images"}
            told |= {"augmentation": "RandAugment and mixup"} if args.strong else {}
            args.out.write_text(json.dumps([{**told, "seed": seed, **long.asdict(setting)}]))
        return Done()

    monkeypatch.setattr(long.subprocess, "run", run)
    return found


def test_all_runs_are_made_once_on_all_gpus(started, tmp_path, capsys):
    command = ["--root", str(tmp_path), "--tasks", "vit", "gpt", "--settings", "dense", "preset:max", "--gpus", "2"]
    command += ["--at-a-time", "2", "--out", str(tmp_path / "long.json"), "--states", str(tmp_path / "states")]
    assert long.main([*command, "--seeds", "0", "9"]) == 1
    assert len(started) == 8
    assert {gpu for _, gpu in started} <= {"0", "1"}
    assert len(json.loads((tmp_path / "long.json").read_text())) == 4
    assert capsys.readouterr().out.count("not done") == 4
    assert long.main([*command, "--seeds", "0"]) == 0
    assert len(started) == 8
    assert long.main([*command, "--seeds", "0", "1"]) == 0
    assert len(started) == 12
    assert all(("--root" in words) == ("gpt" not in words) for words, _ in started)
    assert all("--states" in words for words, _ in started)


def test_other_trainings_in_the_file_do_not_count(started, tmp_path):
    out = tmp_path / "long.json"
    command = ["--root", str(tmp_path), "--tasks", "vit", "--settings", "dense", "--seeds", "0", "--out", str(out)]
    assert long.main(command) == 0
    [record] = json.loads(out.read_text())
    for change in ({"augmentation": None}, {"dim": 64}, {"start": "weights"}, {"dataset": "text"}):
        out.write_text(json.dumps([{**record, **change}]))
        assert long.main(command) == 0
    assert len(started) == 5


def test_nothing_starts_when_the_time_is_up(started, tmp_path):
    assert long.main(["--tasks", "gpt", "--seconds", "5", "--out", str(tmp_path / "long.json")]) == 1
    assert started == []


def test_images_need_a_folder(capsys):
    with pytest.raises(SystemExit):
        long.main(["--tasks", "vit"])
    assert "--root must be a folder" in capsys.readouterr().err


def test_a_run_that_fails_says_why(tmp_path, capfd):
    out = tmp_path / "long.json"
    command = ["--root", str(tmp_path / "nothing"), "--tasks", "resnet", "--settings", "dense", "--seeds", "0"]
    assert long.main([*command, "--states", str(tmp_path / "states"), "--out", str(out)]) == 1
    assert "nothing" in capfd.readouterr().err


def test_every_task_is_one_of_the_study():
    for task, words in long.TASKS.items():
        assert words.split()[1] == task
        assert task in tasks.TASKS
    assert [long.Run("gpt", s, 0).key["method"] for s in long.SETTINGS][:2] == ["dense", "preset:balanced"]
    gpt = long.TASKS["gpt"].split()
    context, batch, epochs = (int(gpt[gpt.index(name) + 1]) for name in ("--context", "--batch-size", "--epochs"))
    assert context * batch * epochs * 75 >= 200e6
