"""The mpirun command: the documented options, in a form that 4.1 and 5.0 accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import names
from jobentry.contract.env import NodeEnv, OpenMpi
from jobentry.contract.paths import NodePaths
from jobentry.launchers import mpirun
from jobentry.launchers.common import ArgsError, Launch, Mpi, Site
from jobentry.launchers.mpi import DEFAULT_MCA_ARGS, RemoteShell, rank_program, remote_shell
from jobentry.rank import wrapper

MPI_4 = Mpi("/usr/bin/mpirun", (4, 1))
MPI_5 = Mpi("/opt/bin/mpirun", (5, 0))
NODE = NodeEnv(job="j", hosts=("a", "b"), slots=2)
DEFAULTS = OpenMpi()
FILES = ("/n/hostfile", "/n/tune")
PROGRAM = ("python3", "train.py", "--lr", "0.1")


class Command(NamedTuple):
    """mpirun, its environment, and the texts of its files."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    host_file: str
    tune_file: str
    notes: tuple[str, ...]


def as_command(launch: Launch) -> Command:
    (process,), (host_file, tune_file) = launch.processes, launch.files
    return Command(process.argv, process.env, host_file.text, tune_file.text, launch.notes)


def command(
    open_mpi: OpenMpi = DEFAULTS,
    environ: dict[str, str] | None = None,
    mpi: Mpi = MPI_4,
    node: NodeEnv = NODE,
) -> Command:
    """Return the command for the user's options."""
    node = node._replace(open_mpi=open_mpi)
    return as_command(mpirun.command(node, environ or {}, mpi, FILES, PROGRAM))


def options(mpirun_command: Command) -> list[str]:
    """Return the arguments before the program."""
    return list(mpirun_command.argv[: -len(PROGRAM)])


def parsed(mpirun_command: Command) -> tuple[list[str], dict[str, str]]:
    """Return the variables and the MCA parameters of a command; no parameter may be repeated."""
    variables: list[str] = []
    parameters: dict[str, str] = {}
    arguments = options(mpirun_command)
    while arguments:
        argument = arguments.pop(0)
        if argument == "-x":
            variables.append(arguments.pop(0))
        elif argument == "--mca":
            name, value = arguments.pop(0), arguments.pop(0)
            assert name not in parameters
            parameters[name] = value
        elif argument == "--gmca":
            del arguments[:2]
        elif argument in ("--bind-to", "--map-by", "-H"):
            arguments.pop(0)
    return variables, parameters


def mca(mpirun_command: Command) -> dict[str, str]:
    """Return the MCA parameters of a command."""
    return parsed(mpirun_command)[1]


def carried(mpirun_command: Command) -> dict[str, str | None]:
    """Return the variables that are passed to the ranks, with their values."""
    on_line = parsed(mpirun_command)[0]
    in_file = [line.split(" ", 1)[1] for line in mpirun_command.tune_file.splitlines()]
    assert len(set(on_line + in_file)) == len(on_line + in_file)
    return {name: mpirun_command.env.get(name) for name in on_line + in_file}


def test_open_mpi_4_gets_the_documented_command():
    """The documented options have two dashes, and variables are passed by name only."""
    environ = {
        "MA_VJ_NAME": "j",
        "MA_X": "k=v",
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "Y": "1",
    }

    assert command(environ=environ) == Command(
        argv=(
            *("/usr/bin/mpirun", "-np", "4", "--hostfile", "/n/hostfile"),
            *("--mca", "plm_rsh_args", "-p 38888", "--tune", "/n/tune"),
            *("--bind-to", "none", "--map-by", "slot"),
            *("-x", "MA_X", "-x", "PATH", "-x", "LD_LIBRARY_PATH"),
            *("-x", "HOROVOD_MPI_THREADS_DISABLE", "-x", "NCCL_DEBUG"),
            *("-x", "NCCL_SOCKET_IFNAME", "-x", "NCCL_SOCKET_FAMILY", "-x", "NCCL_IB_DISABLE"),
            *("-x", "CLOUDJOB_EXACT_PATH", "-x", "CLOUDJOB_EXACT_LD_LIBRARY_PATH"),
            *("--mca", "pml", "ob1", "--mca", "btl", "^openib"),
            *("--mca", "plm_rsh_no_tree_spawn", "true"),
            *PROGRAM,
        ),
        env={
            **environ,
            "HOROVOD_MPI_THREADS_DISABLE": "1",
            "NCCL_DEBUG": "INFO",
            "NCCL_SOCKET_IFNAME": "ib0,bond0,eth0",
            "NCCL_SOCKET_FAMILY": "AF_INET",
            "NCCL_IB_DISABLE": "0",
            "CLOUDJOB_EXACT_PATH": "/bin",
            "CLOUDJOB_EXACT_LD_LIBRARY_PATH": "/lib",
        },
        host_file="a slots=2\nb slots=2\n",
        tune_file="-x MA_VJ_NAME\n",
        notes=(),
    )


