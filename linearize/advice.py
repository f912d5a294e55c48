"""What to tell somebody whose recipe is wrong: where, what, and what was probably meant."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any


def explain(item: Mapping[str, Any], places: Mapping[str, str], keys: Sequence[str]) -> str:
    """One line for one validation error: place, key, what is wrong, what is allowed."""
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    value = item["input"]
    if item["type"] == "extra_forbidden":
        message = f"{key}: unknown key; {_nearest_key(path, keys)}"
    elif item["type"] == "literal_error":
        allowed = item["ctx"]["expected"]
        message = f"{key}: {value!r} is not allowed; choose {allowed}"
        near = difflib.get_close_matches(str(value), re.findall("'(.*?)'", allowed), n=1)
        message += f" (did you mean {near[0]}?)" if near else ""
    elif item["type"] == "missing":
        message = f"{key}: is missing; add it"
    elif item["type"] == "value_error" and not path:
        message = str(item["ctx"]["error"])
        key = message.partition(":")[0]
    elif item["type"] == "value_error":
        message = f"{key}: {value!r} {item['ctx']['error']}"
    elif item["type"] == "model_type":
        message = f"{key}: {value!r} is not a section; write its keys below it"
    else:
        message = f"{key}: {value!r}: {item['msg'].lower()}"
    place = places.get(key)
    return f"{place}: {message}" if place else message


def _nearest_key(path: Sequence[str], keys: Sequence[str]) -> str:
    """Advice for an unknown key: the nearest of its section, else of all, else what is allowed."""
    prefix = ".".join(path[:-1]) + "." if len(path) > 1 else ""
    siblings = [key for key in keys if key.startswith(prefix) and "." not in key[len(prefix) :]]
    near = difflib.get_close_matches(prefix + path[-1], siblings, n=1, cutoff=0.75)
    if not near:
        names = {key.rpartition(".")[2]: key for key in reversed(keys)}
        near = [names[name] for name in difflib.get_close_matches(path[-1], names, n=1, cutoff=0.8)]
    if near:
        return f"did you mean {near[0]}?"
    where = prefix[:-1] or "a recipe"
    return f"allowed in {where}: {', '.join(key[len(prefix) :] for key in siblings)}"
