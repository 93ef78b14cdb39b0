"""The table a reader asked for, found again when it gets another number or another name."""

from __future__ import annotations

from tailrace.changelog.format.schemas import LogSchemas
from tailrace.errors import ConfigError
from tailrace.model.schema import TableId
from tailrace.model.system_streams import SYSTEM_STREAMS


class TableSelector:
    """A table by name (`schema.table`, or that of a system stream), by its two parts, or by the log's number.

    Made again under the same name it has another number, which is taken too. One that was renamed is found by each
    name it had, and keeps its number. One that the log has no rows of is refused, unless they `may_come`.
    """

    def __init__(self, schemas: LogSchemas, table: TableId | str | int, *, may_come: bool = False) -> None:
        self._schemas = schemas
        schemas.load()
        if isinstance(table, int):
            found, name = [table], str(schemas.latest_of(table).schema.table)
        else:
            found, name = schemas.numbers_named(table), str(table)
        # System streams are always there, if only with nothing in them yet.
        if not found and not may_come and name not in SYSTEM_STREAMS:
            raise ConfigError(
                "the log has no rows of such a table",
                table=table,
                hint="`tailrace log FILE show` lists the tables it has; a name is `schema.table`, case included.",
            )
        self.name = name
        self.numbers = set(found)

    def matches(self, number: int, version: int) -> bool:
        """Whether rows of this table and version are asked for."""
        if number not in self.numbers and str(self._schemas.get(number, version).schema.table) == self.name:
            self.numbers.add(number)
        return number in self.numbers