def test_open_mpi_5_gets_the_documented_command():
    """The command is the same, except for 5.0's names of the remote shell's parameters."""
    assert command(mpi=MPI_5).argv == (
        *("/opt/bin/mpirun", "-np", "4", "--hostfile", "/n/hostfile"),
        *("--mca", "plm_ssh_args", "-p 38888", "--tune", "/n/tune"),
        *("--bind-to", "none", "--map-by", "slot"),
        *("-x", "HOROVOD_MPI_THREADS_DISABLE", "-x", "NCCL_DEBUG"),
        *("-x", "NCCL_SOCKET_IFNAME", "-x", "NCCL_SOCKET_FAMILY", "-x", "NCCL_IB_DISABLE"),
        *("--mca", "pml", "ob1", "--mca", "btl", "^openib"),
        *("--mca", "plm_ssh_no_tree_spawn", "true"),
        *PROGRAM,
    )


@pytest.mark.parametrize(
    ("mpi", "nodes", "expected"), [(MPI_4, 1000, None), (MPI_5, 129, None), (MPI_5, 1000, "999")]
)
def test_open_mpi_5_opens_all_remote_shells_at_once(mpi: Mpi, nodes: int, expected: str | None):
    """Open MPI was seen to hang with a lower limit; the user's value takes precedence."""
    hosts = tuple(f"h{node}" for node in range(nodes))
    many = NODE._replace(hosts=hosts)

    assert mca(command(mpi=mpi, node=many)).get("plm_ssh_num_concurrent") == expected
    user_options = OpenMpi(mca_args="-mca plm_rsh_num_concurrent 8")
    parameters = mca(command(user_options, mpi=mpi, node=many))
    assert "8" in (
        parameters.get("plm_ssh_num_concurrent"),
        parameters.get("plm_rsh_num_concurrent"),
    )


def test_every_variable_can_be_emptied():
    """Only the options that the entry itself needs remain."""
    mpirun_command = command(OpenMpi(bind_args="", x_args="", mca_args="", extra_args=""))

    assert mpirun_command.argv == (
        *("/usr/bin/mpirun", "-np", "4", "--hostfile", "/n/hostfile"),
        *("--mca", "plm_rsh_args", "-p 38888", "--tune", "/n/tune"),
        *("--mca", "plm_rsh_no_tree_spawn", "true"),
        *PROGRAM,
    )


def test_openmpi_np_sets_the_number_of_ranks():
    assert command(OpenMpi(np=3)).argv[:3] == ("/usr/bin/mpirun", "-np", "3")


def test_openmpi_bind_args_replace_the_default():
    """OPENMPI_BIND_ARGS replaces the default; the last option for a setting takes effect."""
    mpirun_command = command(
        OpenMpi(bind_args="-bind-to core --map-by=socket", extra_args="--bind-to hwthread")
    )

    assert [
        argument for argument in mpirun_command.argv if argument in ("core", "none", "slot")
    ] == []
    assert "--map-by socket --bind-to hwthread" in " ".join(mpirun_command.argv)


def test_openmpi_x_args_replace_the_default():
    """OPENMPI_X_ARGS replaces the default, and values stay out of the command."""
    mpirun_command = command(
        OpenMpi(x_args="-x A -x B='1 2' -x C=x=y -x D="), {"A": "a", "NCCL_DEBUG": "WARN"}
    )

    assert carried(mpirun_command) == {"A": "a", "B": "1 2", "C": "x=y", "D": ""}


