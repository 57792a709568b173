"""What only a child process can find out about the input is still one line and exit code 2."""

from __future__ import annotations

import shutil

import pytest
from short_run import Home


@pytest.mark.long
def test_a_template_that_cannot_render_is_one_line_and_exit_code_2(home: Home, finished):
    assert home.sao("export", finished["run_id"], "sound").returncode == 0
    broken = home.folder / "broken"
    shutil.copytree(home.folder / "sound", broken)
    (broken / "chat_template.jinja").write_text("{{ raise_exception('no roles here') }}")
    done = home.sao("train", "tiny", "--set", f"model.path={broken}", "--set", "warm_start.enabled=false")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout + done.stderr
