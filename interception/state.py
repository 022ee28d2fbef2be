"""The state channel: what a rollout's tools share, read and written over HTTP with the rollout's state secret.

GET  /state   the state as JSON, with its ETag
PUT  /state   replaces it: 204 with the new ETag; 400 with the reason; 412 if it is no longer what `If-Match` names
GET  /task    what the rollout is about, as JSON
"""

import hashlib
import json
import logging
import math
import re
import traceback
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import pydantic_core
from pydantic import (
    BaseModel,
    ConfigDict,
    JsonValue,
    Secret,
    SecretBytes,
    SecretStr,
    TypeAdapter,
    ValidationError,
)

from interception.turn import Failure

logger = logging.getLogger("interception")

WRITES_KEPT = 1024
"""Writes of a session whose `Idempotency-Key` is remembered: a retry comes within a minute."""

REASONS_TOLD = 5
"""Of why a value is not of the state's type."""

REASONS_LOOKED_AT = 1000
"""More are only counted: to put one into words takes 6 µs of the loop, and nearly 1 kB."""

MASK = "*" * 10
"""What pydantic writes of a secret that is not empty."""

ETAG_LIST = re.compile(r'\s*(?:W/)?"[^"\x00-\x20]*"\s*(?:,\s*(?:W/)?"[^"\x00-\x20]*"\s*)*')


JSON: TypeAdapter[Any] = TypeAdapter(JsonValue, config=ConfigDict(allow_inf_nan=False, ser_json_inf_nan="constants"))


class SharedState:
    """The state of one rollout, as its `RolloutSession` holds it, and what has been written to it.

    `value` may be changed and replaced by the host at any time; its tag is made of its content, so that a tool server
    that writes with `If-Match` notices that, too.
    """

    def __init__(self, value: Any, kind: Any) -> None:
        if kind is None and isinstance(value, BaseModel):
            kind = type(value)
        self._typed = kind is not None
        self._adapter = JSON if kind is None else _adapter_of(kind)
        self.value = self._initial(value)
        self.written()  # said now, not when the first tool asks
        self._writes: OrderedDict[str, tuple[bytes, str]] = OrderedDict()

    def _initial(self, value: Any) -> Any:
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            if value is None:
                try:
                    return self._adapter.validate_python({})  # nothing was given: a model's defaults
                except ValidationError:
                    raise ValueError("the state must be given: its type takes neither null nor {}") from None
            kind = "of its type" if self._typed else "JSON (or a pydantic model, or give state_type)"
            raise ValueError(f"the state is not {kind}: {reasons(error)}") from None

    def written(self) -> bytes:
        """The state as JSON. ValueError if the host made something of it that is not."""
        try:
            text = as_json(self._adapter, self.value)
        except Exception as error:  # noqa: BLE001 - whatever a type's own serializers raise
            raise ValueError(f"the state cannot be written as JSON: {error}") from None
        return text

    def put(self, body: bytes, if_match: str | None, key: str | None) -> str:
        """Replace the state by what `body` says; its new tag. Raises the `Failure` that says why not.

        Nothing of another request comes between the comparison and the change. A write that is sent again under its
        key is not made again.
        """
        wanted = _tags(if_match)
        value = self._read(body)
        digest = hashlib.sha256(f"{if_match!r}\n".encode() + body).digest()
        if key is not None and (known := self._writes.get(key)) is not None:
            if known[0] != digest:
                raise Failure(400, "this Idempotency-Key was used for another write: take a new key for each")
            return known[1]
        if wanted is not None and (present := tag(self.written())) not in wanted:
            raise Failure(412, "the state was changed meanwhile: read it again", {"ETag": present})
        before, self.value = self.value, value
        try:
            new = tag(self.written())
        except ValueError as error:  # what validates need not serialize
            self.value = before
            raise Failure(400, str(error)) from None
        if key is not None:
            self._writes[key] = digest, new
            if len(self._writes) > WRITES_KEPT:
                self._writes.popitem(last=False)
        return new

    def _read(self, body: bytes) -> Any:
        try:
            value = pydantic_core.from_json(body, allow_inf_nan=False)
            return self._adapter.validate_json(body) if self._typed else value
        except ValidationError as error:
            raise Failure(400, f"the state is not of its type: {reasons(error)}") from None
        except ValueError as error:
            raise Failure(400, f"the state is not JSON: {error}") from None
        except Exception as error:  # noqa: BLE001 - pydantic lets through what a validator raises beside ValueError
            raise Failure(400, f"the state is not of its type: {broken_off(error)}") from None


