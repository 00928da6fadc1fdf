"""What goes into a package, what stays out, and what is refused."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import socket
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cloudjob.errors import PackageError
from cloudjob.package import CodePackage, LeftOut, PackOptions, check, explain, layer, pack, scan
from cloudjob.package.cache import SourceCache
from cloudjob.package.secrets import Searcher
from cloudjob.package.tree import FILE, FileStat, Rule, SourceEntry, Tree
from jobentry.contract import packages
from jobentry.contract.zip_layer import open_layer

NOBODY = 65534
LIMIT_BYTES = 1 << 30
# Assembled from parts, so that this file is not mistaken for one that contains a secret.
KEY_HEADER = "-----BEGIN RSA " + "PRIVATE KEY-----\n"
PRIVATE_KEY = KEY_HEADER + "MIIEow" + "Ab3/" * 10 + "\n-----END RSA PRIVATE KEY-----\n"
AWS_KEY_ID = "AKIA" + "Q3EGVZLMN5WXYT27"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYq8zT03Nw2m"
ACCESS_KEY = "HST3" + "KQ8ZB2V7WPXN5JDY"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a source with one script."""
    folder = tmp_path / "source"
    write(folder / "train.py", "print('hello')\n")
    return folder


def write(path: Path, text: str = "") -> Path:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def rules() -> Path:
    """Return a state folder with the compiled rules for secrets, shared by a user's tests."""
    return Path(tempfile.gettempdir(), f"cloudjob-test-rules-{os.geteuid()}")


def packed(source: Path, script: str = "train.py", limit_bytes: int = LIMIT_BYTES) -> CodePackage:
    """Pack the source into a layer beside it."""
    return pack(
        source,
        source.parent / "layer",
        script=script,
        limit_bytes=limit_bytes,
        options=PackOptions(home=rules()),
    )


def entries(source: Path) -> dict[str, packages.Entry]:
    """Return the tree in the package, read from its one layer."""
    package = packed(source)
    assert package.new is not None
    return packages.merge([manifest_of(package.new, package.layers[0].digest)])


def manifest_of(layer: Path, digest: str) -> packages.Manifest:
    """Return the manifest of a layer."""
    with layer.open("rb") as file, open_layer(file, digest) as (_, manifest):
        return manifest


def names(source: Path) -> list[str]:
    """Return the names in the package, sorted by their bytes."""
    return sorted(entries(source), key=packages.name_bytes)


def refusal(source: Path, script: str = "train.py") -> PackageError:
    """Return the one-line error of a pack that fails."""
    with pytest.raises(PackageError) as caught:
        packed(source, script)
    assert "\n" not in caught.value.message
    assert not (source.parent / "layer").exists()
    return caught.value


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Run as an ordinary user, because permissions do not restrict root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def open_source() -> Iterator[Path]:
    """Make a source that another user owns, in a folder that everyone can enter."""
    folder = Path(tempfile.mkdtemp())
    write(folder / "source" / "train.py")
    folder.chmod(0o777)
    if os.geteuid() == 0:
        for path in (folder / "source", folder / "source" / "train.py"):
            os.chown(path, NOBODY, NOBODY)
    yield folder / "source"
    for path in folder.rglob("*"):
        path.chmod(0o700)
    shutil.rmtree(folder)


# ---- the package


def test_the_bytes_of_a_layer_depend_only_on_the_tree(tmp_path: Path):
    """The order and time in which files are created do not matter; the digests are fixed."""
    first, second = tmp_path / "1" / "source", tmp_path / "2" / "source"
    files = {"train.py": "print()\n", "b/c.txt": "c", "b-c.txt": "-", "é/ü.txt": "u"}
    for folder, order in ((first, files), (second, reversed(files))):
        for name in order:
            write(folder / name, files[name]).chmod(0o640)
        (folder / "b" / "empty").mkdir()
        (folder / "link").symlink_to("b/c.txt")
        for path in folder.rglob("*"):
            if path.is_dir():
                path.chmod(0o750)
    os.utime(second / "train.py", (1, 1))

    digests = {packed(first).digest, packed(second).digest}
    layers = {(folder.parent / "layer").read_bytes() for folder in (first, second)}

    assert digests == {"sha256:fcd57aea7f6679697160e77d4ef15b11b07af22cd6bd4a6c6299a71dbb433072"}
    assert {hashlib.sha256(layer).hexdigest() for layer in layers} == {
        "4e0ee33e0486a6075e5b7e06e79c11465137a641641a82741fade8c0844c82d4"
    }


