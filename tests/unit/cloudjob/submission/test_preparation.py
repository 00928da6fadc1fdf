"""What a submit decides and computes before it sends anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudjob.model.job import JobSpec
from cloudjob.submission import checks, preparation
from cloudjob.submission.launcher_choice import Choice
from cloudjob.submission.preparation import DecidedJob, SweepMember, Target
from tests.support.homes import make_used_home


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A folder for the package; the source and the state folder are beside it."""
    make_used_home(tmp_path / "home")
    for name in ("scratch", "source"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "source" / "train.py").write_text("import torch.distributed\n")
    return tmp_path / "scratch"


def decided(scratch: Path, **values: Any) -> tuple[Target, DecidedJob]:
    """Return the decision about a job whose script imports torch."""
    source = str(scratch.parent / "source")
    spec = JobSpec(script="train.py", source=source, nodes=2, **values)
    target = Target.open(spec, scratch.parent / "home")
    script = checks.read_script(spec)
    return target, preparation.decide(spec, script, target, scratch, may_query=False)


def test_a_decision_has_everything_that_the_user_left_open(scratch: Path):
    _, decision = decided(scratch)

    assert decision.choice == Choice("torchrun", "train.py imports torch.distributed")
    assert (decision.spec.launcher, decision.spec.procs_per_node) == ("torchrun", 1)
    assert decision.package.files == 1
    assert list(preparation.choices(decision.choice, decision.ranks)) == [
        "launcher torchrun: train.py imports torch.distributed"
    ]


def test_a_decision_repeats_nothing_that_the_user_chose(scratch: Path):
    _, decision = decided(scratch, launcher="python")

    assert decision.choice is None
    assert not list(preparation.choices(decision.choice, decision.ranks))


def test_a_prepared_job_has_the_request_of_its_submission(scratch: Path):
    target, decision = decided(scratch, env={"SEED": "7"})

    prepared = preparation.prepare("train-1", decision, target, scratch)

    layers = tuple(target.store.uri(layer.key) for layer in decision.package.layers)
    assert prepared.spec == decision.spec
    assert prepared.submission.code.layers == layers
    environments = list(target.backend.environments(prepared.request))
    assert [each["SEED"] for each in environments] == ["7", "7"]
    assert {each["CLOUDJOB_CODE_DIGEST"] for each in environments} == {decision.package.digest}


def test_a_prepared_job_cannot_be_changed(scratch: Path):
    target, decision = decided(scratch)
    prepared = preparation.prepare("train-1", decision, target, scratch)

    with pytest.raises(AttributeError):
        prepared.request = None  # type: ignore[misc]


def test_another_package_makes_another_request_and_keeps_the_rest(scratch: Path):
    """For example, a layer that another submit has stored is no longer in the store."""
    target, decision = decided(scratch)
    member = SweepMember("train-sweep", {"lr": "0.1"})
    prepared = preparation.prepare("train-1", decision, target, scratch, member)
    other = decision.package._replace(digest="sha256:" + "1" * 64)

    changed = prepared.with_package(other, other.layers)

    [digest] = {
        each["CLOUDJOB_CODE_DIGEST"] for each in target.backend.environments(changed.request)
    }
    assert digest == changed.package.digest == other.digest
    assert (changed.paths, changed.spec, changed.member) == (
        prepared.paths,
        prepared.spec,
        member,
    )
