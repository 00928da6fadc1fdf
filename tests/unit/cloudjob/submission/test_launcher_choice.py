"""The choice of a launcher for a script; the tests write real files but run none."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from cloudjob.model.job import JobSpec
from cloudjob.submission import checks, launcher_choice
from cloudjob.submission.launcher_choice import Choice
from jobentry.contract.launchers import LAUNCHERS


@pytest.fixture
def choose(tmp_path):
    """Return a function that writes files into a source and chooses the launcher of a script."""

    def run(text: str | bytes, script: str = "train.py", /, files=(), **spec) -> Choice:
        for name, content in {script: text, **dict(files)}.items():
            path = Path(tmp_path, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else textwrap.dedent(content).encode()
            path.write_bytes(data)
        described = JobSpec(script=script, source=str(tmp_path), **spec)
        script = checks.read_script(described)
        return launcher_choice.choose(described, script.files, script.nested)

    return run


@pytest.mark.parametrize(
    ("text", "launcher", "module"),
    [
        ("import horovod.torch as hvd", "horovod", "horovod"),
        ("from horovod import torch as hvd", "horovod", "horovod"),
        ("import torch.distributed as dist", "torchrun", "torch.distributed"),
        ("from torch import distributed", "torchrun", "torch.distributed"),
        ("from torch.distributed.fsdp import *", "torchrun", "torch.distributed"),
        ("import torch as t\nt.distributed.barrier()", "torchrun", "torch.distributed"),
        ("from mpi4py import MPI", "mpirun", "mpi4py"),
        ("import os, mpi4py.MPI", "mpirun", "mpi4py"),
        ("if True:\n    def f():\n        import mpi4py", "mpirun", "mpi4py"),
        (
            "import torch.nn as nn\nnn.parallel.DistributedDataParallel(1)",
            "torchrun",
            "torch.nn.parallel.DistributedDataParallel",
        ),
    ],
)
def test_an_import_names_its_launcher(choose, text, launcher, module):
    assert choose(text) == (launcher, f"train.py imports {module}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import torch, numpy",
        "# import horovod",
        '"""import horovod.torch as hvd"""',
        "name = 'import mpi4py'",
        "import horovodlike, mpi4pyx",
        "import torch\ntorch.distributedx",
        "class torch: pass\ntorch.distributed",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import horovod",
        "import typing as t\nif t.TYPE_CHECKING:\n    import mpi4py",
    ],
)
def test_text_that_is_not_an_import_chooses_no_launcher(choose, text):
    """Examples are comments, strings, similar names, and imports for type checkers only."""
    choice = choose(text)

    assert choice == (
        "mpirun",
        "train.py imports none of horovod, mindspore, mpi4py, torch.distributed",
    )


@pytest.mark.parametrize(
    ("text", "launcher", "reason"),
    [
        (
            "import torch.distributed\nimport horovod.torch",
            "horovod",
            "imports horovod, and torch.distributed",
        ),
        (
            "import torch.distributed\nfrom mpi4py import MPI",
            "mpirun",
            "imports mpi4py, and torch.distributed",
        ),
        (
            "try:\n    import horovod\nexcept ImportError:\n    horovod = None\nimport mpi4py",
            "mpirun",
            "imports mpi4py",
        ),
        (
            "import torch.distributed\ndef main():\n    import horovod",
            "torchrun",
            "imports torch.distributed",
        ),
        ("try:\n    import mpi4py\nexcept:\n    pass", "mpirun", "imports mpi4py"),
        (
            "try:\n    import horovod\nexcept (KeyError, ModuleNotFoundError):\n    import mpi4py",
            "horovod",
            "imports horovod, and mpi4py",
        ),
    ],
)
def test_the_most_specific_import_selects_the_launcher(choose, text, launcher, reason):
    assert choose(text) == (launcher, f"train.py {reason}")


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("import net", "net.py"),
        ("from net import model", "net/model.py"),
        ("import net.model.deep", "net/model/deep.py"),
        ("from net.model import Net", "net/model/__init__.py"),
        ("def main():\n    from net import model", "net/__init__.py"),
    ],
)
def test_modules_of_the_user_are_followed(choose, text, file):
    choice = choose(text, files={file: "import torch.distributed"})

    assert choice == ("torchrun", f"{file}, which train.py imports, imports torch.distributed")


def test_imports_are_followed_through_modules_of_the_user(choose):
    files = {
        "src/a.py": "from b import c",
        "src/b/__init__.py": "from . import c\nimport a",
        "src/b/c.py": "from .d import e\nfrom .. import f",
        "src/b/d.py": "from mpi4py import MPI",
        "b/d.py": "import horovod",
    }

    choice = choose("import a", "src/train.py", files=files)

    assert choice == ("mpirun", "src/b/d.py, which src/train.py imports, imports mpi4py")


def test_the_nearest_module_decides(choose):
    """Imports of the script take precedence over those of the modules that it imports."""
    files = {"a.py": "import b, torch.distributed", "b.py": "import horovod"}

    assert choose("import a", files=files).launcher == "torchrun"
    assert choose("import a, mpi4py", files=files).launcher == "mpirun"


def test_a_module_that_nothing_imports_is_ignored(choose):
    """The module is beside the script, which does not import it."""
    assert choose("import os", files={"old.py": "import horovod"}).launcher == "mpirun"


def test_a_module_of_the_user_shadows_a_framework_of_the_same_name(choose):
    assert choose("import mpi4py", files={"mpi4py.py": "import torch.distributed"}) == (
        "torchrun",
        "mpi4py.py, which train.py imports, imports torch.distributed",
    )


def test_a_folder_without_python_files_does_not_shadow_a_framework(choose):
    """Python prefers an installed package to a folder of that name without __init__.py."""
    notes = {"horovod/notes.md": "", "torch/config.yaml": ""}

    assert choose("import horovod.torch", files=notes).launcher == "horovod"
    assert choose("import torch.distributed", files=notes).launcher == "torchrun"
    shadowing = {"torch/__init__.py": "", "horovod/__init__.py": ""}
    assert choose("import horovod.torch, torch.distributed", files=shadowing).launcher == "mpirun"


@pytest.mark.parametrize(
    "text",
    [b"print 'old'", b"\xff\xfe\x00", b"(" * 5000, b"-" * 90_000 + b"1", b"x = 1\n" * 200_000],
)
def test_an_unreadable_file_is_ignored(choose, text, recwarn):
    """The cases are Python 2, binary, deeply nested and huge files; the nodes report any error."""
    assert choose(text).launcher == "mpirun"
    assert choose(b"import broken\nimport torch.distributed", files={"broken.py": text}) == (
        "torchrun",
        "train.py imports torch.distributed",
    )
    assert not recwarn.list


def test_the_image_selects_the_launcher_if_the_script_imports_no_framework(choose):
    """The name of a ModelArts preset is treated like the name of an image."""
    preset = {"modelarts": {"engine": "horovod_0.22.1-pytorch_1.8.0-cuda_10.2"}}

    image = choose("", image="cloudjob/pytorch:1")
    script = choose("import mpi4py", image="cloudjob/pytorch:1")
    engine = choose("", backend="modelarts", **preset)

    assert image == ("torchrun", "the image is 'cloudjob/pytorch:1'")
    assert script == ("mpirun", "train.py imports mpi4py")
    assert engine == ("horovod", f"the engine is '{preset['modelarts']['engine']}'")
    assert choose("", image="me/torchlike:1").launcher == "mpirun"


def test_a_script_of_another_language_is_not_read(choose):
    """A shell script gets the default launcher, unless the image selects another."""
    assert choose("import horovod", "run.sh") == (
        "mpirun",
        "run.sh is not a Python script",
    )


def test_horovod_with_gloo_is_a_separate_launcher(choose):
    choice = choose("import horovod.torch", env={"HOROVOD_CONTROLLER": "gloo"})

    assert choice == (
        "horovod-gloo",
        "train.py imports horovod, and HOROVOD_CONTROLLER is gloo",
    )


def test_every_name_that_can_be_chosen_is_a_launcher():
    names = {*launcher_choice._BY_IMPORT.values(), *launcher_choice._BY_IMAGE.values()}

    assert names <= set(LAUNCHERS)
