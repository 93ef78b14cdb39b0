"""Declarations of a user, and how mistakes in them are reported.

A settings file is read as a whole, and its reader reports every mistake with its line. Python code has no such line:
there a mistake is a `ConfigError` with its hint, whichever way the object is made.
"""

from __future__ import annotations

import difflib
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from tailrace.errors import ConfigError

ERROR_TEXTS = {
    "union_tag_invalid": "has an unknown `do`",
    "union_tag_not_found": "lacks `do`, which says what the rule does",
    "union_tag_type": "has an unknown `do`",
    "tuple_type": "must be a list",
    "string_type": "must be a string",
    "string_unicode": "must be a string",
    "string_too_long": "must have {max_length} characters or less",
    "string_pattern_mismatch": "is not a key id: use 1 to 64 letters, digits, `_`, `.` and `-`",
    "too_short": "must not be empty",
    "too_long": "must be {max_length} or less",
    "string_too_short": "must not be empty",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number",
    "int_from_float": "must be a whole number",
    "finite_number": "must be a whole number",
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be {le} or less",
    "path_type": "must be a file's path",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "invalid_key": "is not a known key",
    "missing": "is missing",
    "extra_forbidden": "is not a known key",
    "literal_error": "has a value that is not allowed: there are {expected}",
}
"""Our text for each of pydantic's error types. A test proves that the list is complete."""
HINT = "See docs/guides/transforms.md for all rules and their keys."


def error_text(detail: ErrorDetails) -> str:
    """Return what is wrong, in our words, without any value."""
    context = detail.get("ctx", {})
    if message := context.get("message"):
        return str(message)
    fields = {name: str(value).replace(" or ", " and ") for name, value in context.items()}
    return ERROR_TEXTS.get(detail["type"], "has a value that is not allowed").format_map(fields)


def declaration_error(message: str, hint: str) -> PydanticCustomError:
    """Return the error for a mistake in a rule, with a hint.

    The settings' reader shows both.
    """
    shown = message.encode("utf-8", "backslashreplace").decode()  # a file may have half of a surrogate pair
    return PydanticCustomError("refused", "{message}", {"message": shown, "hint": hint})


class Declaration(BaseModel):
    """A declared object. Errors about it contain no value: it could be a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, populate_by_name=True)

    def __init__(self, /, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _to_config_error(type(self), error) from error

    # Without this, pydantic calls __init__ for each part of a settings file and reports only the first mistake.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as BaseModel's own has it

    @classmethod
    def model_validate(cls, obj: Any, **given: Any) -> Self:
        try:
            return super().model_validate(obj, **given)
        except ValidationError as error:
            raise _to_config_error(cls, error) from error


def _to_config_error(kind: type[Declaration], error: ValidationError) -> ConfigError:
    first, *more = error.errors(include_url=False, include_input=False)
    path = [part for at, part in enumerate(first["loc"]) if not (at == 2 and first["loc"][0] == "rules")]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path if part != "[key]").lstrip(
        "."
    )
    wrong = error_text(first)
    if more:
        wrong += f" (and {len(more)} more problem{'s' if len(more) > 1 else ''})"
    do = kind.model_fields["do"].default if "do" in kind.model_fields else None
    named = {"rule": do} if isinstance(do, str) else {}
    return ConfigError(f"`{where}` {wrong}" if where else wrong, hint=_hint(kind, first), **named)


def _hint(kind: type[Declaration], detail: ErrorDetails) -> str:
    if hint := detail.get("ctx", {}).get("hint"):
        return str(hint)
    key = str(detail["loc"][-1]) if detail["loc"] else ""
    if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
        close = difflib.get_close_matches(key, kind.model_fields, n=1)
        return f"Did you mean `{close[0]}`?" if close else f"Use one of {', '.join(kind.model_fields)}."
    if detail["type"].startswith("union_tag"):
        return f"Use one of {detail['ctx']['expected_tags']}." if "expected_tags" in detail.get("ctx", {}) else HINT
    return HINT
