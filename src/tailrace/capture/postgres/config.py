"""What a PostgreSQL capture needs to know; plain data, so that it can be pickled and sent anywhere."""

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
    """One database, the tables wanted of it, and the names of what we make there."""

    url: str = field(repr=False)
    wanted: Callable[[TableId], bool]
    """Whether a table is to be captured."""
    named: Callable[[TableId], bool] | None = None
    """Whether a table is wanted by its very name, not only by a pattern: then one that cannot be captured is an
    error."""
    messages: Callable[[str], bool] | None = None
    """Whether an application's message with this prefix is captured; None: none is, and the server is not asked."""
    origins: bool = True
    """Whether what was itself replicated to this server is captured too, or only what was written here."""
    invalid_text_replaced: bool = False
    """What becomes of bytes that are no text, which a database without an encoding may hold: characters that stand for
    them, or values that do not fit their column."""
    standby: str | None = field(default=None, repr=False)
    """The URL of a standby that chunks are read from; None: the source itself."""
    slot: str
    slot_create: bool = True
    slot_anew: bool = False
    """Whether a slot that is there, although nothing says how far it was read, is dropped and made again: only where
    its name says that it is nobody else's."""
    publication: str
    publication_create: bool = True

    def __post_init__(self) -> None:
        require_url("url", self.url)
        if self.standby is not None:
            require_url("standby", self.standby)
        require_callable("wanted", self.wanted, "Give a function of a `TableId`; of a set, `tables.__contains__`.")
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
        """All that we read."""
        return (self.publication, self.publication_inserts) if self.publication_create else (self.publication,)

    @property
    def publication_inserts(self) -> str:
        """For tables whose updates and deletes the server could not describe."""
        return f"{self.publication}_inserts"[:63]
