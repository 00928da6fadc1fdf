"""Parsers of commands, and options shared by several commands."""

from __future__ import annotations

import argparse
import os

from cloudjob.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any, NoReturn

    from cloudjob.model.keys import Key, Option


def state_home() -> Path:
    """Return the folder of cloudjob's state."""
    from cloudjob.home import home

    return home()


_LAST_PORT = 65535


# As ``python -m`` runs a module, which has no file of its own on the command line.
_MODULE = (
    "for a module, give its file: package/module.py; if that has relative imports, a script with"
    ": import runpy; runpy.run_module('package.module', run_name='__main__', alter_sys=True)"
)


def _columns() -> int:
    """Return the columns of the terminal as ``shutil`` does, which takes 2 ms to import."""
    try:
        columns = int(os.environ.get("COLUMNS", 0))
    except ValueError:
        columns = 0
    if columns > 0:
        return columns
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


class _HelpPage(argparse.HelpFormatter):
    """Help pages: ``-n, --nodes N`` in one column, and examples as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=_columns() - 2)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            # argparse does not count the indentation of the longest command.
            self._action_max_length += self._indent_increment

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text or len(indent + text) <= width:
            return text if "\n" in text else indent + text
        return super()._fill_text(text, width, indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        # argparse imports textwrap even for a short text.
        return [text] if len(text) <= width else super()._split_lines(text, width)

    def _expand_help(self, action: argparse.Action) -> str:
        return sentence(super()._expand_help(action))


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UsageError`` instead of printing and exiting."""

    command = ""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", _HelpPage)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise an error with a hint instead of printing the usage."""
        # The format of argparse: argument COMMAND: invalid choice: 'sumbit' (choose from …).
        kind, invalid, rest = message.partition(": invalid choice: ")
        unknown = message.partition("unrecognized arguments: ")[2].split()
        hint = f"`{self.prog} --help` lists them"
        if invalid and kind in ("argument COMMAND", "argument ACTION"):
            name = rest.partition(" (choose from ")[0].strip("'\"")
            message = f"{self.prog} has no {kind.split()[1].lower()} {name!r}"
            hint = self._suggestion(name, self._names(), "`{}`") or self._script(name) or hint
        elif unknown:
            option = unknown[0].partition("=")[0]
            is_known = self.command in self._names()
            page = f"{self.prog} {self.command}" if is_known else self.prog
            message = f"{page} has no option {' '.join(unknown)}"
            hint = (
                (_MODULE if option == "-m" else "")
                or self._suggestion(option, self._all_options(), "{}")
                or f"`{page} --help` lists them"
            )
        else:
            hint = f"{self.prog} --help"
        raise UsageError(f"reading the command line: {message}", hint=hint)

    def _suggestion(self, word: str, choices: list[str], template: str) -> str:
        import difflib

        close = difflib.get_close_matches(word, choices, n=1)
        name = f"{self.prog} {close[0]}" if close and template == "`{}`" else "".join(close)
        return f"did you mean {template.format(name)}?" if close else ""

    def _script(self, name: str) -> str:
        """Return a hint for a script that was given without the command submit."""
        from pathlib import Path

        is_script = self.prog == "cloudjob" and Path(name).is_file()
        return f"did you mean `cloudjob submit {name}`?" if is_script else ""

    def _names(self) -> list[str]:
        """Return the names of the commands, or of the actions of a command."""
        groups = (a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        return [name for action in groups for name in action.choices]

    def _all_options(self) -> list[str]:
        """Return the options of this parser and of the command and actions below it."""
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(self.command)
                for parser in [chosen] if chosen else action.choices.values():
                    options += parser._all_options()
        return options


def sentence(text: str) -> str:
    """Return a text of a help page as a sentence."""
    end = "" if text.endswith((".", "]")) else "."
    return f"{text[:1].upper()}{text[1:]}{end}"


def actions_of(parser: argparse.ArgumentParser) -> Any:
    """Return the subparsers to add a command's actions to; users must give one action."""
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True)


def add_action(
    actions: Any, name: str, run: Callable[..., int], text: str, **more: Any
) -> argparse.ArgumentParser:
    """Add an action to a command and return its parser; ``run`` implements the action."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=sentence(text), **more
    )
    parser.set_defaults(run=run)
    return parser


def job_argument(parser: argparse.ArgumentParser, **more: Any) -> None:
    """Add the argument that names a job."""
    parser.add_argument("job", metavar="JOB", help="its id, its name or its handle", **more)


def filter_flags(parser: Any) -> None:
    """Add the options that select jobs."""
    for flag, metavar, text in (
        ("--backend", "NAME", "only jobs of this backend"),
        ("--name", "PATTERN", "only jobs whose name or id matches, such as train-*"),
        ("--state", "STATE", "only jobs in this state, such as RUNNING"),
    ):
        parser.add_argument(flag, action="append", metavar=metavar, default=[], help=text)
    parser.add_argument(
        "--since",
        metavar="TIME",
        default="",
        help="only jobs submitted since then: 2h, 3d, or a date",
    )


def filters_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given filters as keyword arguments of ``cloudjob.jobs``."""
    return {key: getattr(options, key) for key in ("backend", "name", "state", "since")}


