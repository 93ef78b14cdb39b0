"""Settings to running objects, in one place.

Slot and publication are named after the log unless the settings name them, so two pipelines on one database
never meet and a log always finds its own slot again.
"""

from __future__ import annotations

import functools

from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.changelog.format.known_tables import expected
from tailrace.changelog.maintain.maintenance import Keeper
from tailrace.changelog.read.reader import ChangeLog
from tailrace.pipeline.config.settings import PipelineSettings, matches, matches_message, names
from tailrace.pipeline.tables.retention_holds import forget_unwanted
from tailrace.transforms.transformed_source import TransformedCapture


def open_source(settings: PipelineSettings, log_id: str) -> PostgresCapture:
    """The source of this pipeline, for the log of this id."""
    source, slot, publication = settings.source, settings.source.slot, settings.source.publication
    wanted = PostgresSettings(
        url=source.url,
        wanted=functools.partial(matches, source),
        named=functools.partial(names, source),
        messages=functools.partial(matches_message, source) if source.messages else None,
        origins=source.origin == "any",
        invalid_text_replaced=source.invalid_text == "replace",
        standby=settings.load.standby,
        slot=slot.name or f"tailrace_{log_id}",
        slot_create=slot.create,
        slot_anew=True,
        publication=publication.name or f"tailrace_{log_id}",
        publication_create=publication.create,
    )
    if not settings.transforms:
        return PostgresCapture(wanted)
    return TransformedCapture(wanted, settings.transforms)


def open_source_of(settings: PipelineSettings, log: ChangeLog, *, loads: bool = False) -> PostgresCapture:
    """The same, for whoever asks it about tables: it knows those that the log has seen. Who loads asks for others."""
    source = open_source(settings, log.log_id)
    if isinstance(source, TransformedCapture) and source.makes_tables:
        source.asks_types = loads
        log.schemas.load()
        source.know([*expected(log.path), *(version.schema for version in log.schemas.latest())])
    return source


def open_keeper(settings: PipelineSettings) -> Keeper:
    """The one who keeps the log in order, for the tables that the settings name."""
    forget_unwanted(settings)
    return Keeper(settings.log.path, settings.log.keeping)
