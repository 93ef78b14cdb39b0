"""The `catalog` of the settings file: what it may say of where Iceberg tables are listed."""

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
"""Which types each is for."""


class CatalogSettings(BaseModel):
    """Where Iceberg tables are listed; they lie below `tables.path` whichever it is."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
    type: Literal["hadoop", "rest", "jdbc"] = "hadoop"
    secret_uri: SecretStr | None = Field(default=None, alias="uri")
    warehouse: str | None = None
    user: str | None = None
    secret_password: SecretStr | None = Field(default=None, alias="password")
    secret_token: SecretStr | None = Field(default=None, alias="token")
    properties: dict[str, SecretStr] = {}

    @model_validator(mode="after")
    def _says_what_its_type_needs(self) -> CatalogSettings:
        refuse(self._not_of_its_type())
        return self

    def _not_of_its_type(self) -> Iterator[PydanticCustomError]:
        uri, begins = self.secret_uri.get_secret_value() if self.secret_uri else None, _URIS[self.type]
        hint = f"For example: {EXAMPLES[f'tables.catalog.{self.type}']}."
        if begins and not (uri or "").startswith(begins):
            which = "no `uri`" if uri is None else "a `uri` that it cannot have"
            yield refusal(f"has {which}: for `type: {self.type}` it begins with {' or '.join(begins)}", hint)
        for name, types in _KEYS.items():
            if getattr(self, name) is not None and self.type not in types:
                said = name.removeprefix("secret_")
                yield refusal(f"is not for `type: {self.type}`", f"Remove it. {hint}", (said,))

    def catalog(self, root: Path) -> Catalog:
        """The same, as tables know it."""
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
