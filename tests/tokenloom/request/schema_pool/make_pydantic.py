"""Prints schemas as pydantic writes them for instructor and other extractors; needs pydantic and email-validator."""

# ruff: noqa: UP007, UP045  annotations as users of the library write them

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Optional, Union

import pydantic
from pydantic import BaseModel, ConfigDict, Field, create_model


class Color(enum.Enum):
    """An enumeration of texts."""

    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    """An enumeration of numbers."""

    LOW = 1
    HIGH = 2


class Address(BaseModel):
    """A postal address."""

    street: str = Field(max_length=80)
    city: str
    zip_code: str = Field(pattern=r"^\d{5}(-\d{4})?$")
    country: Annotated[str, Field(pattern=r"^[A-Z]{2}$")] = "NO"


class Node(BaseModel):
    """A tree."""

    name: str
    children: list["Node"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    breed: str | None = None


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", title="A closed object")
    a: int
    b: str = "x"


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


# One field each: what a user adds to a model and expects to be extracted.
FIELDS: dict[str, Any] = {
    "text": str,
    "integer": int,
    "number": float,
    "flag": bool,
    "nothing": None,
    "anything": Any,
    "bytes": bytes,
    "uuid": uuid.UUID,
    "uuid4": pydantic.UUID4,
    "uuid7": pydantic.UUID7,
    "path": pathlib.Path,
    "file_path": pydantic.FilePath,
    "directory_path": pydantic.DirectoryPath,
    "new_path": pydantic.NewPath,
    "email": pydantic.EmailStr,
    "name_email": pydantic.NameEmail,
    "url": pydantic.HttpUrl,
    "any_url": pydantic.AnyUrl,
    "postgres": pydantic.PostgresDsn,
    "secret": pydantic.SecretStr,
    "secret_bytes": pydantic.SecretBytes,
    "base64": pydantic.Base64Str,
    "json": pydantic.Json[dict[str, int]],
    "decimal": decimal.Decimal,
    "bounded_decimal": Annotated[decimal.Decimal, Field(max_digits=8, decimal_places=2)],
    "date": datetime.date,
    "past_date": pydantic.PastDate,
    "datetime": datetime.datetime,
    "aware_datetime": pydantic.AwareDatetime,
    "time": datetime.time,
    "duration": datetime.timedelta,
    "ipv4": ipaddress.IPv4Address,
    "ipv6_network": ipaddress.IPv6Network,
    "ip_any": pydantic.IPvAnyAddress,
    "set": set[str],
    "frozenset": frozenset[int],
    "list": list[str],
    "bounded_list": Annotated[list[int], Field(min_length=1, max_length=5)],
    "tuple": tuple[int, str],
    "long_tuple": tuple[float, ...],
    "sequence": Sequence[bool],
    "dict": dict[str, int],
    "dict_of_lists": dict[str, list[float]],
    "dict_by_enum": dict[Color, int],
    "dict_by_integer": dict[int, str],
    "dict_by_pattern": dict[Annotated[str, Field(pattern=r"^x-[a-z]+$")], str],
    "enum": Color,
    "int_enum": Level,
    "literal": Literal["a", "b", 3],
    "optional": Optional[str],
    "union": Union[int, str, None],
    "positive": pydantic.PositiveInt,
    "non_negative": pydantic.NonNegativeFloat,
    "multiple": Annotated[int, Field(multiple_of=5)],
    "open_range": Annotated[float, Field(gt=0, lt=1)],
    "finite": pydantic.FiniteFloat,
    "pattern": Annotated[str, Field(pattern=r"^[A-Z]{3}-\d{4}$")],
    "words": Annotated[str, Field(pattern=r"\bERR-\d+\b")],
    "stripped": Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=1, max_length=20)],
    "compiled": re.Pattern[str],
    "bytesize": pydantic.ByteSize,
    "strict": pydantic.StrictInt,
    "nested": Address,
    "nested_list": list[Address],
    "tree": Node,
    "pet": Pet,
    "pets": list[Pet],
    "closed": Closed,
    "open": Open,
    "either": Union[Closed, Address],
}


class Invoice(BaseModel):
    """An invoice as it is read from a scan."""

    number: str = Field(pattern=r"^INV-\d{4,8}$", examples=["INV-2041"])
    issued: datetime.date
    due: datetime.date | None = None
    customer: Address
    lines: list["Line"] = Field(min_length=1, max_length=50)
    currency: Literal["EUR", "USD", "NOK"]
    notes: set[str] = set()


class Line(BaseModel):
    text: str
    quantity: pydantic.PositiveInt
    price: Annotated[decimal.Decimal, Field(ge=0, decimal_places=2)]
    tax: float = Field(0.25, ge=0, le=1)


class Person(BaseModel):
    """A person and what is known of them."""

    id: pydantic.UUID4
    name: str = Field(description="Full name.", min_length=1)
    email: pydantic.EmailStr | None = None
    born: pydantic.PastDate | None = None
    tags: set[str] = Field(default_factory=set, max_length=10)
    home: pydantic.HttpUrl | None = None
    friends: list["Person"] = []


class Plan(BaseModel):
    """Steps towards a goal, each of which may depend on others."""

    goal: str
    steps: list["Step"]


class Step(BaseModel):
    id: int = Field(ge=0)
    action: Literal["search", "read", "write", "stop"]
    arguments: dict[str, str | int | float | bool | None] = {}
    needs: set[int] = set()


class Review(BaseModel):
    model_config = ConfigDict(regex_engine="python-re")
    sentiment: Literal["positive", "neutral", "negative"]
    score: Annotated[float, Field(ge=0, le=1, multiple_of=0.01)]
    quotes: list[Annotated[str, Field(max_length=200)]] = Field(max_length=3)
    language: Annotated[str, Field(pattern=r"^(?!xx)[a-z]{2}$")]


class Upload(BaseModel):
    source: pydantic.FilePath
    content: bytes
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    modes: frozenset[Literal["r", "w", "x"]]


def main() -> None:
    models = {name: create_model(name.title().replace("_", ""), value=(kind, ...)) for name, kind in FIELDS.items()}
    models |= {each.__name__.lower(): each for each in (Invoice, Person, Plan, Review, Upload)}
    for name, model in models.items():
        try:
            schema = model.model_json_schema()
        except pydantic.errors.PydanticInvalidForJsonSchema:
            continue
        print(json.dumps({"from": "pydantic", "name": name, "schema": schema}, sort_keys=False))
    for name in ("invoice", "person", "plan"):
        schema = models[name].model_json_schema(mode="serialization")
        print(json.dumps({"from": "pydantic", "name": f"{name}-as-written", "schema": schema}))


main()
