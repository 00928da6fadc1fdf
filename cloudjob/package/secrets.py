"""Finds secrets before anything is sent: in the contents of files, and files named like secrets.

The rules are those of detect-secrets that match a known format of keys (not the ones that guess
from words or randomness), and our own for formats it lacks. Python's ``re`` would take most of a
minute to search a hundred megabytes for all of them. Hyperscan takes a twentieth of a second, but
reports only that there may be a secret; the rules themselves then decide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob.home import private_folder
from cloudjob.package.ignore import IgnoreRules
from cloudjob.package.tree import SourceEntry

# A longer file is data or a model rather than text that someone typed a key into.
LIMIT_BYTES = 1024 * 1024
# Increase this when the rules change, so that all files are searched again.
_VERSION = 1
_BINARY_SAMPLE_BYTES = 8000


class Finding(NamedTuple):
    """A secret in a file; its value is never kept."""

    path: str
    line: int
    rule: str


# Whether the user permits a finding.
Allows = Callable[[Finding], bool]


class SecretRule(NamedTuple):
    """One kind of secret.

    Args:
        pattern: The pattern of such secrets.
        detector: The library's own, whose check decides, too; None if the pattern decides.
    """

    name: str
    pattern: re.Pattern[bytes]
    detector: Any = None


# ---- our own rules -----------------------------------------------------------------------------

_ASSIGNED = rb"""["']?\s*(?:=>|:=|[:=])\s*["']?"""
# Code that handles keys also contains the header; a real key has its body on the next line.
_OWN_PATTERNS = {
    "private-key": rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
    rb"(?:\r?\n(?:[ \t]*[\w-]+: [^\n]*\n)*\s*[A-Za-z0-9+/=]{4,}\s*$"
    rb"|(?:\\[rn]|[\s\"'])*[A-Za-z0-9+/]{40})",
    "kubernetes-client-key": rb"^[ \t]*client-key-data:[ \t]*[\"']?[A-Za-z0-9+/=]{20}",
    "kubernetes-token": rb"^[ \t]*token:[ \t]*[\"']?eyJ[\w-]{20}",
    "secret-access-key": rb"(?i)(?:secret[_-]?(?:access[_-]?)?key|(?<![a-z0-9])sk)"
    + _ASSIGNED
    + rb"(?=[^\n]{0,39}[0-9])(?=[^\n]{0,39}[a-z])[a-z0-9+/]{40}(?![a-z0-9+/=])",
    "access-key": rb"(?:[Aa][Cc][Cc][Ee][Ss][Ss][_-]?[Kk][Ee][Yy](?:[_-]?[Ii][Dd])?"
    rb"|(?<![A-Za-z0-9])[Aa][Kk])"
    + _ASSIGNED
    + rb"(?=[A-Z]{0,19}[0-9])(?=[0-9]{0,19}[A-Z])[A-Z0-9]{20}(?![A-Za-z0-9+/=_(.])",
    "azure-storage-key": rb"AccountKey=[A-Za-z0-9+/]{86}==",
    "github-token": rb"\bgithub_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}\b",
    "gitlab-token": rb"\bgl(?:pat|dt|rt|ptt|cbt)-[A-Za-z0-9_-]{20,}",
    "hugging-face-token": rb"\bhf_[A-Za-z]{34}\b",
    "openai-key": rb"\bsk-(?:proj-|svcacct-)?[A-Za-z0-9_-]{20,}T3BlbkFJ[\w-]{20,}",
    "anthropic-key": rb"\bsk-ant-(?:api|admin)\d\d-[A-Za-z0-9_-]{80,}",
    "google-api-key": rb"\bAIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])",
    "pypi-token": rb"\bpypi-AgE[A-Za-z0-9_-]{60,}",
    "wandb-key": rb"(?i:wandb_api_key)" + _ASSIGNED + rb"[0-9a-f]{40}\b",
}

# ---- the rules of detect-secrets -----------------------------------------------------------------

# Rules of the library, by module. Left out, because hashes and identifiers in ordinary files look
# the same: basic auth, keywords, entropy, and those of IBM and Azure.
_LIBRARY_RULES = {
    "artifactory": "artifactory-key",
    "aws": "aws-access-key",
    "discord": "discord-token",
    "github_token": "github-token",
    "jwt": "json-web-token",
    "mailchimp": "mailchimp-key",
    "npm": "npm-token",
    "sendgrid": "sendgrid-key",
    "slack": "slack-token",
    "square_oauth": "square-secret",
    "stripe": "stripe-key",
    "twilio": "twilio-key",
}


def rules() -> tuple[SecretRule, ...]:
    """Return every rule; this imports the library."""
    import importlib

    from detect_secrets.plugins.base import RegexBasedDetector

    rules_read = [
        SecretRule(name, re.compile(text, re.MULTILINE)) for name, text in _OWN_PATTERNS.items()
    ]
    for module, name in _LIBRARY_RULES.items():
        plugins = importlib.import_module(f"detect_secrets.plugins.{module}")
        for kind in vars(plugins).values():
            is_plugin = isinstance(kind, type) and issubclass(kind, RegexBasedDetector)
            if is_plugin and kind.__module__ == plugins.__name__:
                detector = kind()
                for pattern in map(re.compile, detector.denylist):
                    flags = pattern.flags & ~re.UNICODE
                    rules_read.append(
                        SecretRule(name, re.compile(pattern.pattern.encode(), flags), detector)
                    )
    return tuple(rules_read)


def version() -> str:
    """Return the version of the rules, without importing the library."""
    import importlib.util

    spec = importlib.util.find_spec("detect_secrets")
    folders = spec.submodule_search_locations if spec else None
    with suppress(OSError):
        for folder in folders or ():
            return f"{_VERSION}-{Path(folder, 'plugins').stat().st_mtime_ns:x}"
    return f"{_VERSION}"


# ---- the search ----------------------------------------------------------------------------------

# A documented example contains that word, or repeats one letter.
_EXAMPLE = rb"(?i)example|([a-z0-9*])\1{9}"
_ALLOWED_HERE = rb"cloudjob: allow-secret|pragma: allowlist secret"


class Searcher:
    """Looks for secrets in files.

    Args:
        folder: The cache for the compiled rules; without it, they are compiled each time.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._version = version()
        self._engine: Any = None
        self._rules: tuple[SecretRule, ...] | None = None

    def tag(self, entry: SourceEntry) -> str:
        """Return the version of the rules if they search this file; else empty."""
        is_searched = not entry.is_named and 0 < entry.size_bytes <= LIMIT_BYTES
        return self._version if is_searched else ""

    def search(self, entry: SourceEntry, data: bytes) -> list[Finding]:
        """Return the first secret of each line of a text file."""
        if (
            not self.tag(entry)
            or not self._is_suspect(data)
            or b"\0" in data[:_BINARY_SAMPLE_BYTES]
        ):
            return []
        if self._rules is None:
            self._rules = rules()
        findings: dict[int, Finding] = {}
        for rule in self._rules:
            for match in rule.pattern.finditer(data):
                begin = data.rfind(b"\n", 0, match.start()) + 1
                end = data.find(b"\n", match.end())
                lines = data[begin : len(data) if end < 0 else end]
                if re.search(_EXAMPLE, match[0]) or re.search(_ALLOWED_HERE, lines):
                    continue
                # The library's own check may be stricter than its pattern.
                text = lines.decode("utf-8", "replace")
                if rule.detector and not any(True for _ in rule.detector.analyze_string(text)):
                    continue
                line = data.count(b"\n", 0, match.start()) + 1
                findings.setdefault(line, Finding(entry.name, line, rule.name))
        return [findings[line] for line in sorted(findings)]

    def _is_suspect(self, data: bytes) -> bool:
        """Whether Hyperscan finds anything; without Hyperscan, every file is searched."""
        if self._engine is None:
            self._engine = _engine(self._folder, self._version)
        if self._engine is False:
            return True
        ends: list[int] = []

        def note(_rule: int, _begin: int, end: int, _flags: int, _context: object) -> None:
            ends.append(end)

        self._engine.scan(data, match_event_handler=note)
        return bool(ends)


def _engine(folder: Path | None, tag: str) -> Any:
    """Return all rules as one compiled pattern, from the cache if possible.

    False if there is no Hyperscan for this machine: every rule then searches every file, at a few
    megabytes a second.
    """
    try:
        import hyperscan
    except ImportError:
        return False
    # Hyperscan refuses rules that another version or processor compiled; they are compiled again.
    path = folder / f"secrets-{tag}.hs" if folder is not None else None
    if path is not None:
        with suppress(OSError, hyperscan.error):
            return _loaded(path.read_bytes())
    compiled = _compiled()
    if path is not None:
        with suppress(OSError):
            private_folder(path.parent)
            new = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
            new.write_bytes(compiled)
            new.replace(path)
    return _loaded(compiled)


def _loaded(compiled: bytes) -> Any:
    import hyperscan

    engine = hyperscan.loadb(compiled, mode=hyperscan.HS_MODE_BLOCK)
    # Each engine has its own scratch space, as two threads must not share one.
    engine.scratch = hyperscan.Scratch(engine)
    return engine


@cache
def _compiled() -> bytes:
    import hyperscan

    expressions, flags = [], []
    for rule in rules():
        flag = hyperscan.HS_FLAG_PREFILTER | hyperscan.HS_FLAG_MULTILINE
        if rule.pattern.flags & re.IGNORECASE:
            flag |= hyperscan.HS_FLAG_CASELESS
        # Hyperscan accepts no ``^`` among other alternatives; the empty pattern matches more.
        expressions.append(rule.pattern.pattern.replace(b"|^)", b"|)"))
        flags.append(flag)
    engine = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    engine.compile(expressions=expressions, flags=flags)
    return bytes(hyperscan.dumpb(engine))


# ---- what the user permits -----------------------------------------------------------------------


def allowed(text: bytes) -> Allows:
    """Return a function that checks whether the file of allowed findings permits a finding.

    A line is a pattern of paths as in ``.gitignore``; after ``[rule]`` it allows that rule only.
    """
    by_rule: dict[str, list[bytes]] = {}
    for line in text.splitlines():
        match = re.fullmatch(rb"\[([a-z0-9-]+)\]\s+(.+)", line)
        rule, pattern = (match[1].decode(), match[2]) if match else ("", line)
        by_rule.setdefault(rule, []).append(pattern)
    lists = {rule: IgnoreRules("", b"\n".join(lines)) for rule, lines in by_rule.items()}

    def allows(finding: Finding) -> bool:
        segments = finding.path.split("/")
        for rule in ("", finding.rule):
            for depth in range(1, len(segments) + 1) if rule in lists else ():
                path, is_folder = "/".join(segments[:depth]), depth < len(segments)
                decision = lists[rule].decide(path, is_folder)
                if decision is not None and decision.ignores:
                    return True
        return False

    return allows


# ---- names of files that usually hold secrets ---------------------------------------------------

_FOLDERS = frozenset({".aws", ".ssh", ".kube"})
_FILES = re.compile(
    r"\.env|\.env\.(?!(?:.*\.)?(?:example|sample|template)$).*|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?"
    r"|[._]netrc|\.pypirc|\.git-credentials|\.obsutilconfig|credentials\.csv"
    r"|kubeconfig(?:\.ya?ml)?|.*\.kubeconfig",
    re.DOTALL,
)
# Only names with these beginnings, and *.kubeconfig, can match the above; this check is faster.
_NAME_PREFIXES = (".env", "id_", ".netrc", "_netrc", ".pypirc", ".git-", ".obs", "cred", "kubec")
# Names that are typical of keys; certificates and other files share them.
KEY_SUFFIXES = (".pem", ".key")
_KEY_LIMIT_BYTES = 1024 * 1024
_KEY_HEADER = rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"


def name_reason(name: str, is_folder: bool) -> str:
    """Return why a path with this last segment is left out, or ""."""
    if is_folder:
        return f"may hold secrets: {name}/" if name in _FOLDERS else ""
    if name.startswith(_NAME_PREFIXES) or name.endswith(".kubeconfig"):
        return "may hold secrets: its name" if _FILES.fullmatch(name) else ""
    return ""


def key_reason(path: str, size_bytes: int) -> str:
    """Return why a file with a key's name is left out, or "".

    Raises:
        OSError: The file cannot be read.
    """
    if size_bytes > _KEY_LIMIT_BYTES:
        return ""
    return (
        "may hold secrets: a private key" if re.search(_KEY_HEADER, Path(path).read_bytes()) else ""
    )
