"""The benchmark of long trainings: which runs it starts where, and that it goes on where it stopped."""

from __future__ import annotations

import json
import threading

import pytest

from examples.benchmarks import accuracy, long
from examples.benchmarks.study import tasks


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Trainings that end at once, but for those with seed 9: the command and GPU of each."""
    found, lock = [], threading.Lock()

    class Done:
        returncode, stderr = 0, ""

    def run(command, env, **_):
        with lock:
            found.append((command[2:], env["CUDA_VISIBLE_DEVICES"]))
        args = accuracy.parse(command[2:])
        [setting], [seed] = args.settings, args.seeds
        if args.save:
            args.save.write_bytes(b"weights")
        if seed != 9:
            told = {name: getattr(args, name) for name in ("task", "epochs", "lr", "compile", "clip")}
            told |= tasks.options_of(args) | {"batch": args.batch_size or tasks.TASKS[args.task].batch}
            told |= {"dataset": "packages"} if args.packages else {"dataset": "images"}
            told |= {"augmentation": "RandAugment and mixup"} if args.strong else {}
            told |= {"start": tasks.digest(args.start)} if args.start else {}
            told |= {name: True for name in ("lora", "turned") if getattr(args, name)}
            args.out.write_text(json.dumps([{**told, "seed": seed, **long.asdict(setting)}]))
        return Done()

    monkeypatch.setattr(long.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)  # where states go by default
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


def test_gpus_are_those_that_are_visible(started, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    command = ["--tasks", "gpt", "--gpus", "2", "--settings", "dense", "preset:max", "--seeds", "0"]
    assert long.main([*command, "--out", str(tmp_path / "long.json")]) == 0
    assert {gpu for _, gpu in started} <= {"4", "7"}


def test_other_trainings_in_the_file_do_not_count(started, tmp_path):
    out = tmp_path / "long.json"
    command = ["--root", str(tmp_path), "--tasks", "vit", "--settings", "dense", "--seeds", "0", "--out", str(out)]
    assert long.main(command) == 0
    [record] = json.loads(out.read_text())
    changes = {"augmentation": None, "dim": 64, "start": "weights", "dataset": "text", "turned": True, "batch": 8}
    for name, value in changes.items():
        out.write_text(json.dumps([{**record, name: value}]))
        assert long.main(command) == 0
    assert len(started) == 1 + len(changes)


def test_fine_tuning_begins_with_weights_that_another_call_has_made(started, tmp_path, capsys):
    out, first = tmp_path / "long.json", tmp_path / "first.pt"
    command = ["--root", str(tmp_path), "--settings", "dense", "--seeds", "0", "1", "--out", str(out)]
    command += ["--first", str(first), "--tasks", "first", "tuned", "lora"]
    assert long.main(command) == 1
    assert [words[words.index("--save") + 1] for words, _ in started] == [str(first)]
    assert "tuned: not begun" in capsys.readouterr().out
    assert long.main(command) == 0
    assert len(started) == 5
    assert {(r["start"], r.get("lora")) for r in json.loads(out.read_text()) if r.get("start")} == {
        (tasks.digest(first), None),
        (tasks.digest(first), True),
    }
    assert long.main(command) == 0
    assert len(started) == 5
    first.write_bytes(b"other weights")
    assert long.main([*command, "--seeds", "0"]) == 0
    assert len(started) == 7
    first.unlink()  # what was trained is known, and not there any more
    assert long.main([*command, "--tasks", "first"]) == 0
    assert len(started) == 8
    assert first.is_file()


def size(task, axis, value, setting, epochs):
    """A record of a size that was found."""
    more = {"axis": axis, "size": value, "dense_size": axis and 384, "setting": setting, "epochs": epochs}
    return {"task": task, **more}


def test_sizes_of_two_models_do_not_mix(started, tmp_path):
    sizes = [size(task, "dim", 512, "preset:max", 3) for task in ("vit", "gpt")]
    (tmp_path / "larger.json").write_text(json.dumps(sizes))
    out = tmp_path / "long.json"
    command = ["--tasks", "--larger", str(tmp_path / "larger.json"), "--seeds", "0", "--out", str(out)]
    assert long.main([*command, "--root", str(tmp_path)]) == 0
    assert [r["task"] for r in json.loads(out.read_text())] == ["vit", "vit", "gpt", "gpt"]
    with pytest.raises(SystemExit):
        long.main(command)


def test_what_two_tasks_have_in_common_is_trained_once(started, tmp_path):
    command = ["--root", str(tmp_path), "--tasks", "resmlp", "sparsities", "--settings", "dense", "--seeds", "0"]
    assert long.main([*command, "--out", str(tmp_path / "long.json")]) == 0
    assert len(started) == 1


def test_larger_sizes_are_trained_with_the_setting_that_has_room_for_them_and_dense(started, tmp_path):
    sizes = [
        size("gpt", None, None, "dense", 4),
        size("gpt", "dim", 512, "preset:max", 3),
        size("gpt", "dim", 384, "preset:balanced", 5),
        size("gpt", "batch-size", 96, "preset:max", 3),
    ]
    (tmp_path / "larger.json").write_text(json.dumps(sizes))
    out = tmp_path / "long.json"
    command = ["--tasks", "--larger", str(tmp_path / "larger.json"), "--seeds", "0", "1", "--out", str(out)]
    assert long.main(command) == 0
    found = [(r["dim"], r["batch"], r["epochs"], r["method"], r["seed"]) for r in json.loads(out.read_text())]
    assert sorted(found, key=lambda run: run[2:]) == [
        (512, 64, 3, "dense", 0),
        (512, 64, 3, "dense", 1),
        (512, 64, 3, "preset:max", 0),
        (512, 64, 3, "preset:max", 1),
        (None, 64, 4, "dense", 0),
        (None, 64, 4, "dense", 1),
    ]
    assert long.main([*command, "--axes", "batch-size"]) == 0
    assert len(started) == 10


def test_nothing_starts_when_the_time_is_up(started, tmp_path):
    assert long.main(["--tasks", "gpt", "--seconds", "100", "--out", str(tmp_path / "long.json")]) == 1
    assert started == []


def test_images_need_a_folder(capsys):
    with pytest.raises(SystemExit):
        long.main(["--tasks", "vit"])
    assert "--root must be a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path, capfd):
    out = tmp_path / "long.json"
    command = ["--root", str(tmp_path / "nothing"), "--tasks", "resnet", "--settings", "dense", "--seeds", "0"]
    assert long.main([*command, "--states", str(tmp_path / "states"), "--out", str(out)]) == 1
    assert "nothing" in capfd.readouterr().err


def test_every_task_is_one_that_the_study_takes(tmp_path):
    (tmp_path / "first.pt").write_bytes(b"weights")
    command = ["--root", str(tmp_path), "--first", str(tmp_path / "first.pt"), "--tasks", *long.TASKS]
    runs = list(long.runs_of(long.parsed(command)))
    assert {run.name for run in runs} == set(long.TASKS)
    for run in runs:
        accuracy.parse(run.command(tmp_path / "out.json", 5.0, long.parsed(command))[2:])
    keys = [json.dumps(run.key, sort_keys=True) for run in runs]
    assert len(set(keys)) == len(keys)
    gpt = long.TASKS["gpt"].split()
    context, batch, epochs = (int(gpt[gpt.index(name) + 1]) for name in ("--context", "--batch-size", "--epochs"))
    assert context * batch * epochs * 75 >= 200e6