def test_the_package_describes_its_tree(source: Path):
    """The layer is named after the digest of its manifest."""
    write(source / "lib" / "model.py", "x" * 100)

    package = packed(source)

    assert package.new is not None
    (layer,) = package.layers
    with zipfile.ZipFile(package.new) as archive:
        digest = hashlib.sha256(archive.read("manifest.json")).hexdigest()
    assert (package.files, package.size_bytes) == (2, 115)
    assert package.digest == packages.tree_digest(entries(source).values())
    size_bytes = package.new.stat().st_size
    assert (layer.digest, layer.key, layer.size_bytes) == (digest, f"layers/{digest}", size_bytes)


def test_modes_are_kept_without_setuid_and_setgid_bits(source: Path):
    (source / "train.py").chmod(0o4755)
    (source / "empty").mkdir(mode=0o700)

    tree = entries(source)

    assert (tree["train.py"].mode, tree["empty"].mode) == (0o755, 0o700)


def test_names_that_are_not_utf8_keep_their_bytes(source: Path):
    (source / "d").mkdir()
    for name in (b"d/\xff", b"d/z", "d/é".encode(), b"d-"):
        Path(os.fsdecode(os.fsencode(source) + b"/" + name)).touch()

    assert [packages.name_bytes(name) for name in names(source)] == [
        b"d", b"d-", b"d/z", "d/é".encode(), b"d/\xff", b"train.py",
    ]  # fmt: skip


def test_hard_links_become_separate_files(source: Path):
    """A package can contain symbolic links but not hard links."""
    os.link(source / "train.py", source / "twin.py")

    assert {entry.kind for entry in entries(source).values()} == {"file"}


# ---- links and special files


@pytest.mark.parametrize(
    ("link", "target", "expected"),
    [
        ("a", "train.py", "train.py"),
        ("d/a", "../train.py", "../train.py"),
        ("a", "./d//", "./d//"),
        ("a", "not-there-yet", "not-there-yet"),
        ("a", "{source}/d", "d"),
        ("d/a", "../../source/train.py", "../train.py"),
        ("a", "a", "a"),
    ],
)
def test_a_link_inside_the_source_stays_a_relative_link(
    source: Path, link: str, target: str, expected: str
):
    """Its target is kept as written unless it leads through folders outside the package."""
    (source / "d").mkdir()
    os.symlink(target.format(source=source), source / link)  # noqa: PTH211 (Path normalizes it)

    assert entries(source)[link].target == expected


def test_links_that_leave_the_source_are_refused_all_at_once(source: Path):
    """The message names each link and its target, including links that leave through others."""
    (source / "shallow").symlink_to("d/e/f")
    (source / "d" / "e" / "f").mkdir(parents=True)
    (source / "data").symlink_to("/etc")
    (source / "d" / "up").symlink_to("../../elsewhere")
    (source / "d" / "e" / "f" / "top").symlink_to("../../..")
    (source / "chain").symlink_to("d/e/f/top/../x")

    error = refusal(source)

    assert error.message == (
        f"packing {source}: chain is a link to d/e/f/top/../x, outside the source; "
        "d/up is a link to ../../elsewhere, outside the source; "
        "data is a link to /etc, outside the source"
    )
    assert "--input" in error.hint


def test_special_files_are_refused(source: Path):
    """A pipe and a socket cannot be sent to another host."""
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        previous = Path.cwd()
        os.chdir(source)  # the path of a socket is limited to 107 bytes
        server.bind("socket")
        os.chdir(previous)

    assert refusal(source).message == f"packing {source}: pipe is a named pipe; socket is a socket"


# ---- what is left out