def test_openmpi_mca_args_replace_the_default():
    """OPENMPI_MCA_ARGS replaces the default, except for options that the entry needs."""
    mpirun_command = command(OpenMpi(mca_args="-mca pml ucx"))

    assert mca(mpirun_command) == {
        "plm_rsh_args": "-p 38888",
        "pml": "ucx",
        "plm_rsh_no_tree_spawn": "true",
    }


def test_extra_args_come_last():
    """OPENMPI_EXTRA_ARGS is passed on, including the arguments of unknown options."""
    mpirun_command = command(
        OpenMpi(x_args="", extra_args="--display-map -report-bindings -N 2 -foo bar")
    )

    assert options(mpirun_command)[-6:] == [
        "--display-map",
        "--report-bindings",
        "-N",
        "2",
        "--foo",
        "bar",
    ]


def test_sshd_port_is_passed_to_the_remote_shell():
    assert mca(command(node=NODE._replace(sshd_port=22)))["plm_rsh_args"] == "-p 22"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-i key", "-p 38888 -i key"),
        ("-p 22", "-p 22"),
        ("-p2222 -i key", "-p2222 -i key"),
        ("-o ConnectTimeout=5", "-p 38888 -o ConnectTimeout=5"),
    ],
)
def test_the_users_remote_shell_arguments_are_merged(arguments: str, expected: str):
    for mpi, name in ((MPI_4, "plm_rsh_args"), (MPI_5, "plm_ssh_args")):
        mpirun_command = command(OpenMpi(mca_args="-mca plm_rsh_args '%s'" % arguments), mpi=mpi)

        assert mca(mpirun_command)[name] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"), [("", "-F/n/ssh-config"), ("-p 22 -q", "-F/n/ssh-config -p 22 -q")]
)
def test_the_ssh_configuration_is_one_argument(arguments: str, expected: str):
    """The file contains the port, as 4.1 loses values with spaces when it starts a daemon tree."""
    open_mpi = OpenMpi(mca_args="-mca plm_rsh_args '%s'" % arguments if arguments else "")
    mpirun_command = mpirun.command(
        NODE._replace(open_mpi=open_mpi), {}, MPI_4, FILES, PROGRAM, RemoteShell("/n/ssh-config")
    )

    assert mca(as_command(mpirun_command))["plm_rsh_args"] == expected


def test_quoted_options_may_contain_spaces():
    mpirun_command = command(OpenMpi(mca_args="-mca a 'x y' --mca b \"z 'w'\" -mca c d\\ e"))

    assert {name: value for name, value in mca(mpirun_command).items() if len(name) == 1} == {
        "a": "x y", "b": "z 'w'", "c": "d e",
    }  # fmt: skip


@pytest.mark.parametrize("form", ['"{}"', "'{}'", ' "{}" '])
def test_quotes_around_a_whole_value_are_ignored(form: str):
    """The documentation shows the values in shell quotes, which a web form does not remove."""
    plain = OpenMpi(
        bind_args="-bind-to none -map-by slot",
        x_args="-x A",
        mca_args="-mca btl tcp",
        extra_args="",
    )
    pasted = OpenMpi(
        **{name: value and form.format(value) for name, value in plain._asdict().items()}
    )._replace(extra_args=form.format(""))

    assert command(pasted) == command(plain)
    pasted_mca = form.format(DEFAULT_MCA_ARGS)
    assert "plm_rsh_args" not in reached(OpenMpi(mca_args=pasted_mca))


def test_a_no_break_space_is_an_argument_as_in_a_shell():
    """``str.strip`` would remove it, but ``shlex`` does not."""
    with pytest.raises(ArgsError, match="is not an option"):
        command(OpenMpi(extra_args="\xa0"), {}, MPI_5)


def test_a_repeated_parameter_keeps_its_last_value():
    """On 4.1 the last of two would win, on 5.0 the first."""
    user_options = OpenMpi(mca_args="-mca btl tcp --mca btl self", extra_args="-mca btl vader,self")
    for mpi in (MPI_4, MPI_5):
        assert mca(command(user_options, mpi=mpi))["btl"] == "vader,self"


