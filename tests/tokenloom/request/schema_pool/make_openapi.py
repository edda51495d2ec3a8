"""Prints schemas as gateways of tools make them of an OpenAPI document: parameters and body of each operation, with the
components that they name; and bodies in the style of OpenAPI 3.0. Needs fastapi and email-validator."""

# ruff: noqa: B006  signatures as users of the library write them

import datetime
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Header, Path, Query, UploadFile
from pydantic import UUID4, BaseModel, EmailStr, Field, HttpUrl, SecretStr

app = FastAPI()


class Category(BaseModel):
    id: int
    name: str = Field(max_length=40)
    parent: "Category | None" = None


class Pet(BaseModel):
    id: UUID4
    name: str
    photos: list[HttpUrl] = []
    status: Literal["available", "sold"] = "available"
    tags: set[str] = set()
    category: Category | None = None


class Login(BaseModel):
    user: EmailStr
    password: SecretStr


class Card(BaseModel):
    type: Literal["card"]
    number: str = Field(pattern=r"^\d{12,19}$")


class Transfer(BaseModel):
    type: Literal["transfer"]
    iban: str = Field(pattern=r"^[A-Z]{2}\d{2}[A-Z0-9]{11,30}$")


class Order(BaseModel):
    pets: list[UUID4] = Field(min_length=1)
    pay: Annotated[Card | Transfer, Field(discriminator="type")]
    ship: datetime.date | None = None
    meta: dict[str, str | int] = {}


@app.get("/pets")
def list_pets(
    status: Literal["available", "sold"] | None = None, limit: Annotated[int, Query(le=100)] = 20
) -> None: ...
@app.post("/pets")
def add_pet(pet: Pet) -> None: ...
@app.put("/pets/{id}")
def replace_pet(id: UUID4, pet: Pet, match: Annotated[str | None, Header()] = None) -> None: ...
@app.patch("/pets/{id}")
def change_pet(id: UUID4, changes: dict[str, Any]) -> None: ...
@app.delete("/pets/{id}")
def delete_pet(id: Annotated[UUID4, Path(description="Whose.")], reason: str | None = None) -> None: ...
@app.post("/pets/{id}/photo")
def upload(id: UUID4, file: UploadFile, caption: Annotated[str, Body(max_length=80)] = "") -> None: ...
@app.post("/login")
def login(body: Login) -> None: ...
@app.post("/orders")
def order(body: Order) -> None: ...
@app.post("/orders/batch")
def orders(body: Annotated[list[Order], Body(min_length=1, max_length=10)]) -> None: ...
@app.get("/orders")
def find(since: datetime.datetime, ids: Annotated[list[UUID4], Query()] = []) -> None: ...
@app.post("/categories")
def add_category(body: Category) -> None: ...
@app.get("/search")
def search(q: Annotated[str, Query(min_length=2)], page: Annotated[int, Query(ge=1)] = 1) -> None: ...


TEXT: dict[str, Any] = {"type": "string"}
# What other generators write: the keywords of OpenAPI 3.0, which JSON Schema does not know or knows by other names.
OLDER: dict[str, Any] = {
    "user": {"required": ["id"], "properties": {"id": {"type": "integer", "format": "int64"}, "name": TEXT}},
    "nullable": {"type": "object", "properties": {"a": {**TEXT, "nullable": True}}},
    "password": {"type": "object", "properties": {"a": {**TEXT, "format": "password", "minLength": 8}}},
    "file": {"type": "object", "properties": {"a": {**TEXT, "format": "binary"}}},
    "byte": {"type": "object", "properties": {"a": {**TEXT, "format": "byte"}}},
    "float": {"type": "object", "properties": {"a": {"type": "number", "format": "float", "exclusiveMinimum": 0}}},
    "read-only": {"type": "object", "properties": {"id": {**TEXT, "readOnly": True}, "b": {**TEXT, "writeOnly": True}}},
    "inherited": {
        "allOf": [
            {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
            {"type": "object", "properties": {"name": TEXT}, "required": ["name"]},
        ]
    },
    "discriminated": {
        "oneOf": [{"$ref": "#/components/schemas/Cat"}, {"$ref": "#/components/schemas/Dog"}],
        "discriminator": {"propertyName": "kind"},
        "components": {
            "schemas": {
                "Cat": {"type": "object", "properties": {"kind": {"enum": ["cat"]}}, "required": ["kind"]},
                "Dog": {"type": "object", "properties": {"kind": {"enum": ["dog"]}}, "required": ["kind"]},
            }
        },
    },
    "overlapping": {"oneOf": [TEXT, {**TEXT, "format": "uri"}, {"type": "array", "items": TEXT}]},
    "unique": {"type": "array", "items": TEXT, "uniqueItems": True, "minItems": 1},
    "map": {"type": "object", "additionalProperties": {"type": "integer", "format": "int32"}},
    "free-form": {"type": "object", "additionalProperties": True, "minProperties": 1, "maxProperties": 4},
    "conditional": {
        "type": "object",
        "properties": {"kind": {"enum": ["card", "cash"]}, "number": TEXT},
        "if": {"properties": {"kind": {"const": "card"}}},
        "then": {"required": ["number"]},
    },
    "dependent": {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "dependentRequired": {"a": ["b"]}},
    "excluded": {"type": "object", "properties": {"a": {**TEXT, "not": {"enum": ["admin", "root"]}}}},
    "contained": {"type": "array", "items": {"type": "integer"}, "contains": {"const": 0}},
    "remote": {"type": "object", "properties": {"a": {"$ref": "https://example.com/schemas/address.json"}}},
    "example": {"type": "object", "properties": {"a": {**TEXT, "example": "x"}}, "example": {"a": "x"}},
    "deprecated": {"type": "object", "properties": {"a": {**TEXT, "deprecated": True, "x-order": 1}}},
    "date": {"type": "object", "properties": {"a": {**TEXT, "format": "date-time"}, "b": {**TEXT, "format": "date"}}},
    "pattern-keys": {"type": "object", "patternProperties": {"^x-": {}}, "additionalProperties": False},
    "wrong-type": {"type": "object", "properties": {"a": {"type": "any"}, "b": {"type": "file"}}},
    "contradiction": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
}


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    document = app.openapi()
    for methods in document["paths"].values():
        for operation in methods.values():
            parameters = {each["name"]: each["schema"] for each in operation.get("parameters", ())}
            required = [each["name"] for each in operation.get("parameters", ()) if each["required"]]
            for content in operation.get("requestBody", {}).get("content", {}).values():
                parameters["body"] = content["schema"]
                required.append("body")
            schema: dict[str, Any] = {"type": "object", "properties": parameters, "required": required}
            schemas = dict(components(document, schema))
            yield operation["operationId"], schema | ({"components": {"schemas": schemas}} if schemas else {})


def components(document: dict[str, Any], schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the components that a schema names, and those that they name."""
    waiting, seen = [json.dumps(schema)], set()
    while waiting:
        text = waiting.pop()
        for name, found in document["components"]["schemas"].items():
            if f'"#/components/schemas/{name}"' in text and name not in seen:
                seen.add(name)
                waiting.append(json.dumps(found))
                yield name, found


def main() -> None:
    for name, schema in (*operations(), *OLDER.items()):
        print(json.dumps({"from": "OpenAPI", "name": name, "schema": schema}))


main()
