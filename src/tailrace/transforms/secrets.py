"""Keys of rules: read once, in the process that uses them, and never shown.

A key's bytes appear in no `repr`, no error, no log line and nothing that is pickled.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from tailrace.errors import ConfigError
from tailrace.transforms.rules import Decrypt, Encrypt, Hmac, KeySource, Rule

KEY_BYTES = 32
FILE_BYTES_MAX = 4_096
_HINT = "Provide 32 bytes, as 64 hex digits or as base64: `openssl rand -hex 32` makes a key."


class Cipher(Protocol):
    """Authenticated encryption under one key. Every failure is raised."""

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...


class Keyring:
    """The keys of some rules, by id."""

    def __init__(self, sources: Mapping[str, KeySource], environment: Mapping[str, str] | None = None) -> None:
        self._sources = dict(sources)
        self._environment = os.environ if environment is None else environment
        self._keys: dict[str, bytes] = {}
        self._ciphers: dict[str, Cipher] = {}

    def __repr__(self) -> str:
        return f"Keyring({', '.join(sorted(self._sources))})"

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def require(self, rules: Iterable[Rule]) -> None:
        """Refuse rules whose keys are not available.

        Which key decrypts a value is known only from the value, so decryption needs all of them.
        """
        for rule in rules:
            if isinstance(rule, Hmac):
                self.key(rule.key)
            elif isinstance(rule, Encrypt | Decrypt):
                for name in (rule.key,) if isinstance(rule, Encrypt) else self.ids:
                    self.cipher(name)

    def key(self, name: str) -> bytes:
        """Return the key's bytes. Pass them to a cipher and to nothing else."""
        if name not in self._keys:
            self._keys[name] = _decode_key(name, self._read(name))
        return self._keys[name]

    def cipher(self, name: str) -> Cipher:
        """Return AES-256-GCM under the key."""
        if name not in self._ciphers:
            try:
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ImportError:
                raise ConfigError(
                    "package `cryptography` is missing: rules that encrypt or decrypt need it",
                    hint='Install it: `pip install "tailrace[encryption]"`.',
                ) from None
            self._ciphers[name] = AESGCM(self.key(name))
        return self._ciphers[name]

    def _read(self, name: str) -> str:
        source = self._sources[name]
        if source.env is not None:
            if source.env not in self._environment:
                raise ConfigError("key's environment variable is not set", key=name, variable=source.env, hint=_HINT)
            return self._environment[source.env]
        assert source.file is not None, "one of the two"
        path = Path(os.path.expanduser(source.file))
        try:
            with path.open("rb") as stream:
                return stream.read(FILE_BYTES_MAX).decode("ascii")
        except (OSError, UnicodeDecodeError):
            raise ConfigError("key's file cannot be read", key=name, file=path, hint=_HINT) from None


def _decode_key(name: str, text: str) -> bytes:
    text = text.strip()
    for decode in (bytes.fromhex, _from_base64):
        try:
            key = decode(text)
        except (ValueError, binascii.Error):
            continue
        if len(key) == KEY_BYTES:
            return key
    raise ConfigError("key is not 32 bytes", key=name, hint=_HINT) from None


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)