def test_files_that_no_job_needs_are_left_out(source: Path):
    """These are version control, caches and virtual environments; each is listed with a reason."""
    for name in (".git/config", "a/__pycache__/x.pyc", "b.pyc", "env/pyvenv.cfg", "node_modules/m"):
        write(source / name)
    # Files of an entry that was started by hand in this folder and killed.
    (source / ".cloudjob" / "j").mkdir(parents=True)
    os.mkfifo(source / ".cloudjob" / "j" / "events")
    write(source / "a" / "keep.py")
    (source.parent / "shared").mkdir()
    write(source.parent / "shared" / "pyvenv.cfg")
    (source / "venv").symlink_to("../shared")

    assert names(source) == ["a", "a/keep.py", "train.py"]
    assert packed(source).left_out == (
        LeftOut(".cloudjob/", "cloudjob's default: .cloudjob", Rule.DEFAULT),
        LeftOut(".git/", "cloudjob's default: .git", Rule.DEFAULT),
        LeftOut("a/__pycache__/", "cloudjob's default: __pycache__", Rule.DEFAULT),
        LeftOut("b.pyc", "cloudjob's default: *.pyc", Rule.DEFAULT),
        LeftOut("env/", "cloudjob's default: a virtual environment", Rule.DEFAULT),
        LeftOut("node_modules/", "cloudjob's default: node_modules", Rule.DEFAULT),
        LeftOut("venv", "cloudjob's default: a virtual environment", Rule.DEFAULT),
    )


def test_gitignore_files_are_honoured_in_every_folder(source: Path):
    """As in git, the deepest file with a matching line decides; the reason quotes that line."""
    write(source / ".gitignore", "\ufeff# comment\r\n*.log\r\n/data/\r\n\r\n!\r\n")
    write(source / "a" / ".gitignore", "!keep.log\nlocal.txt\n")
    for name in ("x.log", "data/d", "a/data/d", "a/keep.log", "a/y.log", "a/local.txt"):
        write(source / name)

    package = packed(source)

    assert package.left_out == (
        LeftOut("a/local.txt", "a/.gitignore:2: local.txt"),
        LeftOut("a/y.log", ".gitignore:2: *.log"),
        LeftOut("data/", ".gitignore:3: /data/"),
        LeftOut("x.log", ".gitignore:2: *.log"),
    )
    assert {"a/keep.log", "a/data/d"} <= set(names(source))


def test_cloudjobignore_takes_precedence(source: Path):
    """It can exclude what git keeps and keep what git excludes, also in subfolders."""
    write(source / ".gitignore", "*.so\n")
    write(source / "lib" / ".gitignore", "generated.py\n")
    write(source / ".cloudjobignore", "!*.so\n!generated.py\ndocs/\n!node_modules/\n")
    for name in ("op.so", "lib/generated.py", "docs/index.md", "node_modules/m.js"):
        write(source / name)

    assert set(names(source)) >= {"op.so", "lib/generated.py", "node_modules/m.js"}
    assert packed(source).left_out == (LeftOut("docs/", ".cloudjobignore:3: docs/"),)


def test_a_wildcard_does_not_include_caches_and_keys(source: Path):
    """Only a line with the exact name includes a default exclusion or a secret."""
    write(source / ".cloudjobignore", "/*\n!*.py\n!/src/\n!/server.key\n")
    for name in ("notes.txt", "src/__pycache__/x", "src/.env", "src/model.py"):
        write(source / name)
    write(source / "src" / "ca.key", PRIVATE_KEY)
    write(source / "server.key", PRIVATE_KEY)

    assert names(source) == ["server.key", "src", "src/model.py", "train.py"]


def test_the_layer_is_never_part_of_itself(source: Path):
    """A destination inside the source is left out, even if an earlier layer is there."""
    for _ in range(2):
        result = pack(source, source / "layer", script="train.py", limit_bytes=LIMIT_BYTES)

        manifest = manifest_of(source / "layer", result.layers[0].digest)
        assert [entry.name for entry in manifest.entries] == ["train.py"]
        assert result.new == source / "layer"


@pytest.mark.parametrize("ignore", ["", "!state/\n", "!state\n!state/records.db\n"])
@pytest.mark.parametrize("is_link", [False, True])
def test_the_state_of_cloudjob_is_never_packed(source: Path, ignore: str, is_link: bool):
    """No line in an ignore file can include a ``CLOUDJOB_HOME`` inside the source."""
    home = source.parent / "elsewhere" if is_link else source / "state"
    write(home / "records.db", "x")
    if is_link:
        (source / "state").symlink_to(home)
    write(source / ".cloudjobignore", ignore)

    tree = scan(source, home=home, follow_links=True)

    assert [entry.name for entry in tree.entries] == [".cloudjobignore", "train.py"]
    assert tree.left_out == (
        LeftOut("state/", "the state of cloudjob on this machine: CLOUDJOB_HOME", Rule.STATE),
    )
    assert not explain(source, "state/records.db", home=home, follow_links=True).is_packed