def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    try:
        return _kept_adapter(kind)
    except TypeError:  # some types cannot be hashed
        return TypeAdapter(kind)


@lru_cache(maxsize=64)
def _kept_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)  # takes 3 ms: too long for each of a thousand rollouts


def as_json(adapter: TypeAdapter[Any], value: Any) -> bytes:
    """`value` in the JSON that its type reads again. ValueError if there is none, also for NaN, infinities and
    `SecretStr`s."""
    text = adapter.dump_json(value, by_alias=True, round_trip=True, warnings="error")
    if b"NaN" in text or b"Infinity" in text:
        try:
            pydantic_core.from_json(text, allow_inf_nan=False)
        except ValueError:
            raise ValueError("there is a NaN or an infinity in it") from None
    # pydantic writes them as null, without a word, where the type's config does not say otherwise; and masks secrets.
    if (b"null" in text or MASK.encode() in text) and (
        lost := _is_lost(adapter.dump_python(value, by_alias=True, round_trip=True), json.loads(text))
    ):
        raise ValueError(lost)
    return text


def _is_lost(value: Any, text: Any) -> str:
    """What of `value` is null, or masked, in the same place of `text`. Empty if nothing is."""
    if isinstance(value, dict) and isinstance(text, dict) and len(value) == len(text):
        return next(filter(None, map(_is_lost, value.values(), text.values())), "")
    if isinstance(value, list | tuple) and isinstance(text, list):
        return next(filter(None, map(_is_lost, value, text)), "")
    if isinstance(value, set | frozenset) and isinstance(text, list):  # in whatever order
        return next(filter(None, (_is_lost(one, told) for told in (None, MASK) if told in text for one in value)), "")
    if text is None and isinstance(value, float) and not math.isfinite(value):
        return "there is a NaN or an infinity in it"
    if text == MASK and isinstance(value, Secret | SecretStr | SecretBytes) and value.get_secret_value() != MASK:
        return (
            f"there is a {type(value).__name__} in it, of which pydantic writes asterisks: what was read could not be "
            "written back. Make it a plain type, or give its field a field_serializer that tells the value"
        )
    return ""


def tag(text: bytes) -> str:
    """The ETag of a state: the same for the same content."""
    return f'"{hashlib.sha256(text).hexdigest()[:32]}"'


def broken_off(error: Exception) -> str:
    """Where a validator failed that should have said why a value is not valid, without the value."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    told = f"its validator raised {type(error).__name__}"
    logger.error("%s, which should be a ValueError, in %s, line %s", told, where.filename, where.lineno)
    return told


def reasons(error: ValidationError) -> str:
    """Why a value is not valid, without the value."""
    if (count := error.error_count()) > REASONS_LOOKED_AT:
        return f"{count} parts of it are not valid"
    found = error.errors(include_url=False, include_input=False, include_context=False)
    told = [": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in found[:REASONS_TOLD]]
    return "; ".join([*told, f"and {len(found) - REASONS_TOLD} more"] if len(found) > REASONS_TOLD else told)


def _tags(if_match: str | None) -> frozenset[str] | None:
    """The tags of an `If-Match`; None where any state will do."""
    if if_match is None or if_match.strip() == "*":
        return None
    if not ETAG_LIST.fullmatch(if_match):
        raise Failure(400, "If-Match must be the ETag of a GET /state, in its quotes, or *")
    # An edge that compresses answers makes their tags weak. Ours are of the content, so that this changes nothing.
    return frozenset(re.findall(r'"[^"]*"', if_match))
