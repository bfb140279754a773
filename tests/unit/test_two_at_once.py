"""Two runs of one second, two launches of one folder, two writers of one file."""

import multiprocessing
import os
import subprocess
import sys

import pytest
from make_run import START
from stores import ROOT

from benchlib.config.schema import resolve
from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.files import read_json, write_json
from benchlib.results.run import new_run_dir


def test_runs_of_one_second_get_folders_of_their_own(tmp_path):
    config = resolve("squad").config
    with multiprocessing.get_context("fork").Pool(4) as pool:
        folders = pool.starmap(new_run_dir, [(config, tmp_path, START)] * 40)
    assert len(set(folders)) == 40
    assert len({path.name[:16] for path in folders}) == 1


def test_a_run_folder_is_claimed_once_and_free_after_a_kill(tmp_path):
    assert not run_folder.is_running(tmp_path)
    code = f"from benchlib.core import run_folder; import time; run_folder.claim({str(tmp_path)!r}); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout.readline() == "held\n"
        assert run_folder.is_running(tmp_path)
        with pytest.raises(UserError, match="is in use: another process works on this run"):
            run_folder.claim(tmp_path)
        holder.kill()
    assert not run_folder.is_running(tmp_path)
    os.close(run_folder.claim(tmp_path))


def _write_often(path, text):
    for _ in range(150):
        write_json(path, {"text": text * 4000})


def test_writers_of_one_file_never_show_a_half(tmp_path):
    path = tmp_path / "index.json"
    write_json(path, {"text": "a" * 4000})
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(path, sign)) for sign in "ab"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        text = read_json(path)["text"]
        assert len(text) == 4000 and len(set(text)) == 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [item.name for item in tmp_path.iterdir()] == ["index.json"]