def test_the_state_folder_of_cloudjob_is_not_packed(source: Path):
    with pytest.raises(PackageError, match="CLOUDJOB_HOME"):
        scan(source, home=source)


def test_following_links_is_a_hint_only_if_they_are_not_followed(source: Path):
    (source / "dangling").symlink_to("/no/such/file")

    with pytest.raises(PackageError) as kept:
        scan(source)
    with pytest.raises(PackageError) as followed:
        scan(source, follow_links=True)

    assert "--follow-links" in kept.value.hint
    assert "--follow-links" not in followed.value.hint


# ---- secrets


@pytest.mark.parametrize(
    "name",
    [".env", ".env.local", "a/id_ed25519", ".netrc", ".pypirc", "credentials.csv", "kubeconfig",
     ".obsutilconfig", ".aws/", ".ssh/", ".kube/"],
)  # fmt: skip
def test_a_file_named_like_a_secret_is_left_out(source: Path, name: str):
    """Only the name matters, not the content."""
    path = source / name
    (path.mkdir if name.endswith("/") else lambda: write(path))()

    (left_out,) = packed(source).left_out

    assert left_out.path == name
    assert left_out.reason.startswith("may hold secrets")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deploy.txt", PRIVATE_KEY),
        ("account.json", '{"private_key": "' + PRIVATE_KEY.replace("\n", "\\n") + '"}'),
        ("aws.py", f"KEY = '{AWS_KEY_ID}'\n"),
        ("obs.py", f'client(secret_access_key="{SECRET_KEY}")'),
        ("obs.yaml", f"obs:\n  access_key: {ACCESS_KEY}\n"),
        ("run.sh", f"export HUAWEICLOUD_SDK_SK={SECRET_KEY}\n"),
        ("obs.ini", f"ak={ACCESS_KEY}\nsk={SECRET_KEY}\n"),
    ],
)
def test_a_text_file_with_a_private_key_is_refused(source: Path, name: str, text: str):
    """Keys of servers, of AWS and of Huawei Cloud are found in any small text file."""
    write(source / name, "# a line before\n" + text)

    error = refusal(source)

    assert error.message.startswith(f"packing {source}: may hold secrets: {name}:")
    for value in (SECRET_KEY, ACCESS_KEY, AWS_KEY_ID, "Ab3/Ab3"):
        assert value not in error.message + error.hint


def test_a_key_file_with_a_private_key_is_left_out(source: Path):
    write(source / "server.pem", KEY_HEADER)
    write(source / "ca.pem", "-----BEGIN CERTIFICATE-----\nMIIE\n")

    assert packed(source).left_out == (
        LeftOut("server.pem", "may hold secrets: a private key", Rule.SECRET),
    )
    assert names(source) == ["ca.pem", "train.py"]


def test_all_secrets_are_named_at_once_with_their_lines(source: Path):
    """The message gives file, line and rule for the first secret of each line."""
    write(source / "a.ini", f"[obs]\nak={ACCESS_KEY}\nsk={SECRET_KEY}\n")
    write(source / "b.py", f"\nKEY = '{AWS_KEY_ID}'\n")

    assert refusal(source).message == (
        f"packing {source}: may hold secrets: a.ini:2: access-key; a.ini:3: secret-access-key; "
        "b.py:2: aws-access-key"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env.example", "TOKEN="),
        ("id_rsa.pub", "ssh-rsa AAAA"),
        ("ca.pem", "-----BEGIN CERTIFICATE-----\nMIIE\n"),
        ("keys.py", f"if text.startswith('{KEY_HEADER.strip()}'):\n    pass\n"),
        ("obs.py", "secret_access_key = os.environ['SK']\naccess_key = MY_ACCESS_KEY_FOR_OBS"),
        ("hash.py", "task = 'da39a3ee5e6b4b0d3255bfef95601890afd80709'\n"),
        ("weights.bin", PRIVATE_KEY + "\0"),
    ],
)
def test_ordinary_files_contain_no_secrets(source: Path, name: str, text: str):
    """Public keys, code that handles keys, hashes and binary data are packed."""
    write(source / name, text)

    assert packed(source).left_out == ()