def spec_flags(parser: argparse.ArgumentParser, *, has_defaults: bool = True) -> None:
    """Add the option of every key that has one, in groups; the help page shows defaults."""
    from cloudjob.model.job import OPTIONS, JobSpec
    from cloudjob.model.keys import Heading

    for title in Heading:
        group = parser.add_argument_group(title.value)
        for name in (name for name, option in OPTIONS.items() if option.group is title):
            _add_key(group, name, JobSpec.KEYS[name], has_defaults=has_defaults)
        if title is Heading.VARIABLES:
            group.add_argument(
                "--env-file",
                action="append",
                metavar="FILE",
                help="Read variables from FILE; -e takes precedence. [repeatable]",
            )
    group.add_argument(
        "--config", metavar="FILE.yaml", help="The job file; options take precedence over it."
    )
    text = "Set a key of a section of the job file, such as kubernetes.namespace=lab. [repeatable]"
    group.add_argument("--set", action="append", metavar="SECTION.KEY=VALUE", help=text)
    group = parser.add_argument_group("notifications")
    text = "Notify a webhook when the job ends or hangs; the variable NAME or @FILE has its URL."
    group.add_argument("--notify", metavar="NAME", help=text)
    text = "Run a command on this machine when the job ends or hangs, without a shell."
    group.add_argument("--notify-command", metavar="COMMAND", help=text)


def _add_key(group: Any, name: str, key: Key, *, has_defaults: bool) -> None:
    option = key.option
    assert option is not None
    flags = [option.short, option.flag] if option.short else [option.flag]
    if option.const:
        kind: dict[str, Any] = {"action": "store_const", "const": option.const}
    else:
        action = "append" if key.kind.is_map else "store"
        kind = {"action": action, "metavar": option.metavar}
    text = _help_of(key, option, has_defaults=has_defaults).replace("%", "%%")
    group.add_argument(*flags, dest=name, help=text, **kind)


def _help_of(key: Key, option: Option, *, has_defaults: bool) -> str:
    """Return the help text of an option: its effect, its allowed values and its default."""
    text = key.description
    if option.const:
        # "follow: Follow links; keep: refuse them." describes both values of the key.
        text = text.partition(f"{option.const}: ")[2].partition(";")[0].rstrip(".")
        return f"{text[:1].upper()}{text[1:]}."
    choices = ", ".join(key.kind.choices)
    facts = [f"one of {choices}"] if choices else []
    if key.kind.is_map:
        facts.append("repeatable")
    elif has_defaults and key.default != "":
        value = key.kind.shown(key.default)
        facts.append(f"default {value:g}" if isinstance(value, float) else f"default {value}")
    return f"{text} [{'; '.join(facts)}]" if facts else text


def json_flag(parser: Any) -> None:
    """Add the option --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON value")


def whole_number(text: str) -> int:
    """Read an option's value as a whole number of at least 0."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def number_list(text: str) -> str:
    """Check an option's value that lists numbers, such as ``0,3-5``."""
    from jobentry.contract.env import is_list

    # argparse also checks the default, which is empty and means all.
    if text and not is_list(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0 or 0,3-5")
    return text


def port_number(text: str) -> int:
    """Read an option's value as a TCP port, 0 for any free port."""
    number = whole_number(text)
    if number > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to {_LAST_PORT}")
    return number


def given_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values that were given on the command line, by field."""
    from cloudjob.config.env_file import read_env_file
    from cloudjob.model.job import OPTIONS

    flags: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value = getattr(options, name, None)
        if value is not None:
            flags[name] = _pairs(name, option, value) if isinstance(value, list) else value
    if notify := _notify(options):
        flags["notify"] = notify
    for section, key, value in map(_of_section, options.set or ()):
        flags.setdefault(section, {})[key] = value
    if options.env_file:
        variables: dict[str, str] = {}
        for path in options.env_file:
            variables.update(read_env_file(path, os.environ))
        from_options = flags.get("env", {})
        assert isinstance(from_options, dict)
        flags["env"] = {**variables, **from_options}
    if options.script is not None:
        flags["script"] = options.script
        flags["args"] = tuple(options.rest)
    return flags


def _of_section(text: str) -> tuple[str, str, str]:
    """Return the section, the key and the value that --set names."""
    from cloudjob.model.job import SECTIONS, JobSpec

    example = "for example --set kubernetes.namespace=lab"
    where, equals, value = text.partition("=")
    section, dot, key = where.partition(".")
    if not (equals and dot):
        raise UsageError(f"reading --set {text}: not SECTION.KEY=VALUE", hint=example)
    if section in JobSpec.KEYS and section not in SECTIONS:
        raise UsageError(f"reading --set {where}: {section} is not a section", hint=example)
    return section, key, value


def _notify(options: argparse.Namespace) -> dict[str, Any]:
    import shlex

    values: dict[str, Any] = {}
    if options.notify:
        values["webhook"] = options.notify
    if options.notify_command:
        try:
            values["command"] = tuple(shlex.split(options.notify_command))
        except ValueError as error:
            raise UsageError(f"reading --notify-command: {error}") from error
    return values


def _pairs(key: str, option: Option, texts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and key == "env":
            if name not in os.environ:
                raise UsageError(
                    f"reading {option.flag} {text}: {name} is not set in your environment",
                    hint=f"{option.flag} {name}=VALUE",
                )
            value = os.environ[name]
        elif not equals and key in ("inputs", "sweep"):
            raise UsageError(f"reading {option.flag} {text}: no '='", hint=f"give {option.metavar}")
        elif key == "sweep" and name in pairs:
            raise UsageError(
                f"reading {option.flag} {text}: {name} was given before",
                hint=f"{option.flag} {name}={pairs[name]},{value}",
            )
        pairs[name] = value
    return pairs