def test_parameters_are_renamed_for_the_mpi_version():
    """Options for 4.1 work on 5.0; parameters that 5.0 does not have are left out."""
    user_options = OpenMpi(
        mca_args="-mca plm_rsh_num_concurrent 8 -mca oob_tcp_if_include eth0"
        " -mca orte_rsh_agent ssh -mca routed direct -mca oob tcp"
    )
    mpirun_command = command(user_options, mpi=MPI_5)

    assert mca(mpirun_command) == {
        "plm_ssh_args": "-p 38888",
        "plm_ssh_num_concurrent": "8",
        "prte_if_include": "eth0",
        "plm_ssh_agent": "ssh",
        "plm_ssh_no_tree_spawn": "true",
    }
    assert mpirun_command.notes == (
        "parameter routed: left out, as Open MPI 5.0 does not have it",
        "parameter oob: left out, as Open MPI 5.0 does not have it",
    )
    assert mca(command(OpenMpi(mca_args="-mca plm_ssh_args -q")))["plm_rsh_args"] == "-p 38888 -q"


def test_a_users_variable_wins_over_a_default():
    """``-e NCCL_DEBUG=WARN`` is not undone by the documented default of OPENMPI_X_ARGS."""
    node = NODE._replace(env_names=("NCCL_DEBUG",))

    assert carried(command(environ={"NCCL_DEBUG": "WARN"}, node=node))["NCCL_DEBUG"] == "WARN"
    assert command(environ={"NCCL_DEBUG": "WARN"}).env["NCCL_DEBUG"] == "WARN"


def test_a_users_x_option_wins_over_a_variable():
    mpirun_command = command(OpenMpi(x_args="-x NCCL_DEBUG=INFO"), {"NCCL_DEBUG": "WARN"})

    assert carried(mpirun_command) == {"NCCL_DEBUG": "INFO"}


def test_variables_that_are_not_set_are_left_out():
    """5.0.11 crashes on a variable that is not set; for a default, there is no note."""
    mpirun_command = command(OpenMpi(x_args="-x NONE"))

    assert (carried(mpirun_command), mpirun_command.notes) == (
        {},
        ("-x NONE: left out, as it is not set here",),
    )
    assert command().notes == ()


def test_only_safe_values_are_carried_by_the_tune_file():
    """4.1.4 loses values with "=" and empty values there; the command line carries both."""
    environ = {"MA_A": "plain", "MA_B": "k=v", "MA_C": "", "S3_D": "a b;c\n#d", "LR": "1"}
    mpirun_command = command(OpenMpi(x_args=""), environ, node=NODE._replace(env_names=("LR",)))

    assert mpirun_command.tune_file == "-x MA_A\n-x S3_D\n"
    assert carried(mpirun_command) == environ


def test_a_secret_is_neither_carried_nor_given_to_mpirun():
    """It reaches the ranks through the environment of their own node."""
    node = NODE._replace(secret_names=("S3_KEY", "TOKEN"), env_names=("TOKEN",))
    mpirun_command = command(
        OpenMpi(x_args="-x TOKEN"), {"S3_KEY": "secret1", "TOKEN": "secret2", "A": "b"}, node=node
    )

    assert carried(mpirun_command) == {}
    assert mpirun_command.env == {"A": "b"}
    assert mpirun_command.notes == ("-x TOKEN: left out, as secrets reach every rank without it",)


def test_variables_that_open_mpi_changes_are_copied():
    """Open MPI puts its folder in front of PATH, and sets TMPDIR and PWD itself."""
    mpirun_command = command(
        OpenMpi(x_args="-x TMPDIR=/t -x PWD -x PATH=/p"), {"PWD": "/w", "PATH": "/bin"}
    )

    assert carried(mpirun_command) == {
        "PATH": "/bin",
        "CLOUDJOB_EXACT_PATH": "/p",
        "CLOUDJOB_EXACT_TMPDIR": "/t",
        "CLOUDJOB_EXACT_PWD": "/w",
    }
    assert mpirun_command.env["PWD"] == "/w"