def test_no_file_of_numpy_looks_like_a_secret(tmp_path: Path):
    """Hundreds of ordinary source files cause no false positive."""
    numpy_folder = Path(np.__file__).parent
    files = [path for path in numpy_folder.rglob("*") if path.is_file()]

    searcher = Searcher(rules() / "packages")
    searched, findings = 0, []
    for path in files:
        status = path.stat()
        entry = SourceEntry(path.name, "file", 0o644, FileStat(status.st_size, 0, 0, 0))
        if searcher.tag(entry):
            searched += 1
            findings += searcher.search(entry, path.read_bytes())

    assert searched > 500
    assert findings == []


@pytest.mark.parametrize(("script", "text"), [(".env.py", ""), ("main.py", AWS_KEY_ID + "\n")])
def test_a_script_that_is_a_secret_is_refused(source: Path, script: str, text: str):
    """Leaving out the job's own script would only make the job fail later."""
    write(source / script, text)
    (source / "alias.py").symlink_to(script)

    for name in (script, "alias.py"):
        assert "may hold secrets" in refusal(source, name).message


# ---- the script


@pytest.mark.parametrize(
    ("script", "reason", "hint"),
    [
        ("trian.py", "no such file", "did you mean train.py?"),
        ("model.py", "no such file", "did you mean lib/model.py?"),
        ("modle.py", "no such file", "did you mean lib/model.py?"),
        ("zzz", "no such file", "the script's path is relative to --source"),
        ("lib", "a folder", "name a file in it"),
        ("", "a folder", "name a file in it"),
        ("../train.py", "outside the source", "the script's path is relative to --source"),
        ("/bin/true", "outside the source", "the script's path is relative to --source"),
        ("x.pyc", "cloudjob's default: *.pyc", "a line !x.pyc in .cloudjobignore keeps it"),
        (
            "old/run.py",
            "in old/, .gitignore:1: old/",
            "a line !old/ in .cloudjobignore keeps it",
        ),
    ],
)
def test_a_script_that_is_not_in_the_package_is_refused(
    source: Path, script: str, reason: str, hint: str
):
    """The message states the reason, and the hint suggests what to try."""
    for name in ("lib/model.py", "x.pyc", "old/run.py"):
        write(source / name)
    write(source / ".gitignore", "old/\n")

    error = refusal(source, script)

    assert error.message == f"packing {source}: script {script}: {reason}"
    assert error.hint == hint
    assert error.exit_code == 3


def test_a_script_may_be_reached_in_any_way_inside_the_source(source: Path):
    """Its path may contain a link, a linked folder or dots."""
    write(source / "lib" / "run.py")
    (source / "now").symlink_to("lib")
    (source / "start.py").symlink_to("lib/run.py")

    for script in ("lib/run.py", "./lib/../lib/run.py", "now/run.py", "start.py"):
        assert packed(source, script).files == 2


# ---- unreadable sources


def test_a_source_that_is_not_a_folder_is_refused(source: Path):
    """The messages for a missing folder and for a file differ."""
    missing, file = source / "missing", source / "train.py"

    with pytest.raises(PackageError, match="missing: no such folder"):
        scan(missing)
    with pytest.raises(PackageError, match=r"train\.py: not a folder"):
        scan(file)


@pytest.mark.parametrize("name", [".", "folder", "file.txt", "train.py", ".gitignore"])
def test_the_error_names_a_path_that_cannot_be_read(open_source: Path, name: str):
    """One line names the path instead of a traceback, and nothing is left behind."""
    (open_source / "folder").mkdir()
    write(open_source / "file.txt")
    write(open_source / ".gitignore")
    (open_source / name).chmod(0)

    with ordinary_user():
        error = refusal(open_source)

    assert error.message.startswith(f"packing {open_source}: ")
    assert name in error.message
    assert error.message.endswith("permission denied")


def test_the_error_names_an_unwritable_destination(source: Path):
    """The message names the destination, not the source."""
    with pytest.raises(PackageError, match=r"writing the package to .*: no such file or directory"):
        pack(source, source / "no" / "layer", script="train.py", limit_bytes=LIMIT_BYTES)
    with pytest.raises(PackageError, match=r"writing the package to .*: is a directory"):
        pack(source, source.parent, script="train.py", limit_bytes=LIMIT_BYTES)


