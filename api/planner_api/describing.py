"""What the description of the API says of a field: the docstring below it.

pydantic can take it over itself (``use_attribute_docstrings``), but only while a class is made, where it parses every
source file: the command line would start half as slowly again.  Here it is done once, for whoever asks for the
description."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema


class DescribedSchema(GenerateJsonSchema):
    """JSON schemas with the docstrings of fields as their descriptions."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        fields = made.get("properties", {})
        for name, text in field_texts(schema["cls"]).items():
            if name in fields:
                fields[name].setdefault("description", text)
        return made


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Field -> its docstring, also of the classes that the model inherits from."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            found |= _texts(kind.__module__).get(kind.__qualname__, {})
    return found


@cache
def _texts(module: str) -> Mapping[str, Mapping[str, str]]:
    """Class -> field -> docstring of a module's source."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {kind.name: dict(_below(kind.body)) for kind in tree.body if isinstance(kind, ast.ClassDef)}


def _below(body: list[ast.stmt]) -> list[tuple[str, str]]:
    """Of the statements of a class, every field that text stands below; in Markdown's spelling of code."""
    return [
        (field.target.id, " ".join(told.value.value.split()).replace("``", "`"))
        for field, told in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(told, ast.Expr)
        and isinstance(told.value, ast.Constant)
        and isinstance(told.value.value, str)
    ]