def test_the_variable_mca_base_env_list_is_removed():
    """With OMPI_MCA_mca_base_env_list set, any -x is an error on 4.1."""
    assert (
        command(environ={"OMPI_MCA_mca_base_env_list": "A;B"}).env.get("OMPI_MCA_mca_base_env_list")
        is None
    )


def test_more_ranks_than_slots_are_refused():
    """Open MPI 5.0.11 started fewer ranks than requested and exited with 0."""
    with pytest.raises(ArgsError) as caught:
        command(OpenMpi(np=5))

    assert caught.value.problems == [
        "OPENMPI_NP=5, but there is room for 4 (nodes: 2, slots per node: 2)"
    ]


@pytest.mark.parametrize("args", ["--oversubscribe", "--map-by :OVERSUBSCRIBE", "-oversubscribe"])
def test_oversubscription_can_be_enabled(args: str):
    assert command(OpenMpi(np=5, extra_args=args)).argv[2] == "5"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ("-mca a", "-mca needs 2 arguments"),
        ("--mca", "--mca needs 2 arguments"),
        ("-x", "-x needs 1 argument"),
        ("'open", "no closing quotation"),
        ("end\\", "no escaped character"),
        (":", "':' would start a second program"),
        ("-mca a :", "':' would start a second program"),
        ("--bind-to :", "':' would start a second program"),
        ("none", "'none' is not an option or an option's argument"),
        ("-bind-to none socket", "'socket' is not an option or an option's argument"),
        ("-mca btl tcp self", "'self' is not an option or an option's argument"),
        ("--", "'--' is not an option"),
        ("--report-bindings -", "'-' is not an option"),
    ],
)
def test_invalid_options_are_reported_with_their_variable(args: str, problem: str):
    for field, variable in (
        ("bind_args", "OPENMPI_BIND_ARGS"),
        ("x_args", "OPENMPI_X_ARGS"),
        ("mca_args", "OPENMPI_MCA_ARGS"),
        ("extra_args", "OPENMPI_EXTRA_ARGS"),
    ):
        with pytest.raises(ArgsError) as caught:
            command(OpenMpi()._replace(**{field: args}))

        assert caught.value.problems == ["%s: %s" % (variable, problem)]


def test_all_problems_are_reported_at_once():
    """One submit shows the user all four errors."""
    with pytest.raises(ArgsError) as caught:
        command(OpenMpi(bind_args="'", x_args="-x", mca_args="-mca", extra_args=":"))

    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    "args", ["-np 4", "-n 4", "--hostfile f", "-machinefile f", "-tune f", "-am f", "--np=4"]
)
def test_options_that_the_entry_sets_are_refused(args: str):
    """A second one would be an error in mpirun, or silently take precedence."""
    with pytest.raises(ArgsError, match="the entry sets this itself"):
        command(OpenMpi(extra_args=args))


def test_an_invalid_variable_name_is_refused():
    with pytest.raises(ArgsError) as caught:
        command(OpenMpi(x_args="-x 1A=2"))

    assert caught.value.problems == ["OPENMPI_X_ARGS: cannot carry '1A=2'"]


ARGUMENTS = st.sampled_from(
    [
        "-x",
        "-mca",
        "--mca",
        "-np",
        "-n",
        "-bind-to",
        "--map-by=slot",
        "--map-by",
        "none",
        "-x=A",
        "A",
        "A=1",
        "A=b=c",
        "B=",
        "--",
        "-",
        "=",
        ":",
        "'",
        '"',
        "\\",
        "-mca=a",
        "--gmca",
        "^openib",
        "plm_rsh_args",
        "plm_ssh_agent",
        "routed",
        "--tune",
        "-H",
        "a,b",
        "--oversubscribe",
        "#",
        "$A",
        "''",
        "-x A",
        "-x B=1",
        "-mca a b",
        "-mca plm_rsh_args '-p 1'",
        "\n",
        "\t",
    ]
)
ARGS = st.none() | st.text(max_size=20) | st.lists(ARGUMENTS, max_size=8).map(" ".join)