def test_a_failed_pack_leaves_no_file(source: Path):
    """On a full disk, no incomplete archive is left."""
    write(source / "data.txt", "x" * 100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        error = refusal(source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert error.message == f"writing the package to {source.parent}/layer: file too large"
    assert "ulimit -f" in error.hint


@pytest.mark.parametrize("size_bytes", [5, 9 * 1024 * 1024])
@pytest.mark.parametrize("change", ["grow", "shrink", "touch", "replace", "remove", "link"])
def test_a_file_that_changes_after_the_scan_is_refused(source: Path, size_bytes: int, change: str):
    """A file must not change between scan and read, whether small or large."""
    file = source / "log.bin"
    file.write_bytes(b"x" * size_bytes)
    tree = scan(source)
    if change in ("replace", "remove", "link"):
        file.unlink()
    if change == "grow":
        file.write_bytes(b"x" * (size_bytes + 1))
    elif change == "shrink":
        file.write_bytes(b"x" * (size_bytes - 1))
    elif change == "touch":
        os.utime(file, (1, 1))
    elif change == "replace":
        os.mkfifo(file)
    elif change == "link":
        file.symlink_to("train.py")

    with pytest.raises(PackageError, match=r"log\.bin: changed while it was read"):
        layer.make(
            layer.LayerInputs(
                tree, SourceCache(), source.parent / "layer", False, Searcher(), lambda _: False, 0
            )
        )
    assert not (source.parent / "layer").exists()


# ---- the limit


def test_a_source_over_the_limit_is_refused_before_it_is_read(source: Path):
    """The ten largest paths are listed; reading the sparse file of 1 TB would take hours."""
    write(source / "data" / "huge.bin")
    os.truncate(source / "data" / "huge.bin", 1 << 40)
    for index in range(20):
        write(source / f"{index:02}.txt", "x" * 2048)

    error = refusal(source)

    total, _, listed = error.message.partition("; largest: ")
    assert total == f"packing {source}: 1.1 TB is over the limit of 1.1 GB"

    assert listed.split(", ")[:3] == ["/data/ 1.1 TB", "/data/huge.bin 1.1 TB", "/00.txt 2.0 kB"]
    assert len(listed.split(", ")) == 10
    assert ".cloudjobignore" in error.hint


def test_a_source_that_is_hardly_over_the_limit_is_reported_in_bytes(source: Path):
    write(source / "data" / "large.bin")
    os.truncate(source / "data" / "large.bin", 1 << 30)

    error = refusal(source)

    assert re.search(
        r": 1,073,741,\d{3} bytes is over the limit of 1,073,741,824 bytes", str(error)
    )


def test_files_that_are_left_out_do_not_count_towards_the_limit(source: Path):
    """Excluding a folder in .cloudjobignore brings the source below the limit."""
    write(source / "data" / "huge.bin")
    os.truncate(source / "data" / "huge.bin", 1 << 40)
    write(source / ".cloudjobignore", "data/\n")

    assert packed(source).files == 2


def test_a_script_that_only_a_file_system_without_case_finds_is_refused(source: Path):
    write(source / "train.py")
    entries = (SourceEntry("Train.py", FILE, 0o644), SourceEntry("lib/train.py", FILE, 0o644))

    with pytest.raises(PackageError) as caught:
        check.script(Tree(source, entries, ()), "train.py")
    check.script(Tree(source, (*entries, SourceEntry("train.py", FILE, 0o644)), ()), "train.py")

    assert caught.value.message.endswith("script train.py: the file's name is Train.py")
    assert "case-sensitive" in caught.value.hint


def test_names_on_macos_are_normalised_to_nfc(source: Path, monkeypatch: pytest.MonkeyPatch):
    name = "mode\N{COMBINING GRAVE ACCENT}les"
    write(source / name / f"{name}.py")
    names_elsewhere = [entry.name for entry in scan(source).entries]
    monkeypatch.setattr("sys.platform", "darwin")
    names_on_macos = [entry.name for entry in scan(source).entries]

    assert f"{name}/{name}.py" in names_elsewhere
    assert "mod\xe8les/mod\xe8les.py" in names_on_macos
