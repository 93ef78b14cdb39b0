"""Keys, by the place they lie in: read once, in the process that uses them, and never shown.

A key's bytes are in no `repr`, no error, no log line and nothing that is pickled.
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
_HINT = "It must be 32 bytes, as 64 hex digits or as base64: `openssl rand -hex 32` makes one."


class Cipher(Protocol):
    """Authenticated encryption under one key; whatever goes wrong is raised."""

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...


class Keyring:
    """The keys of some rules, by their ids."""

    def __init__(self, places: Mapping[str, KeySource], environment: Mapping[str, str] | None = None) -> None:
        self._places = dict(places)
        self._environment = os.environ if environment is None else environment
        self._keys: dict[str, bytes] = {}
        self._ciphers: dict[str, Cipher] = {}

    def __repr__(self) -> str:
        return f"Keyring({', '.join(sorted(self._places))})"

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._places)

    def require(self, rules: Iterable[Rule]) -> None:
        """Refuse if a key that these rules need cannot be had. Which one decrypts, only the values tell."""
        for rule in rules:
            if isinstance(rule, Hmac):
                self.key(rule.key)
            elif isinstance(rule, Encrypt | Decrypt):
                for name in (rule.key,) if isinstance(rule, Encrypt) else self.ids:
                    self.cipher(name)

    def key(self, name: str) -> bytes:
        """The key's bytes: hand them to a cipher and to nothing else."""
        if name not in self._keys:
            self._keys[name] = _decoded(name, self._read(name))
        return self._keys[name]

    def cipher(self, name: str) -> Cipher:
        """AES-256-GCM under the key."""
        if name not in self._ciphers:
            try:
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ImportError:
                raise ConfigError(
                    "rules that encrypt or decrypt need the package `cryptography`",
                    hint='Install it: `pip install "tailrace[encryption]"`.',
                ) from None
            self._ciphers[name] = AESGCM(self.key(name))
        return self._ciphers[name]

    def _read(self, name: str) -> str:
        place = self._places[name]
        if place.env is not None:
            if place.env not in self._environment:
                raise ConfigError("a key's environment variable is not set", key=name, variable=place.env, hint=_HINT)
            return self._environment[place.env]
        assert place.file is not None, "one of the two"
        path = Path(os.path.expanduser(place.file))
        try:
            with path.open("rb") as stream:
                return stream.read(FILE_BYTES_MAX).decode("ascii")
        except (OSError, UnicodeDecodeError):
            raise ConfigError("a key's file cannot be read", key=name, file=path, hint=_HINT) from None


def _decoded(name: str, text: str) -> bytes:
    text = text.strip()
    for decode in (bytes.fromhex, _from_base64):
        try:
            found = decode(text)
        except (ValueError, binascii.Error):
            continue
        if len(found) == KEY_BYTES:
            return found
    raise ConfigError("a key is not 32 bytes", key=name, hint=_HINT) from None


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)