@given(
    st.builds(
        OpenMpi,
        np=st.none() | st.integers(1, 8),
        bind_args=ARGS,
        x_args=ARGS,
        mca_args=ARGS,
        extra_args=ARGS,
    ),
    st.sampled_from([MPI_4, MPI_5]),
)
def test_any_user_options_give_a_command_or_an_error(open_mpi: OpenMpi, mpi: Mpi):
    try:
        mpirun_command = command(open_mpi, {"A": "a", "PATH": "/bin"}, mpi)
    except ArgsError:
        return
    assert mpirun_command.argv[-len(PROGRAM) :] == PROGRAM
    assert ":" not in mpirun_command.argv
    mca(mpirun_command)
    assert None not in carried(mpirun_command).values()


NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,6}", fullmatch=True) | st.sampled_from(
    [
        "PATH",
        "LD_LIBRARY_PATH",
        "TMPDIR",
        "PWD",
        "HOME",
        "MA_X",
        "S3_KEY",
        "SHARED_A",
        "MA_CURRENT_IP",
        "TOKEN",
        "LR",
    ]
)
# Texts that no argument of the command contains, so that every leaked value is found.
VALUES = st.text("äöü =;\"'\n", min_size=4, max_size=12)


@given(
    st.dictionaries(NAMES, VALUES),
    st.lists(st.tuples(NAMES, st.none() | VALUES), max_size=4),
    st.lists(NAMES, max_size=3),
    st.sampled_from([MPI_4, MPI_5]),
)
def test_no_value_is_in_the_command(
    environ: dict[str, str],
    exports: list[tuple[str, str | None]],
    env_names: list[str],
    mpi: Mpi,
):
    from shlex import quote

    x_args = " ".join(
        "-x " + quote(name if value is None else "%s=%s" % (name, value)) for name, value in exports
    )
    node = NODE._replace(env_names=tuple(env_names), secret_names=("TOKEN",))
    mpirun_command = command(OpenMpi(x_args=x_args), environ, mpi, node)
    values = [*environ.values(), *(value for _, value in exports if value is not None)]

    for value in values:
        assert not any(value in argument for argument in mpirun_command.argv)
        assert value not in mpirun_command.tune_file
    expected = {
        name: environ[name]
        for name in environ
        if name in ("PATH", *env_names) or name.startswith(names.CARRIED_PREFIXES)
    }
    for name, value in exports:
        if value is not None or name in environ:
            expected[name] = environ[name] if value is None else value
    value_of = carried(mpirun_command)
    for name, value in expected.items():
        if name in names.CHANGED_BY_OPEN_MPI:
            assert value_of["CLOUDJOB_EXACT_" + name] == value
        elif name not in names.PER_NODE and name != "TOKEN":
            assert value_of[name] == value


@given(st.lists(st.text(":%32A5a", max_size=6) | st.sampled_from([":", "%", "%3A", "%25"])))
def test_mpirun_does_not_split_the_program_at_a_colon(program: list[str]):
    argv = rank_program(("python3", "entry"), program)

    assert argv[:3] == ("python3", "entry", "--rank")
    assert ":" not in argv
    assert wrapper.program(list(argv[3:])) == program


def test_a_program_without_a_colon_is_not_encoded():
    assert rank_program(("e",), ("a", "100%", "b:c")) == (
        "e",
        "--rank",
        "--",
        "a",
        "100%",
        "b:c",
    )
    assert rank_program(("e",), ("a", "100%", ":")) == (
        "e", "--rank", "--percent", "--", "a", "100%25", "%3A",
    )  # fmt: skip


def test_the_host_file_has_one_line_per_node():
    assert mpirun.host_file(("a", "b.c"), 8) == "a slots=8\nb.c slots=8\n"


# -- how mpirun reaches the workers ---------------------------------------------------------------


def reached(
    open_mpi: OpenMpi = DEFAULTS, mpi: Mpi = MPI_4, folder: str = "/n", **more: str
) -> dict[str, str]:
    """Return the MCA parameters of a job that has a key."""
    node = NODE._replace(open_mpi=open_mpi, ssh_key="/key", control_dir=more.pop("control", ""))
    environ = {"OPENMPI_MCA_ARGS": open_mpi.mca_args or "", **more}
    paths = NodePaths("/h", "/j", "/m", "/l", folder)
    site = Site(node, environ, paths, "python", ("/e.pyz",))
    return mca(as_command(mpirun.command(node, {}, mpi, FILES, PROGRAM, remote_shell(site))))


