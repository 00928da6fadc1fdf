"""A job imports its package, not the source folder to which an editable install points."""

from __future__ import annotations

import subprocess
import sys

PRINTS = "import sample\nprint(sample.VALUE, sample.__file__)\n"


def test_a_job_does_not_see_what_changes_in_the_source_after_the_submit(cloud, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (folder,) = environment.glob("lib/python3*/site-packages")
    (folder / "__editable__.sample.pth").write_text(f"{cloud.source}/src\n")
    module = cloud.source / "src" / "sample.py"
    module.parent.mkdir()
    module.write_text("VALUE = 'submitted'\n")
    cloud.write("job.yaml", f"process: {{python: {environment}/bin/python}}\n")
    script = cloud.script("write_result('up')\nawait_file('changed')\n" + PRINTS)

    run = cloud.start_submit("--config", "job.yaml", script)
    cloud.await_results("up")
    module.write_text("VALUE = 'changed'\n")
    (cloud.results / "changed").touch()
    done = run.end()

    assert done.code == 0, done
    value, file = done.lines[0].split()[1:]
    assert (value, str(cloud.source).encode() in file) == (b"submitted", False), done
