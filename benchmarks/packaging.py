"""Benchmark cases of packages: pack a source, pack it again, and unpack it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.case import Case, Figures, Subject
from benchmarks.measure import Command, Failed, Sample
from benchmarks.subject import Bench
from benchmarks.venv import CACHE, ROOT, NotRun

_DRIVER = ROOT / "benchmarks" / "drivers" / "packaging.py"
_FIGURES = ("wall_s", "cpu_s", "rss_mib", "other_rss_mib", "sent_bytes")
_GIB = 1024**3


def cases() -> tuple[Case, ...]:
    """Return every case of packages."""
    source, many = partial(_files, 8_500, 109_000_000), partial(_files, 10_000, 60_000_000)
    zipped = partial(_by_driver, mode="zip", tree=source)
    unchanged = partial(_pack, tree=many, before=_nothing)
    return (
        Case(
            "package-first",
            "first pack of 8,500 files, 109 MB",
            _FIGURES,
            (
                Subject("tar", partial(_tar, tree=source)),
                Subject("cloudjob", partial(_pack_only, tree=source), inspect=driver_figures),
                Subject("skypilot's zip", zipped, rounds=2, inspect=driver_figures),
                Subject("torchx's copy", partial(_by_driver, mode="copy", tree=source)),
            ),
            watches_memory=True,
        ),
        Case(
            "package-again",
            "the same 10,000 files once more, nothing changed",
            _FIGURES,
            (Subject("cloudjob", unchanged, inspect=driver_figures),),
        ),
        Case(
            "package-edit",
            "one line edited in one of 10,000 files",
            _FIGURES,
            (Subject("cloudjob", partial(_pack, tree=many, before=_edit), inspect=driver_figures),),
        ),
        Case(
            "package-git",
            "300 files beside a .git of 300 MB",
            _FIGURES,
            (
                Subject("tar", partial(_tar, tree=_heavy_git)),
                Subject("cloudjob", partial(_pack, tree=_heavy_git), inspect=driver_figures),
            ),
        ),
        Case(
            "package-large",
            "one file of 1 GiB",
            _FIGURES,
            (
                Subject("tar", partial(_tar, tree=_large)),
                Subject("cloudjob", partial(_pack_only, tree=_large), inspect=driver_figures),
            ),
            rounds=2,
            watches_memory=True,
        ),
        Case(
            "package-unpack",
            "8,500 files, 109 MB unpacked",
            _FIGURES,
            (
                Subject("tar", partial(_untar, tree=source)),
                Subject("unzip", partial(_unzip, tree=source)),
                Subject("cloudjob", partial(_unpack, tree=source)),
            ),
            watches_memory=True,
        ),
    )  # fmt: skip


Tree = Callable[[], Path]

# ---- commands ------------------------------------------------------------------------------------


def _tar(bench: Bench, run: Path, tree: Tree) -> Command:
    argv = ("tar", "-cf", str(run / "out.tar"), "-C", str(tree()), ".")
    return bench.command((shutil.which("tar") or "tar", *argv[1:]), run, "noop.py")


def _untar(bench: Bench, run: Path, tree: Tree) -> Command:
    archive = CACHE / "trees" / f"{tree().name}.tar"
    if not archive.exists():
        subprocess.run(("tar", "-cf", str(archive), "-C", str(tree()), "."), check=True)
    (run / "out").mkdir()
    argv = (shutil.which("tar") or "tar", "-xf", str(archive), "-C", str(run / "out"))
    return bench.command(argv, run, "noop.py")


def _nothing(_tree: Path) -> None:
    pass


def _edit(tree: Path) -> None:
    path = tree / "train.py"
    path.write_text(f"print({os.urandom(4).hex()!r})\n" + "# a line\n" * 500)


def _pack(
    bench: Bench,
    run: Path,
    tree: Tree,
    options: tuple[str, ...] = (),
    before: Callable[[Path], None] | None = None,
) -> Command:
    """Pack a tree for the first time or, with ``before``, again after that change."""
    home = run / "home"
    home.mkdir()
    argv = (python_of(bench), str(_DRIVER), "pack", str(tree()), str(home), *options)
    # The rules for secrets are compiled once and then reused.
    kept = CACHE / "rules"
    if before is not None or not kept.exists():
        _run(argv)
        shutil.copytree(home / "packages", kept, dirs_exist_ok=True)
    if before is not None:
        before(tree())
    else:
        shutil.rmtree(home)
        shutil.copytree(kept, home / "packages")
    return bench.command(argv, run, "noop.py")


def _run(argv: tuple[str, ...]) -> None:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"exit {done.returncode}: {(done.stderr.splitlines() or ['no message'])[-1]}")


def _pack_only(bench: Bench, run: Path, tree: Tree) -> Command:
    """Pack for the first time, to the file that would be uploaded."""
    return _pack(bench, run, tree, ("--pack-only",))


def _unzip(bench: Bench, run: Path, tree: Tree) -> Command:
    unzip = shutil.which("unzip")
    if unzip is None:
        raise NotRun("unzip is not installed")
    (layer,) = (_home_after_pack(bench, tree) / "store" / "layers").iterdir()
    return bench.command((unzip, "-q", str(layer), "-d", str(run / "out")), run, "noop.py")


def _home_after_pack(bench: Bench, tree: Tree) -> Path:
    """Return the home of a user who has packed a tree once."""
    home = CACHE / "trees" / f"{tree().name}.zip-home"
    if not home.exists():
        new = home.with_name(f"{home.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        argv = (python_of(bench), str(_DRIVER), "pack", str(tree()), str(new))
        _run(argv)
        new.rename(home)
    return home


def _unpack(bench: Bench, run: Path, tree: Tree) -> Command:
    argv = (
        python_of(bench),
        str(_DRIVER),
        "unpack",
        str(_home_after_pack(bench, tree)),
        str(run / "out"),
    )
    entry = str(ROOT / "entrypoints")
    return bench.command(argv, run, "noop.py", PYTHONPATH=entry)


def _by_driver(bench: Bench, run: Path, mode: str, tree: Tree) -> Command:
    argv = (bench.python, str(_DRIVER), mode, str(tree()), str(run / "out"))
    return bench.command(argv, run, "noop.py")


def python_of(bench: Bench) -> str:
    """Return the interpreter that has cloudjob."""
    python = bench.cloudjob.parent / "python"
    if not python.exists():
        raise NotRun("cloudjob is not installed: run scripts/demo or give --cloudjob")
    return str(python)


def driver_figures(sample: Sample) -> Figures:
    """Return the figures that a driver printed as JSON."""
    try:
        figures = json.loads(sample.stdout.read_text())
    except ValueError as error:
        raise Failed("the driver said nothing") from error
    return {name: float(value) for name, value in figures.items()}


# ---- trees ---------------------------------------------------------------------------------------


def _cached_tree(name: str, make: Callable[[Path], None]) -> Path:
    """Return a tree, created if it does not exist; the same on every machine."""
    folder = CACHE / "trees" / name
    if not folder.exists():
        new = folder.with_name(f"{name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        (new / "train.py").write_text("print()\n")
        make(new)
        new.rename(folder)
    return folder


def _files(count: int, size_bytes: int) -> Path:
    """Return a tree like a typical project: nine in ten files are text, most are small."""

    def make(folder: Path) -> None:
        rng = random.Random(7)
        library = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
        shares = [min(int(rng.lognormvariate(8.2, 1.4)) + 20, 2_000_000) for _ in range(count)]
        factor = size_bytes / sum(shares)
        for number, share in enumerate(shares):
            inner = folder / f"part{number % 40:02}" / f"inner{number % 400 // 40:02}"
            inner.mkdir(parents=True, exist_ok=True)
            size = max(1, int(share * factor))
            if number % 10 == 9:
                (inner / f"{number}.bin").write_bytes(rng.randbytes(size))
            else:
                begin = rng.randrange(len(text) - size)
                (inner / f"{number}.py").write_bytes(text[begin : begin + size])

    return _cached_tree(f"files-{count}", make)


def _heavy_git() -> Path:
    def make(folder: Path) -> None:
        rng = random.Random(8)
        (folder / ".git" / "objects").mkdir(parents=True)
        for number in range(300):
            (folder / ".git" / "objects" / f"{number}").write_bytes(rng.randbytes(1_000_000))
            (folder / f"{number}.py").write_bytes(b"x = 1\n" * 500)

    return _cached_tree("git", make)


def _large() -> Path:
    def make(folder: Path) -> None:
        rng = random.Random(9)
        with (folder / "model.bin").open("wb") as file:
            for _ in range(_GIB // (4 << 20)):
                file.write(rng.randbytes(4 << 20))

    return _cached_tree("large", make)
