"""YAML as recipes are written in: texts and overrides to nested dicts, with every key's place.

No model, no schema: what the keys mean is said in `recipe`.
"""

import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """YAML with the scalars of version 1.2: `1e-3` is a number, `no` and `on` are words."""


_RESOLVED_HERE = {"tag:yaml.org,2002:" + name for name in ("bool", "int", "float", "timestamp")}
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _RESOLVED_HERE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
):
    Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})$"), list(_first)
    )


def parse(text: str, name: str, places: dict[str, str]) -> dict[str, Any]:
    """Nested dict of a YAML text; `places` receives "file:line" for every dotted key."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(
                f"{name}: a recipe is a mapping of sections (model, convert, ...), this is not"
            )
        _record(node, "", name, places)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{name}{line}: not valid YAML: {error.problem}") from None
    finally:
        loader.dispose()


def _record(node: yaml.MappingNode, prefix: str, name: str, places: dict[str, str]) -> None:
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        place = f"{name}:{key_node.start_mark.line + 1}"
        if key in places:
            raise ValueError(f"{place}: {key}: written twice, first at {places[key]}; keep one")
        places[key] = place
        if isinstance(value_node, yaml.MappingNode):
            _record(value_node, f"{key}.", name, places)


def apply_override(values: dict[str, Any], override: str, places: dict[str, str]) -> None:
    """Sets one `key=value` in nested dicts; a section that is null or absent is opened."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(
            f"{override!r} is not an override; write key=value, for example convert.window=32"
        )
    try:
        value = yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError:
        value = text
    *sections, last = key.split(".")
    inner = values
    for section in sections:
        if not isinstance(inner.get(section), dict):
            inner[section] = {}
        inner = inner[section]
    inner[last] = value
    places[key] = f"argument {override}"


def one_line(value: Any) -> str:
    """A value as one would write it in a recipe."""
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
