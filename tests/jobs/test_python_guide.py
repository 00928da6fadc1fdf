"""docs/guides/jobs-from-python.md, followed literally, with its cells in a real notebook."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbclient.util import ensure_async

from tests.support.pages import blocks

PAGE = "guides/jobs-from-python.md"
LIMIT_S = 300


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page shows."""
    for name in ("CLOUDJOB_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    folder = tmp_path / "project"
    folder.mkdir()
    for block in blocks(PAGE):
        if block.attribute.startswith("file="):
            assert block.kind in ("python", "yaml")
            (folder / block.attribute.removeprefix("file=")).write_text(block.text)
    return folder


def notebook(folder: Path, *cells: str) -> NotebookClient:
    """Return a client with a notebook of these cells."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    return NotebookClient(book, timeout=LIMIT_S, resources={"metadata": {"path": str(folder)}})


def printed(cell: Any) -> str:
    return "".join(each["text"] for each in cell["outputs"] if each["output_type"] == "stream")


def test_the_cells_run_and_print_what_the_page_shows(project: Path):
    page = [block for block in blocks(PAGE) if not block.attribute]
    client = notebook(project, *(block.text for block in page if block.kind == "python"))
    client.execute()

    first, *_ = client.nb.cells
    [table] = [each["data"] for each in first["outputs"] if "data" in each]
    assert table["text/html"].startswith("<table>")
    lines = [line for cell in client.nb.cells for line in printed(cell).splitlines()]
    printed_by_page = [
        line for block in page if block.kind == "output" for line in block.text.splitlines()
    ]
    assert len(printed_by_page) >= 5
    assert [line for line in printed_by_page if line not in lines] == []
    assert (project / "results" / "MODEL" / "weights.txt").is_file()


def test_an_interrupted_cell_leaves_its_job_running(project: Path):
    (project / "train.py").write_text("import time\ntime.sleep(600)\n")
    client = notebook(
        project,
        "import cloudjob\njob = cloudjob.submit('train.py', launcher='python')",
        "print('waiting', flush=True)\njob.wait()",
        "print(job.status().state)\njob.cancel()\nprint(job.wait().state)",
    )
    submit, wait, cancel = client.nb.cells

    async def run() -> None:
        async with client.async_setup_kernel():
            await client.async_execute_cell(submit, 0)
            waiting = asyncio.create_task(client.async_execute_cell(wait, 1))
            while "waiting" not in printed(wait):
                await asyncio.sleep(0.1)
            await ensure_async(client.km.interrupt_kernel())
            with pytest.raises(CellExecutionError) as caught:
                await waiting
            assert caught.value.ename == "KeyboardInterrupt"
            await client.async_execute_cell(cancel, 2)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))

    assert printed(cancel).split() == ["RUNNING", "CANCELLED"]


def test_the_pytest_recipe_passes_as_the_workflow_runs_it(project: Path):
    workflow = yaml.safe_load((project / "workflow.yaml").read_text())
    [train] = workflow["jobs"].values()
    *_, command = [step["run"] for step in train["steps"] if "run" in step]

    done = subprocess.run(
        [*command.split(), "-p", "no:cacheprovider"],
        cwd=project, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_card_follows_a_job_in_place(project: Path):
    (project / "train.py").write_text("import time\nprint('<b>loss 0.5')\ntime.sleep(2)\n")
    client = notebook(
        project,
        "import cloudjob, cloudjob.notebook\njob = cloudjob.submit('train.py', launcher='python')",
        "print(cloudjob.notebook.follow(job, poll_s=0.2).state)",
    )
    client.execute()
    _, followed = client.nb.cells

    (card,) = [each["data"]["text/html"] for each in followed["outputs"] if "data" in each]
    assert "SUCCEEDED" in card
    assert "&lt;b&gt;loss 0.5" in card
    assert printed(followed) == "SUCCEEDED\n"
