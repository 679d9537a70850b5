"""Hides secrets in what is written about a run: tokens, keys, passwords, and URLs with credentials.

A value is hidden for its name (`--hf_token`, `WANDB_API_KEY`, `db.password`) or for its form (`hf_...`, a private key,
`https://user:password@host`). In doubt it is hidden: a reader can ask for a value, but nobody can take back a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ("HIDDEN", "is_secret", "redact", "redact_arguments", "redact_text")

HIDDEN: Final = "***"
"""What is written instead of a secret."""

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_NAME: Final = re.compile(
    r"passw|passphrase|passcode|secret|credential|apikey|accesskey|authkey|privatekey|accountkey|authtoken"
    r"|accesstoken|bearer|connectionstring|webhook|sastoken|oauth"
)
"""Parts of a name, without separators, that make every value a secret."""

_LIKELY_SECRET_WORD: Final = re.compile(
    r"tok|tokens?|keys?|auth|authorization|pwd|pw|pass|pat|jwt|otp|pin|cookies?|sas|sig|signature|dsn|cert"
)
"""Words of a name that make a value a secret, unless another word says what is meant."""

_HARMLESS_WORD: Final = re.compile(
    r"max|min|num|n|per|pad|eos|bos|unk|mask|sep|cls|special|image|text|label|sort|batch|size|dim|heads?|values?|length|len"
    r"|total|count|new|ids?|limit|budget|weight|weighting|rate|forward|backward|first|second|memory|target|input|output"
    r"|column|metric|primary|partition|query|type|parallelism|padding|mode|file|path|dir|steps?"
)
_CONFIRMING_WORD: Final = re.compile(r"api|access|private|account|encryption|license")
_FOLDER_VARIABLES: Final = ("PWD", "OLDPWD")
"""Variables of shells that name a folder."""

_CONSTANT_VALUE: Final = re.compile(r"|true|false|none|null|yes|no|on|off", re.IGNORECASE)
_NUMBER: Final = re.compile(r"-?\d+(\.\d*)?(e-?\d+)?", re.IGNORECASE)

_SECRET_FORMS: Final = tuple(
    re.compile(form, re.DOTALL)
    for form in (
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----|\Z)",
        r"\b(?:hf|api_org|gh[oprsu]|github_pat|glpat|gldt|npm|pypi|dckr_pat|dop_v1|r8|nvapi|gsk|shpat|lin_api|ntn|tskey"
        r"|sk|pk|rk|whsec|xai|pplx|figd|dapi|sq0csp|xox[a-z]|xapp|wandb_v1)[-_][A-Za-z0-9_./+-]{10,}",
        r"\bsk-[A-Za-z0-9_-]{10,}",
        r"\b(?:AKIA|ASIA|AGPA|AROA)[A-Z0-9]{12,}",
        r"\bAIza[0-9A-Za-z_-]{20,}",
        r"\bya29\.[0-9A-Za-z_-]{10,}",
        r"\bSG\.[\w-]{10,}\.[\w-]{10,}",
        r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?",
        r"https://hooks\.slack\.com/[^\s\"']+",
        # A long text without words, as random characters are; hashes in hexadecimal are names of things.
        r"(?<![A-Za-z0-9+/=_-])(?=[A-Za-z0-9+/]*[a-z])(?=[A-Za-z0-9+/]*[A-Z])(?=(?:[A-Za-z+/]*\d){3})[A-Za-z0-9+]{32,}"
        r"={0,2}(?![A-Za-z0-9_/-])",
    )
)
_URL_CREDENTIALS: Final = (
    re.compile(r"(\b[a-zA-Z][\w+.-]{0,30}://)[^\s/:@\"'<>]{0,200}:(?!\d+(?:[/\s?#]|$))[^\s\"'<>]{0,500}@"),
    re.compile(r"(\b[a-zA-Z][\w+.-]{0,30}://)[^\s/@\"'<>]{1,500}@"),
)
_AUTHORIZATION_HEADER: Final = re.compile(
    r"(?i)((?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?)[^\"'\n]+|(\bbearer\s+)[^\s\"']+"
)
_LOGIN_OPTION: Final = re.compile(r"((?<!\S)(?:-u|--user|--proxy-user)[ =]+)[^\s:]+:\S+")
_NAMED_VALUE: Final = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]{1,100})(?:"
    r"[\"']?\]?[ \t]*(?::=|=>|%3[Dd]|:[ \t]*[A-Za-z_.]+[ \t]*=(?!=)|=(?!=)|:(?!:))[ \t]*"
    # A call, a further argument such as a default, and an option or a line of a file for logins.
    r"|\([ \t]*(?=[\"'])|[\"'],[ \t]*(?=[\"'])|(?<=\w)[ \t]+(?=[^\s=:-]))"
)
_VALUE: Final = re.compile(
    r"[bfru]{0,2}(?:\"{3}.*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z)|\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?)|[^\n]*",
    re.DOTALL,
)
_FIRST_WORD: Final = re.compile(r"[^\s&\"']+")
_NAME_BEFORE_VALUE: Final = re.compile(r"-.*|passw\w*|passphrase|tok(en)?", re.IGNORECASE)
"""Names whose value may follow without a sign between them: options, and words of files for logins."""


def is_secret(name: str, value: object = None) -> bool:
    """Whether a value of this name is a secret.

    Args:
        name: name of a variable, option, setting or key, in any spelling.
        value: the value, which tells `max_tokens=128` from a token; None if it is not known.

    Example:
        >>> is_secret("HF_TOKEN"), is_secret("--apiKey"), is_secret("max_tokens", 128), is_secret("sort_key")
        (True, True, False, False)
    """
    if name in _FOLDER_VARIABLES or (value is not None and _CONSTANT_VALUE.fullmatch(str(value))):
        return False
    if _SECRET_NAME.search(_joined(name)):
        return True
    words = [word.lower() for word in _WORD.findall(name)]
    telling = {word for word in words if _LIKELY_SECRET_WORD.fullmatch(word)}
    if not telling or any(_CONFIRMING_WORD.fullmatch(word) for word in words):
        return bool(telling)
    if any(_HARMLESS_WORD.fullmatch(word) for word in words):
        return False
    return not (telling <= {"tokens", "keys"} and _NUMBER.fullmatch(str(value)))


def redact(value: Any, name: str = "") -> Any:
    """A value as plain data without secrets; dicts and lists are searched.

    Args:
        value: the value: what JSON can represent.
        name: name of the value; the keys of a dict are the names of its values.

    Example:
        >>> redact({"lr": 0.1, "hub": {"api_key": "abc", "url": "https://me:abc@host/x"}})
        {'lr': 0.1, 'hub': {'api_key': '***', 'url': 'https://***@host/x'}}
    """
    if isinstance(value, Mapping):
        secret = bool(name) and bool(_SECRET_NAME.search(_joined(name)))
        return {redact_text(str(key)): HIDDEN if secret else redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(inner, name) for inner in value]
    if name and value is not None and is_secret(name, value):
        return HIDDEN
    return redact_text(value) if isinstance(value, str) else value


def redact_arguments(words: Sequence[str]) -> list[str]:
    """The words of a command line without secrets.

    Example:
        >>> redact_arguments(["train.py", "--hf_token", "abc", "--lr=0.1", "db.password=p,w d"])
        ['train.py', '--hf_token', '***', '--lr=0.1', 'db.password=***']
    """
    shown, option = [], ""
    for word in words:
        name, equals, value = word.partition("=")
        login = option in ("-u", "--user", "--proxy-user") and ":" in word
        if login or (option and not word.startswith("--") and is_secret(option, word)):
            shown.append(HIDDEN)
        elif equals and name and not re.search(r"[\s\"'{?&]", name) and is_secret(name, value):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redact_text(word))
        option = word if word.startswith("-") and not equals else ""
    return shown


def redact_text(text: str) -> str:
    """A text, such as a difference of files, without values that look like secrets.

    Example:
        >>> redact_text("password: my cat\\nlr: 0.1")
        'password: ***\\nlr: 0.1'
    """
    for form in _SECRET_FORMS:
        text = form.sub(HIDDEN, text)
    for pattern in _URL_CREDENTIALS:
        text = pattern.sub(rf"\g<1>{HIDDEN}@", text)
    text = _AUTHORIZATION_HEADER.sub(lambda match: f"{match[1] or match[2]}{HIDDEN}", text)
    text = _LOGIN_OPTION.sub(rf"\g<1>{HIDDEN}", text)
    return "".join(_without_values(text))


def _without_values(text: str) -> Iterator[str]:
    """The parts of a text, without the values of names that are those of secrets."""
    kept = 0
    for match in _NAMED_VALUE.finditer(text):
        name, begin = match["name"], match.end()
        beside = text[match.end("name") : begin].isspace()
        if match.start() < kept or not is_secret(name) or (beside and not _NAME_BEFORE_VALUE.fullmatch(name)):
            continue
        value = _VALUE.match(text, begin)
        assert value is not None
        end = value.end()
        # Without quotes a password may have spaces; other values end at the first.
        if value[0].lstrip("bfru")[:1] not in ("'", '"') and (beside or not _SECRET_NAME.search(_joined(name))):
            first = _FIRST_WORD.match(text, begin, end)
            end = begin if first is None else first.end()
        if end > begin and is_secret(name, text[begin:end].strip("\"',;)}]")):
            yield text[kept:begin] + HIDDEN
            kept = end
    yield text[kept:]


def _joined(name: str) -> str:
    """The letters of a name alone."""
    return "".join(_WORD.findall(name)).lower()
