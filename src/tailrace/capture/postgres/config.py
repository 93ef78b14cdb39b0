"""Settings of a PostgreSQL capture. They are plain data, so they can be pickled and sent anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.capture.postgres.address import (
    PUBLICATION_FORM,
    SLOT_FORM,
    is_publication_name,
    is_slot_name,
    require_url,
)
from tailrace.errors import ConfigError
from tailrace.model.schema import TableId
from tailrace.validation import require_callable


@dataclass(frozen=True, kw_only=True)
class PostgresSettings:
    """One database, the tables to capture, and the names of slot and publication."""

    url: str = field(repr=False)
    wanted: Callable[[TableId], bool]
    """Returns whether a table is to be captured."""
    named: Callable[[TableId], bool] | None = None
    """Returns whether a table is wanted by its exact name, not only by a pattern.

    Such a table is an error if it cannot be captured.
    """
    messages: Callable[[str], bool] | None = None
    """Returns whether an application's message with this prefix is captured.

    None: no message is, and the server sends none.
    """
    origins: bool = True
    """Capture also changes that were replicated to this server, not only those made here."""
    invalid_text_replaced: bool = False
    """Replace invalid bytes of a database without an encoding by `�`. Otherwise such values are unfit."""
    standby: str | None = field(default=None, repr=False)
    """The URL of a standby that chunks are read from; None: the source itself."""
    slot: str
    slot_create: bool = True
    recreate_slot: bool = False
    """Drop and create again an existing slot whose position no stored state records.

    Only for a slot whose name excludes that another program uses it.
    """
    publication: str
    publication_create: bool = True

    def __post_init__(self) -> None:
        require_url("url", self.url)
        if self.standby is not None:
            require_url("standby", self.standby)
        require_callable("wanted", self.wanted, "Give a function of a `TableId`; for a set, `tables.__contains__`.")
        for what in ("named", "messages"):
            if getattr(self, what) is not None:
                require_callable(what, getattr(self, what), f"Give a function: `{what}=function`, or nothing.")
        if not is_slot_name(self.slot):
            raise ConfigError(f"`slot` must be {SLOT_FORM}", hint='For example: `slot="my_program"`.')
        if not is_publication_name(self.publication):
            hint = 'For example: `publication="my_program"`.'
            raise ConfigError(f"`publication` must be {PUBLICATION_FORM}", hint=hint)

    @property
    def publications(self) -> tuple[str, ...]:
        """All publications that we read."""
        return (self.publication, self.publication_inserts) if self.publication_create else (self.publication,)

    @property
    def publication_inserts(self) -> str:
        """The publication for tables whose updates and deletes the server could not describe."""
        return f"{self.publication}_inserts"[:63]