def test_mpirun_starts_its_daemons_over_the_control_connection():
    assert reached()["plm_rsh_agent"] == "/bin/sh /n/agent"
    assert "plm_rsh_args" not in reached()
    assert reached(mpi=MPI_5)["plm_ssh_agent"] == "/bin/sh /n/agent"


@pytest.mark.parametrize(
    "parameter",
    ["plm_rsh_args -q", "plm_ssh_args -q", "plm_rsh_agent ssh", "orte_rsh_agent ssh"],
)
def test_a_job_that_configures_ssh_gets_ssh(parameter: str):
    parameters = reached(OpenMpi(mca_args=f"-mca {parameter}"))

    assert parameters["plm_rsh_args"].startswith("-F/n/ssh-config")
    assert "/bin/sh /n/agent" not in parameters.values()


def test_an_open_mpi_variable_for_the_remote_shell_selects_ssh():
    assert "plm_rsh_agent" not in reached(OMPI_MCA_plm_rsh_args="-q")
    assert "plm_rsh_agent" in reached(OMPI_MCA_btl="self,tcp")


def test_tree_spawn_uses_ssh():
    """The agent exists only on the head, so a daemon on a worker cannot use it."""
    parameters = reached(OpenMpi(mca_args="-mca plm_rsh_no_tree_spawn 0"))

    assert parameters["plm_rsh_args"] == "-F/n/ssh-config"
    assert "plm_rsh_agent" not in parameters


def test_an_agent_whose_path_mpirun_would_split_is_not_used():
    assert "plm_rsh_agent" not in reached(folder="/a b")


def test_ranks_of_the_only_node_of_a_machine_do_not_listen():
    """Open MPI binds to every address, whatever interfaces it is told to use."""
    one = NODE._replace(hosts=("a",), control_dir="/run")

    assert mca(command(node=one))["btl"] == "^openib,tcp"
    assert mca(command(node=one, open_mpi=OpenMpi(mca_args="-mca btl self,tcp")))["btl"] == (
        "self,tcp"
    )
    assert mca(command(node=NODE._replace(control_dir="/run")))["btl"] == "^openib"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"CLOUDJOB_CONTROL_DIR": "/run", "HWLOC_XMLFILE": "/topology"},
        {"CLOUDJOB_CONTROL_DIR": "/run", "OPENMPI_BIND_ARGS": "-map-by dist:mlx4_0"},
        {"CLOUDJOB_CONTROL_DIR": "/run", "PRTE_MCA_rmaps_default_mapping_policy": "dist:mlx4_0"},
    ],
)
def test_only_mpirun_of_emulated_nodes_looks_for_no_devices(environ: dict[str, str]):
    """Whoever describes the machine, or maps ranks by devices, gets all that hwloc finds."""
    emulated = {"CLOUDJOB_CONTROL_DIR": "/run"}
    assert names.WITHOUT_DEVICES.items() <= command(environ=emulated).env.items()
    assert not names.WITHOUT_DEVICES.items() & command(environ=environ).env.items()
    exported = command(OpenMpi(x_args="-x HWLOC_COMPONENTS=x86"), emulated)
    assert exported.env["HWLOC_COMPONENTS"] == "x86"


def test_nodes_of_one_machine_have_no_ssh():
    parameters = reached(OpenMpi(mca_args="-mca plm_rsh_args -q"), control="/run")

    assert parameters["plm_rsh_agent"] == "/bin/sh /n/agent"
    assert "plm_rsh_args" not in parameters


def test_mpirun_of_one_node_needs_no_ssh_on_its_machine():
    """Open MPI 4.1 looks for its remote shell even then, and ends if there is none."""
    one = NODE._replace(hosts=("a",))

    assert parsed(command(node=one))[1]["plm_rsh_agent"] == "/bin/sh"
    assert "plm_rsh_agent" not in parsed(command())[1]
    chosen = OpenMpi(mca_args="-mca plm_rsh_agent rsh")
    assert parsed(command(chosen, node=one))[1]["plm_rsh_agent"] == "rsh"
