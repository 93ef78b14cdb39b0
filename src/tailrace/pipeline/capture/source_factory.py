"""Build sources and log maintenance from the settings, in one place.

Slot and publication are named after the log unless the settings name them. So two pipelines on one database never meet,
and a log always finds its own slot again.
"""

from __future__ import annotations

import functools

from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.changelog.format.schemas import known_tables
from tailrace.changelog.maintain.maintenance import LogMaintenance
from tailrace.changelog.read.reader import ChangeLog
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.source_settings import matches, matches_message, names_table
from tailrace.pipeline.tables.retention_holds import release_unwanted
from tailrace.transforms.transformed_source import TransformedCapture


def open_source(settings: PipelineSettings, log_id: str) -> PostgresCapture:
    """Return the pipeline's source for the log with this id."""
    source, slot, publication = settings.source, settings.source.slot, settings.source.publication
    wanted = PostgresSettings(
        url=source.url,
        wanted=functools.partial(matches, source),
        named=functools.partial(names_table, source),
        messages=functools.partial(matches_message, source) if source.messages else None,
        origins=source.origin == "any",
        invalid_text_replaced=source.invalid_text == "replace",
        standby=settings.load.standby,
        slot=slot.name or f"tailrace_{log_id}",
        slot_create=slot.create,
        recreate_slot=True,
        publication=publication.name or f"tailrace_{log_id}",
        publication_create=publication.create,
    )
    if not settings.transforms:
        return PostgresCapture(wanted)
    return TransformedCapture(wanted, settings.transforms)


def open_source_for_log(settings: PipelineSettings, log: ChangeLog, *, loads: bool = False) -> PostgresCapture:
    """Return the source with the tables that the log already knows.

    `loads` makes it ask the source for further tables too, which a process that loads needs.
    """
    source = open_source(settings, log.log_id)
    if isinstance(source, TransformedCapture) and source.discovers_tables:
        source.asks_types = loads
        log.schemas.load()
        source.learn_tables([*known_tables(log.path), *(version.schema for version in log.schemas.latest())])
    return source


def open_maintenance(settings: PipelineSettings) -> LogMaintenance:
    """Return the log maintenance for the tables that the settings name."""
    release_unwanted(settings)
    return LogMaintenance(settings.log.path, settings.log.maintenance_policy)
