"""The `catalog` part of the settings file: where Iceberg tables are listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from tailrace.pipeline.config.setting_values import refusal, refuse

if TYPE_CHECKING:
    # Importing it costs an import of pyarrow, which `tailrace check` has no use for.
    from tailrace.tables.iceberg.catalogs import Catalog

EXAMPLES = {
    "tables.catalog": "`catalog: {type: hadoop}`; there are hadoop, rest and jdbc",
    "tables.catalog.hadoop": "`catalog: {type: hadoop}`",
    "tables.catalog.rest": "`catalog: {type: rest, uri: https://host/catalog, warehouse: lake}`",
    "tables.catalog.jdbc": "`catalog: {type: jdbc, uri: jdbc:postgresql://host/db, user: u, password: ${PASSWORD}}`",
}
_URIS: dict[str, tuple[str, ...]] = {
    "hadoop": (), "rest": ("http://", "https://"), "jdbc": ("jdbc:postgresql://", "jdbc:sqlite:"),
}  # fmt: skip
_KEYS = {
    "secret_uri": ("rest", "jdbc"), "warehouse": ("rest",), "secret_token": ("rest",), "user": ("jdbc",),
    "secret_password": ("jdbc",),
}  # fmt: skip
"""The catalog types that take each key."""


class CatalogSettings(BaseModel):
    """The catalog that lists Iceberg tables; their files are below `tables.path` with every type."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
    type: Literal["hadoop", "rest", "jdbc"] = "hadoop"
    secret_uri: SecretStr | None = Field(default=None, alias="uri")
    warehouse: str | None = None
    user: str | None = None
    secret_password: SecretStr | None = Field(default=None, alias="password")
    secret_token: SecretStr | None = Field(default=None, alias="token")
    properties: dict[str, SecretStr] = {}

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> CatalogSettings:
        refuse(self._wrong_for_its_type())
        return self

    def _wrong_for_its_type(self) -> Iterator[PydanticCustomError]:
        uri, prefixes = self.secret_uri.get_secret_value() if self.secret_uri else None, _URIS[self.type]
        hint = f"For example: {EXAMPLES[f'tables.catalog.{self.type}']}."
        if prefixes and not (uri or "").startswith(prefixes):
            problem = "no `uri`" if uri is None else "the wrong kind of `uri`"
            yield refusal(f"has {problem}: for `type: {self.type}` it must begin with {' or '.join(prefixes)}", hint)
        for name, types in _KEYS.items():
            if getattr(self, name) is not None and self.type not in types:
                key = name.removeprefix("secret_")
                yield refusal(f"is not for `type: {self.type}`", f"Remove it. {hint}", (key,))

    def catalog(self, root: Path) -> Catalog:
        """Return the same settings in the form that lake tables take."""
        from tailrace.tables.iceberg.catalogs import Catalog

        secrets = {"jdbc.password": self.secret_password, "token": self.secret_token, **self.properties}
        plain = {name: secret.get_secret_value() for name, secret in secrets.items() if secret is not None}
        return Catalog(
            kind=self.type,
            root=root,
            uri=(self.secret_uri.get_secret_value() if self.secret_uri else "").rstrip("/"),
            warehouse=self.warehouse or "",
            properties={**plain, **({"jdbc.user": self.user} if self.user else {})},
        )
