"""Print log lines and error texts on stderr: one line each, and no secrets.

A line is `time level fragment key=value …`. Text that passes `redact` has lost every URL password, and every secret
that was given to `hide_passwords_of`. Writing a line never raises: a closed stderr must not stop a pipeline.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from urllib.parse import unquote, urlsplit

LEVELS = ("debug", "info", "warning", "error")
SECRET_LENGTH_MIN = 6
"""Length of the shortest secret to hide everywhere.

A shorter word, replaced wherever it occurs, would blot out half of every line.
"""

_URL_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s:/@]*:)[^\s@]+@")
_PASSWORD_SETTING = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&'\"]+)", re.IGNORECASE)
_ORDINARY = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"])

_PUBLIC = ("tailrace", "postgres", "postgresql", "password", "localhost")

_secrets: set[str] = set()


def hide_passwords_of(url: str) -> None:
    """Hide this URL and its password in everything that is printed from now on.

    A password that is also the user's or the database's name is hidden inside URLs only. It keeps nothing secret, and
    replacing it everywhere would make messages unreadable.
    """
    parts = urlsplit(url)
    password = parts.password or ""
    public = {parts.username, parts.path.strip("/"), *_PUBLIC}
    _secrets.add(url)
    _secrets.update(
        secret for secret in (password, unquote(password)) if len(secret) >= SECRET_LENGTH_MIN and secret not in public
    )


def redact(text: str) -> str:
    """Return the text without passwords."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
    return _PASSWORD_SETTING.sub(r"\1***", _URL_PASSWORD.sub(r"\1***@", text))


def one_line(text: str) -> str:
    """Return the text as a single line without control characters.

    Spaces stay, because they may be part of a name.
    """
    flat = re.sub(r"\s*[\r\n]+\s*", " ", text.strip())
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in flat)


class LineFormatter(logging.Formatter):
    """Formats `2026-01-31T12:00:00Z info window applied changes=5`.

    A traceback follows only at level debug.
    """

    def __init__(self, *, tracebacks: bool) -> None:
        super().__init__()
        self.tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        words = [when, record.levelname.lower(), one_line(record.getMessage())]
        words += [f"{name}={_value(value)}" for name, value in vars(record).items() if name not in _ORDINARY]
        text = " ".join(words)
        if record.exc_info and record.exc_info[0]:
            text += f" exception={record.exc_info[0].__name__}"
            text += "\n" + self.formatException(record.exc_info) if self.tracebacks else ""
        return redact(text)


def _value(value: object) -> str:
    text = one_line(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or re.search(r'[\s"=]', text) else text


class StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, so that a live view can put lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # Closed or broken: nothing can be reported.


def set_up(level: str) -> None:
    """Log to stderr from this level on.

    Other libraries log from `warning` on, because their debug lines show values.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, StderrHandler)]:
        root.removeHandler(handler)
    handler = StderrHandler()
    handler.setFormatter(LineFormatter(tracebacks=level == "debug"))
    root.addHandler(handler)
    logging.getLogger("tailrace").setLevel(level.upper())
